"""ParallelMLP: `tensor.mlp`, against `tplab.plain.MLP` in one process, and against torch's DTensor."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.reference import assert_close, random
from tests.tensor.on_ranks import GROUPS, assert_refused, assert_shards, own_group, refusals, train
from tplab import launch, plain
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.mlp import ParallelMLP

WORLD_SIZES = (1, 2, 4)
HIDDEN, FFN = 6, 16
BATCH, SEQUENCE = 2, 5
STEPS = 4


def whole_state(activation, bias=True, ffn=FFN):
    shapes = plain.MLP(HIDDEN, ffn, activation, bias=bias).state_dict()
    return {name: random(tuple(t.shape), name) / 2 for name, t in shapes.items()}


def make(activation, group=None, dtype=torch.float64, **options):
    model = ParallelMLP(HIDDEN, FFN, activation, **options, group=group, dtype=dtype)
    load_full_state_dict(model, whole_state(activation, options.get("bias", True)), group)
    return model


def make_plain(activation, bias=True, dtype=torch.float64):
    model = plain.MLP(HIDDEN, FFN, activation, bias=bias, dtype=dtype)
    model.load_state_dict(whole_state(activation, bias))
    return model


def steps(model, shape=(BATCH, SEQUENCE), dtype=torch.float64, split_bias=False):
    """Several steps with momentum, and the first one's traffic."""
    x, dy = ([random((*shape, HIDDEN), name, step, dtype=dtype) for step in range(STEPS)] for name in ("x", "dy"))
    return train(model, [({"x": x}, dy) for x, dy in zip(x, dy, strict=True)], split_bias, lr=0.1, momentum=0.9)


def assert_equals_plain(results, activation, shape=(BATCH, SEQUENCE), bias=True, tolerance=1e-12):
    """`results`: what `steps` gave on the ranks of one group."""
    dtype, matrices = results[0]["out"].dtype, 2 if activation == "swiglu" else 1
    expected, _ = steps(make_plain(activation, bias, dtype), shape, dtype)
    cuts = {"up.weight": (0, matrices), "up.bias": (0, matrices), "down.weight": (1, 1)}
    assert_shards(results, expected, cuts, tolerance)


def _train_all(cases):
    return [
        steps(make(activation, None, dtype, **options), shape, dtype, options.get("skip_bias_add", False))
        for activation, options, shape, dtype in cases
    ]


