"""ParallelMLP: `tensor.mlp`, against two nn.Linear and an activation in one process, and against torch's DTensor."""

import copy
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from tests.reference import assert_close, cut, random
from tplab import launch, record
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.mlp import ParallelMLP

WORLD_SIZES = (1, 2, 4)
HIDDEN, FFN = 6, 16
BATCH, SEQUENCE = 2, 5
STEPS = 4


class PlainMLP(nn.Module):
    """The same on one process, written without anything of tplab."""

    def __init__(self, activation, bias=True, ffn=FFN, dtype=torch.float64):
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(HIDDEN, 2 * ffn if activation == "swiglu" else ffn, bias, dtype=dtype)
        self.down = nn.Linear(ffn, HIDDEN, bias, dtype=dtype)

    def forward(self, x):
        y = self.up(x)
        if self.activation == "swiglu":
            half = y.shape[-1] // 2
            y = F.silu(y[..., :half]) * y[..., half:]
        else:
            y = F.gelu(y, approximate={"gelu": "none", "gelu_tanh": "tanh"}[self.activation])
        return self.down(y)


def whole_state(activation, bias=True, ffn=FFN):
    state = {name: random(tuple(t.shape), name) for name, t in PlainMLP(activation, bias, ffn).state_dict().items()}
    return {name: tensor / 2 for name, tensor in state.items()}


def batch(step, shape=(BATCH, SEQUENCE), dtype=torch.float64):
    return random((*shape, HIDDEN), "x", step, dtype=dtype), random((*shape, HIDDEN), "dy", step, dtype=dtype)


