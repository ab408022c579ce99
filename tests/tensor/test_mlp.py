"""ParallelMLP: `tensor.mlp`, against `tplab.plain.MLP` in one process, and against torch's DTensor."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.reference import assert_close, random
from tests.tensor.on_ranks import (
    assert_refused,
    assert_refused_on,
    assert_shards,
    on_ranks,
    refusals,
    results_of,
    train,
)
from tplab import launch, plain
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.mlp import ParallelMLP

HIDDEN, FFN, STEPS = 6, 16, 4
ACTIVATIONS = ["gelu", "gelu_tanh", "swiglu"]
OPTIONS = [{}, {"bias": False}, {"async_grad_allreduce": True}, {"skip_bias_add": True}]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-4}
CASES = [
    (activation, options, (2, 5), dtype)
    for activation, options, dtype in itertools.product(ACTIVATIONS, OPTIONS, TOLERANCES)
]
CASES += [
    (activation, options, shape, torch.float64)
    for activation, options in itertools.product(ACTIVATIONS, OPTIONS[:3:2])
    for shape in [(), (5,), (0,), (2, 0)]
]


def whole_state(activation, bias=True):
    shapes = plain.MLP(HIDDEN, FFN, activation, bias=bias).state_dict()
    return {name: random(tuple(t.shape), name) / 2 for name, t in shapes.items()}


def make(activation, group=None, dtype=torch.float64, **options):
    model = ParallelMLP(HIDDEN, FFN, activation, **options, group=group, dtype=dtype)
    load_full_state_dict(model, whole_state(activation, options.get("bias", True)), group)
    return model


def make_plain(activation, bias=True, dtype=torch.float64):
    model = plain.MLP(HIDDEN, FFN, activation, bias=bias, dtype=dtype)
    model.load_state_dict(whole_state(activation, bias))
    return model


def steps(model, shape=(2, 5), dtype=torch.float64, split_bias=False):
    """Several steps with momentum, and the first one's traffic."""
    x, dy = ([random((*shape, HIDDEN), name, step, dtype=dtype) for step in range(STEPS)] for name in ("x", "dy"))
    return train(model, [({"x": x}, dy) for x, dy in zip(x, dy, strict=True)], split_bias, lr=0.1, momentum=0.9)


def assert_equals_plain(results, activation, shape=(2, 5), bias=True, tolerance=1e-10):
    """`results`: what `steps` gave on the ranks of one group."""
    dtype, matrices = results[0]["out"].dtype, 2 if activation == "swiglu" else 1
    expected, _ = steps(make_plain(activation, bias, dtype), shape, dtype)
    cuts = {"up.weight": (0, matrices), "up.bias": (0, matrices), "down.weight": (1, 1)}
    assert_shards(results, expected, cuts, tolerance)


def _train_all(group):
    """All cases, and that a deep copy of the last model trains like it."""
    outcomes = []
    for activation, options, shape, dtype in CASES:
        model = make(activation, group, dtype, **options)
        twin = copy.deepcopy(model)
        outcomes.append(steps(model, shape, dtype, options.get("skip_bias_add", False)))
    (first, _), (second, _) = outcomes[-1], steps(twin, shape, dtype)
    assert all(torch.equal(first[name], second[name]) for name in first)
    return outcomes


@on_ranks
def test_equals_a_plain_mlp_with_one_all_reduce_of_bsh_elements_each_way(p, in_groups):
    for results in results_of(_train_all, p, in_groups):
        for number, (activation, options, shape, dtype) in enumerate(CASES):
            outcomes, sent = zip(*(result[number] for result in results), strict=True)
            one = [("all_reduce", "sum", torch.Size(shape).numel() * HIDDEN * dtype.itemsize)]
            assert all(calls == ([one, one] if len(results) > 1 else [[], []]) for calls in sent)
            assert_equals_plain(outcomes, activation, shape, options.get("bias", True), TOLERANCES[dtype])


def _with_dtensor():
    mesh, outcomes = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for activation in ("gelu", "gelu_tanh"):
        split = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for model in (make(activation), parallelize_module(make_plain(activation), mesh, split)):
            result, sent = steps(model)
            local = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in result.items()}
            outcomes.append((local, sent))
    return list(zip(outcomes[::2], outcomes[1::2], strict=True))


def test_outputs_gradients_steps_and_traffic_equal_dtensors():
    for outcomes in launch(_with_dtensor, 2):
        for (ours, our_traffic), (theirs, their_traffic) in outcomes:
            assert set(ours) == set(theirs)
            for name, value in theirs.items():
                assert_close(ours[name], value)
            assert our_traffic == their_traffic


def _constant(value, weight):
    nn.init.constant_(weight, value)


def _initial():
    """First values of gelu and swiglu; the means with init methods; what can't be drawn per rank."""
    whole = {}
    for activation in ("gelu", "swiglu"):
        torch.manual_seed(11)
        whole[activation] = full_state_dict(ParallelMLP(HIDDEN, FFN, activation))
    ones, twos = partial(_constant, 1.0), partial(_constant, 2.0)
    means = []
    for per_rank_init, methods in itertools.product((False, True), ({}, {"output_init_method": twos})):
        model = ParallelMLP(HIDDEN, FFN, "swiglu", init_method=ones, per_rank_init=per_rank_init, **methods)
        means.append([float(tensor.mean()) for tensor in full_state_dict(model).values()])
    draw, refuse = nn.init.normal_, nn.init.orthogonal_
    methods = [{"init_method": a, "output_init_method": b} for a, b in ((refuse, draw), (draw, refuse))]
    return whole, means, refusals(*(partial(ParallelMLP, HIDDEN, FFN, per_rank_init=True, **m) for m in methods))


@pytest.mark.parametrize("p", [2, 4])
def test_first_values_are_those_of_plain_linears_or_of_the_init_methods_for_every_p(p):
    results = launch(_initial, p)
    for whole, means, refused in results:
        for activation, state in whole.items():
            torch.manual_seed(11)
            expected = plain.MLP(HIDDEN, FFN, activation).state_dict()
            assert list(state) == list(expected)
            assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert means == [[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 2.0, 0.0]] * 2
        assert_refused([refused], *["per_rank_init can't draw a shard with this init_method"] * 2)


def test_options_reach_the_first_layer_which_is_four_times_as_wide_unless_told_otherwise():
    assert ParallelMLP(6, async_grad_allreduce=True).up.async_grad_allreduce
    assert ParallelMLP(6).up.weight.shape == (24, 6)
    assert ParallelMLP(6, activation="swiglu").up.weight.shape == (48, 6)


def test_a_width_that_cannot_be_divided_and_an_unknown_activation_are_refused():
    assert_refused_on(
        2,
        (lambda: ParallelMLP(6, 9), "out_features=9 can't be divided over 2 ranks"),
        (lambda: ParallelMLP(6, 9, "swiglu"), "out_features/2=9 can't be"),
        (lambda: ParallelMLP(6, 8, "relu"), "activation='relu' is not one of 'gelu', 'gelu_tanh', 'swiglu'"),
    )