OPTIONS = [{}, {"bias": False}, {"async_grad_allreduce": True}, {"skip_bias_add": True}]
ACTIVATIONS = ["gelu", "gelu_tanh", "swiglu"]


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_equals_a_plain_mlp_with_one_all_reduce_of_bsh_elements_each_way(dtype, activation, p):
    results = launch(_train_all, p, args=([(activation, options, (BATCH, SEQUENCE), dtype) for options in OPTIONS],))
    assert len(results) == p
    one = [("all_reduce", "sum", BATCH * SEQUENCE * HIDDEN * dtype.itemsize)] if p > 1 else []
    for number, options in enumerate(OPTIONS):
        outcomes, sent = zip(*(result[number] for result in results), strict=True)
        assert list(sent) == [[one, one]] * p
        tolerance = 1e-12 if dtype == torch.float64 else 2**-4
        assert_equals_plain(outcomes, activation, bias=options.get("bias", True), tolerance=tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_inputs_of_one_two_and_three_dimensions_and_empty_batches_work(activation):
    shapes = [(), (5,), (2, 3), (0,), (2, 0)]
    cases = [(activation, options, shape, torch.float64) for shape in shapes for options in OPTIONS[:3:2]]
    results = launch(_train_all, 2, args=(cases,))
    for number, (_, _, shape, _) in enumerate(cases):
        assert_equals_plain([result[number][0] for result in results], activation, shape)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float32_differs_from_plain_by_rounding_only(activation):
    results = launch(_train_all, 4, args=([(activation, {}, (BATCH, SEQUENCE), torch.float32)],))
    assert_equals_plain([result[0][0] for result in results], activation, tolerance=1e-5)


def _train_in_groups(activation):
    group = own_group()
    model = make(activation, group)
    twin = copy.deepcopy(model)  # of a model in a group of its own
    (first, _), (second, _) = steps(model), steps(twin)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(full_state_dict(model, group)) == 4
    return first


def test_two_groups_side_by_side_are_two_models():
    results = launch(_train_in_groups, 4, args=("swiglu",))
    for members in GROUPS:
        assert_equals_plain([results[rank] for rank in members], "swiglu")


def _with_dtensor(activation):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    theirs = parallelize_module(make_plain(activation), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    outcomes = []
    for model in (make(activation), theirs):
        result, sent = steps(model)
        local = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in result.items()}
        outcomes.append((local, sent))
    return outcomes


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_outputs_gradients_steps_and_traffic_equal_dtensors(activation, p):
    for (ours, our_traffic), (theirs, their_traffic) in launch(_with_dtensor, p, args=(activation,)):
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            assert_close(ours[name], value)
        assert our_traffic == their_traffic


# Making one


def _initial(activation, **options):
    torch.manual_seed(11)
    return full_state_dict(ParallelMLP(HIDDEN, FFN, activation, **options))


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_first_values_are_those_of_plain_linears_with_the_same_seed_for_every_p(activation, p):
    torch.manual_seed(11)
    expected = plain.MLP(HIDDEN, FFN, activation).state_dict()
    for state in launch(_initial, p, args=(activation,)):
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def _ones(weight):
    nn.init.constant_(weight, 1.0)


def _twos(weight):
    nn.init.constant_(weight, 2.0)


@pytest.mark.parametrize("per_rank_init", [False, True])
def test_init_methods_fill_the_matrices_they_are_meant_for(per_rank_init):
    options = {"init_method": _ones, "per_rank_init": per_rank_init}
    for state in launch(_initial, 2, args=("swiglu",), kwargs=options):
        assert [float(tensor.mean()) for tensor in state.values()] == [1.0, 0.0, 1.0, 0.0]
    for state in launch(_initial, 2, args=("swiglu",), kwargs={**options, "output_init_method": _twos}):
        assert [float(tensor.mean()) for tensor in state.values()] == [1.0, 0.0, 2.0, 0.0]


def _without_the_whole_matrix():
    methods = {"init_method": nn.init.normal_, "output_init_method": nn.init.normal_}
    wrong = [methods | {which: nn.init.orthogonal_} for which in methods]
    return refusals(*(partial(ParallelMLP, HIDDEN, FFN, per_rank_init=True, **given) for given in wrong))


def test_per_rank_init_reaches_both_layers():
    assert_refused(
        launch(_without_the_whole_matrix, 2), *["per_rank_init can't draw a shard with this init_method"] * 2
    )


def test_the_overlap_is_handed_to_the_first_layer():
    assert ParallelMLP(6, async_grad_allreduce=True).up.async_grad_allreduce
    assert not ParallelMLP(6).up.async_grad_allreduce


def test_the_middle_is_four_times_as_wide_unless_told_otherwise():
    assert ParallelMLP(6).up.weight.shape == (24, 6)
    assert ParallelMLP(6, activation="swiglu").up.weight.shape == (48, 6)
    assert ParallelMLP(6, 10).down.weight.shape == (6, 10)


def test_without_a_process_group_it_is_a_plain_mlp_and_sends_nothing():
    for activation in ACTIVATIONS:
        result, sent = steps(make(activation))
        assert_equals_plain([result], activation)
        assert sent == [[], []]


def _uneven():
    return refusals(*(partial(ParallelMLP, 6, 10, activation) for activation in ("gelu", "swiglu", "relu")))


def test_a_width_that_cannot_be_divided_and_an_unknown_activation_are_refused():
    assert_refused(
        launch(_uneven, 4),
        "out_features=10 can't be divided over 4 ranks",
        "out_features/2=10 can't be",
        "activation='relu' is not one of 'gelu', 'gelu_tanh', 'swiglu'",
    )


# Compiled


def _compiled(backend):
    outcomes = []
    for activation in ("gelu", "swiglu"):
        model = make(activation, async_grad_allreduce=activation == "gelu")
        model.compile(backend=backend, fullgraph=True)
        outcomes.append(steps(model)[0])
    return outcomes


def test_compiled_in_one_graph_it_gives_the_same():
    """With aot_eager, which runs everything up to the compiler."""
    results = launch(_compiled, 2, args=("aot_eager",), timeout=240)
    for number, activation in enumerate(("gelu", "swiglu")):
        assert_equals_plain([result[number] for result in results], activation, tolerance=1e-10)