def train(model, shape=(BATCH, SEQUENCE), dtype=torch.float64, split_bias=False):
    """The first step's output and gradients, and the parameters after several steps with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    result = {}
    for step in range(STEPS):
        x, dy = batch(step, shape, dtype)
        x.requires_grad_()
        with record() as forward:
            out = model(x)
        if split_bias:
            out = out[0] if out[1] is None else out[0] + out[1]
        with record() as backward:
            out.backward(dy)
        if step == 0:
            result = {"out": out.detach(), "dx": x.grad}
            result |= {f"d{name}": p.grad.clone() for name, p in model.named_parameters()}
            traffic = [[(c.kind, c.bytes, c.op) for c in section] for section in (forward, backward)]
        optimizer.step()
        optimizer.zero_grad()
    return {**result, **{name: p.detach() for name, p in model.named_parameters()}}, traffic


def assert_equals_plain(results, activation, shape=(BATCH, SEQUENCE), bias=True, tolerance=1e-12):
    """`results`: what `train` gave on the ranks of one group."""
    dtype = results[0]["out"].dtype
    plain = PlainMLP(activation, bias, dtype=dtype)
    plain.load_state_dict(whole_state(activation, bias))
    expected, _ = train(plain, shape, dtype)
    p, matrices = len(results), 2 if activation == "swiglu" else 1
    cuts = {"up.weight": (0, matrices), "up.bias": (0, matrices), "down.weight": (1, 1)}
    for rank, result in enumerate(results):
        assert set(result) == set(expected)
        for name, whole in expected.items():
            parameter = name.removeprefix("d") if name.startswith(("dup", "ddown")) else name
            if parameter in cuts:
                dim, stride = cuts[parameter]
                whole = cut(whole, dim, rank, p, stride)
            assert_close(result[name], whole, tolerance)


def _train_all(cases):
    outcomes = []
    for activation, options, shape, dtype in cases:
        model = ParallelMLP(HIDDEN, FFN, activation, **options, dtype=dtype)
        load_full_state_dict(model, whole_state(activation, options.get("bias", True)))
        outcomes.append(train(model, shape, dtype, options.get("skip_bias_add", False)))
    return outcomes


OPTIONS = [{}, {"bias": False}, {"async_grad_allreduce": True}, {"skip_bias_add": True}]
ACTIVATIONS = ["gelu", "gelu_tanh", "swiglu"]


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_outputs_gradients_and_steps_equal_a_plain_mlp(activation, p):
    cases = [(activation, options, (BATCH, SEQUENCE), torch.float64) for options in OPTIONS]
    results = launch(_train_all, p, args=(cases,))
    assert len(results) == p
    for number, options in enumerate(OPTIONS):
        outcomes = [result[number][0] for result in results]
        assert_equals_plain(outcomes, activation, bias=options.get("bias", True))


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_traffic_is_one_all_reduce_of_bsh_elements_forward_and_one_backward(dtype, activation, p):
    cases = [(activation, options, (BATCH, SEQUENCE), dtype) for options in OPTIONS]
    one = [("all_reduce", BATCH * SEQUENCE * HIDDEN * dtype.itemsize, "sum")] if p > 1 else []
    for outcomes in launch(_train_all, p, args=(cases,)):
        assert [traffic for _, traffic in outcomes] == [[one, one]] * len(OPTIONS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_inputs_of_one_two_and_three_dimensions_and_empty_batches_work(activation):
    shapes = [(), (5,), (2, 3), (0,), (2, 0)]
    cases = [(activation, options, shape, torch.float64) for shape in shapes for options in OPTIONS[:3:2]]
    results = launch(_train_all, 2, args=(cases,))
    for number, (_, _, shape, _) in enumerate(cases):
        assert_equals_plain([result[number][0] for result in results], activation, shape)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-4)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_lower_precisions_differ_from_plain_by_rounding_only(activation, dtype, tolerance):
    cases = [(activation, options, (BATCH, SEQUENCE), dtype) for options in OPTIONS[:1]]
    results = launch(_train_all, 4, args=(cases,))
    assert_equals_plain([result[0][0] for result in results], activation, tolerance=tolerance)


def _train_in_groups(activation):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2]
    model = ParallelMLP(HIDDEN, FFN, activation, group=group, dtype=torch.float64)
    load_full_state_dict(model, whole_state(activation), group)
    twin = copy.deepcopy(model)  # of a model in a group of its own
    (first, traffic), (second, _) = train(model), train(twin)
    same = all(torch.equal(first[name], second[name]) for name in first)
    return first, same, traffic, len(full_state_dict(model, group))


def test_two_groups_side_by_side_are_two_models():
    results = launch(_train_in_groups, 4, args=("swiglu",))
    for members in ([0, 2], [1, 3]):
        assert_equals_plain([results[rank][0] for rank in members], "swiglu")
    assert all(same for _, same, _, _ in results)


def _with_dtensor(activation):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    theirs = PlainMLP(activation)
    theirs.load_state_dict(whole_state(activation))
    parallelize_module(theirs, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ours = ParallelMLP(HIDDEN, FFN, activation, dtype=torch.float64)
    load_full_state_dict(ours, whole_state(activation))
    outcomes = []
    for model in (ours, theirs):
        result, traffic = train(model)
        local = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in result.items()}
        outcomes.append((local, traffic))
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
    expected = PlainMLP(activation, dtype=torch.float32).state_dict()
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


def _refused_without_the_whole_matrix(which):
    try:
        ParallelMLP(HIDDEN, FFN, per_rank_init=True, **{"init_method": nn.init.normal_, which: nn.init.orthogonal_})
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("which", ["init_method", "output_init_method"])
def test_per_rank_init_reaches_both_layers(which):
    messages = launch(_refused_without_the_whole_matrix, 2, args=(which,))
    assert all("per_rank_init can't draw a shard with this init_method" in message for message in messages)


def test_the_overlap_is_handed_to_the_first_layer():
    assert ParallelMLP(6, async_grad_allreduce=True).up.async_grad_allreduce
    assert not ParallelMLP(6).up.async_grad_allreduce


def test_the_middle_is_four_times_as_wide_unless_told_otherwise():
    assert ParallelMLP(6).up.weight.shape == (24, 6)
    assert ParallelMLP(6, activation="swiglu").up.weight.shape == (48, 6)
    assert ParallelMLP(6, 10).down.weight.shape == (6, 10)


def test_without_a_process_group_it_is_a_plain_mlp_and_sends_nothing():
    for activation in ACTIVATIONS:
        model = ParallelMLP(HIDDEN, FFN, activation, dtype=torch.float64)
        load_full_state_dict(model, whole_state(activation))
        result, traffic = train(model)
        assert_equals_plain([result], activation)
        assert traffic == [[], []]


def _uneven(activation):
    try:
        ParallelMLP(6, 10, activation)
    except ValueError as error:
        return str(error)


def test_a_width_that_cannot_be_divided_and_an_unknown_activation_are_refused():
    assert all("out_features=10 can't be divided over 4 ranks" in error for error in launch(_uneven, 4, args=("gelu",)))
    assert all("out_features/2=10 can't be" in error for error in launch(_uneven, 4, args=("swiglu",)))
    with pytest.raises(ValueError, match="activation='relu' is not one of 'gelu', 'gelu_tanh', 'swiglu'"):
        ParallelMLP(6, activation="relu")


# Compiled


def _compiled(backend):
    outcomes = []
    for activation in ("gelu", "swiglu"):
        model = ParallelMLP(HIDDEN, FFN, activation, async_grad_allreduce=activation == "gelu", dtype=torch.float64)
        load_full_state_dict(model, whole_state(activation))
        model.compile(backend=backend, fullgraph=True)
        outcomes.append(train(model)[0])
    return outcomes


# inductor compiles C++ on a CPU; where there is no compiler, aot_eager still runs everything up to that
BACKENDS = ["aot_eager", *([pytest.param("inductor", marks=pytest.mark.slow)] if shutil.which("g++") else [])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_in_one_graph_it_gives_the_same(backend):
    results = launch(_compiled, 2, args=(backend,), timeout=240)
    for number, activation in enumerate(("gelu", "swiglu")):
        assert_equals_plain([result[number] for result in results], activation, tolerance=1e-10)
