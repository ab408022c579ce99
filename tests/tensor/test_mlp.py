"""ParallelMLP: `tensor.mlp`, against `tplab.plain.MLP` in one process."""

import itertools
from functools import partial

import torch
from torch import nn

from tests.reference import random
from tests.tensor.on_ranks import assert_refused, assert_trains_like, everywhere, refusals, with_random_weights
from tplab import launch, plain
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.full_state import full_state_dict
from tplab.tensor.mlp import ParallelMLP

HIDDEN, FFN = 6, 16
OPTIONS = [{}, {"bias": False}, {"async_grad_allreduce": True}, {"skip_bias_add": True}]
ACTIVATIONS = ["gelu", "gelu_tanh", "swiglu"]
CASES = list(itertools.product(ACTIVATIONS, OPTIONS, [(2, 5)]))
CASES += list(itertools.product(["gelu", "swiglu"], OPTIONS[:3:2], [(), (5,), (0,), (2, 0)]))


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


def test_equals_a_plain_mlp_with_one_all_reduce_of_bsh_elements_each_way():
    """tests/gpu/test_on_the_cpu.py has other dtypes."""
    everywhere(_train_all)


def _constant(value, weight):
    nn.init.constant_(weight, value)


def _on_two_ranks():
    """The methods reach their layers, and what is refused."""
    ones, twos = partial(_constant, 1.0), partial(_constant, 2.0)
    for methods, last in (({}, 1), ({"output_init_method": twos}, 2)):
        model = ParallelMLP(HIDDEN, FFN, "swiglu", init_method=ones, **methods)
        assert [float(tensor.mean()) for tensor in full_state_dict(model).values()] == [1, 0, last, 0]
    return refusals(
        lambda: ParallelMLP(6, 9),
        lambda: ParallelMLP(6, 9, "swiglu"),
        lambda: ParallelMLP(6, 8, "relu"),
    )


def test_init_methods_reach_both_layers_and_what_does_not_fit_is_refused():
    columns = "can't be divided over 2 ranks"
    of_gates, unknown = "out_features/2=9 can't be", "activation='relu' is not one of 'gelu', 'gelu_tanh', 'swiglu'"
    assert_refused(launch(_on_two_ranks, 2), f"out_features=9 {columns}", of_gates, unknown)


def test_options_reach_the_first_layer_which_is_four_times_as_wide_unless_told_otherwise():
    assert ParallelMLP(6, async_grad_allreduce=True).up.async_grad_allreduce
    assert ParallelMLP(6).up.weight.shape == (24, 6)
    assert ParallelMLP(6, activation="swiglu").up.weight.shape == (48, 6)
