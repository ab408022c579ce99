"""ParallelMLP: `tensor.mlp`, against `tplab.plain.MLP` in one process.

tests/gpt/test_model.py looks at the options that a GPT sets.
"""

import itertools

import torch

from tests.reference import random
from tests.tensor.on_ranks import assert_refuses, assert_trains_like, everywhere, with_random_weights
from tplab import plain
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.mlp import ParallelMLP

HIDDEN, FFN = 6, 16
OPTIONS = [{}, {"bias": False}, {"async_grad_allreduce": True}, {"skip_bias_add": True}]
ACTIVATIONS = ["gelu", "gelu_tanh", "swiglu"]
CASES = list(itertools.product(ACTIVATIONS, OPTIONS, [(2, 5)]))
CASES += list(itertools.product(["gelu", "swiglu"], OPTIONS[:3:2], [(), (0,)]))


def _train_all(group):
    for activation, options, shape in CASES:
        twin = plain.MLP(HIDDEN, FFN, activation, bias=options.get("bias", True), dtype=torch.float64)
        model = ParallelMLP(HIDDEN, FFN, activation, **options, group=group, dtype=torch.float64)
        tensors = [[random((*shape, HIDDEN), name, step) for name in ("x", "dy")] for step in (0, 1)]
        sent = assert_trains_like(
            with_random_weights(twin), model, [({"x": x}, dy) for x, dy in tensors], group,
            split_bias=options.get("skip_bias_add", False), lr=0.1, momentum=0.9,
        )  # fmt: skip
        one = [("all_reduce", "sum", torch.Size(shape).numel() * HIDDEN * 8)]
        assert sent == ([one, one] if rank_and_size(group)[1] > 1 else [[], []])


def _refuse():
    assert_refuses(
        (lambda: ParallelMLP(6, 9, "swiglu"), "out_features/2=9", "4 ranks"),
        (lambda: ParallelMLP(6, 8, "relu"), "activation='relu'", "'gelu', 'gelu_tanh', 'swiglu'"),
    )


def _everything(group):
    _train_all(group)
    if group is None and rank_and_size()[1] == 4:
        _refuse()


def test_equals_a_plain_mlp_with_one_all_reduce_of_bsh_elements_each_way():
    """tests/gpu/test_on_the_cpu.py has other dtypes."""
    everywhere(_everything)
