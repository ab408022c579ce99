"""ColumnParallelLinear and RowParallelLinear: `tplab.tensor.linear`, against nn.Linear on one process, in float64.

`SPECIFICATION` has a row for each set of options. The ranks run the layer; the test runs the plain twin, cuts its
values with torch.chunk as the row says, and compares every rank with its part. The bias is never zero and upstream
gradients are random, because both would hide mistakes otherwise.
"""

import pickle
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.reference import assert_close, cut, random
from tests.tensor.on_ranks import GROUPS, assert_refused, assert_shards, own_group, refusals, train
from tplab import launch, record
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.linear import ColumnParallelLinear, RowParallelLinear

WORLD_SIZES = (1, 2, 4)
IN, OUT = 12, 24  # each divisible by stride * p for the strides and p used here, and different, so that a mix-up shows
ROWS = 5
X, Y, B = 8 * ROWS * IN, 8 * ROWS * OUT, 8 * OUT  # bytes of x, y and the bias
STEPS = 3
LEARNING_RATE = 0.1
SLICE, FULL = -1, None  # the dimension along which a rank has its part of x or y, or none


class Spec(NamedTuple):
    """One way to build a layer: what a rank is given and returns, and the collectives it enters if p > 1."""

    layer: type
    options: dict
    x: int | None
    y: int | None
    forward: tuple = ()
    backward: tuple = ()

    def __str__(self) -> str:
        return f"{self.layer.__name__}({', '.join(f'{name}={value}' for name, value in self.options.items())})"


COLUMN, ROW = ColumnParallelLinear, RowParallelLinear
SUM_X, SUM_Y = ("all_reduce", "sum", X), ("all_reduce", "sum", Y)
GATHER_X, GATHER_Y, GATHER_B = (("all_gather", None, size) for size in (X, Y, B))
# fmt: off
SPECIFICATION = [
    #    layer   options                                                        x      y      forward      backward
    Spec(COLUMN, {},                                                            FULL,  SLICE, (),          (SUM_X,)),
    Spec(COLUMN, {"bias": False},                                               FULL,  SLICE, (),          (SUM_X,)),
    Spec(COLUMN, {"gather_output": True},                                       FULL,  FULL,  (GATHER_Y,), (SUM_X,)),
    Spec(COLUMN, {"stride": 2},                                                 FULL,  SLICE, (),          (SUM_X,)),
    Spec(COLUMN, {"stride": 3},                                                 FULL,  SLICE, (),          (SUM_X,)),
    Spec(COLUMN, {"stride": 2, "gather_output": True},                          FULL,  FULL,  (GATHER_Y,), (SUM_X,)),
    Spec(COLUMN, {"stride": 3, "gather_output": True, "skip_bias_add": True},   FULL,  FULL,  (GATHER_Y, GATHER_B), (SUM_X,)),  # noqa: E501
    Spec(COLUMN, {"skip_bias_add": True},                                       FULL,  SLICE, (),          (SUM_X,)),
    Spec(COLUMN, {"skip_bias_add": True, "bias": False},                        FULL,  SLICE, (),          (SUM_X,)),
    Spec(COLUMN, {"async_grad_allreduce": True},                                FULL,  SLICE, (),          (SUM_X,)),
    Spec(COLUMN, {"async_grad_allreduce": True, "bias": False},                 FULL,  SLICE, (),          (SUM_X,)),
    Spec(COLUMN, {"async_grad_allreduce": True, "stride": 2, "gather_output": True}, FULL, FULL, (GATHER_Y,), (SUM_X,)),
    Spec(COLUMN, {"async_grad_allreduce": True, "skip_bias_add": True},         FULL,  SLICE, (),          (SUM_X,)),
    Spec(ROW,    {},                                                            SLICE, FULL,  (SUM_Y,),    ()),
    Spec(ROW,    {"bias": False},                                               SLICE, FULL,  (SUM_Y,),    ()),
    Spec(ROW,    {"input_is_parallel": False},                                  FULL,  FULL,  (SUM_Y,),    (GATHER_X,)),
    Spec(ROW,    {"stride": 3},                                                 SLICE, FULL,  (SUM_Y,),    ()),
    Spec(ROW,    {"stride": 3, "input_is_parallel": False, "bias": False},      FULL,  FULL,  (SUM_Y,),    (GATHER_X,)),
    Spec(ROW,    {"skip_bias_add": True},                                       SLICE, FULL,  (SUM_Y,),    ()),
    Spec(ROW,    {"skip_bias_add": True, "bias": False},                        SLICE, FULL,  (SUM_Y,),    ()),
    Spec(ROW,    {"skip_bias_add": True, "input_is_parallel": False},           FULL,  FULL,  (SUM_Y,),    (GATHER_X,)),
]
# fmt: on
PARAMETERS = {COLUMN: {"weight": 0, "bias": 0}, ROW: {"weight": 1, "bias": FULL}}  # the dimension that is cut


def weights(bias: bool = True, in_features: int = IN, out_features: int = OUT) -> dict[str, Tensor]:
    state = {"weight": random((out_features, in_features), "weight") / 4}
    return {**state, "bias": random((out_features,), "bias")} if bias else state


class Run(NamedTuple):
    """How a layer is run: the sizes, the leading dimensions of x, the dtype."""

    features: tuple[int, int] = (IN, OUT)
    batch_shape: tuple[int, ...] = (ROWS,)
    dtype: torch.dtype = torch.float64


USUAL = Run()


def batches(run, part=lambda tensor, name: tensor):
    for step in range(STEPS):
        x, dy = (random((*run.batch_shape, n), name, step) for n, name in zip(run.features, ("x", "dy"), strict=True))
        yield {"x": part(x, "x").to(run.dtype)}, part(dy, "dy").to(run.dtype)


def _train(spec, run=USUAL, group=None):
    """A few SGD steps on this rank, and the first step's traffic."""
    rank, p, stride = dist.get_rank(group), dist.get_world_size(group), spec.options.get("stride", 1)
    layer = spec.layer(*run.features, **spec.options, group=group, dtype=run.dtype)
    load_full_state_dict(layer, weights(spec.options.get("bias", True), *run.features), group)
    dims = {"x": spec.x, "dy": spec.y}

    def part(tensor, name):
        return tensor if dims[name] is FULL else cut(tensor, dims[name], rank, p, stride)

    return train(layer, batches(run, part), spec.options.get("skip_bias_add", False), lr=LEARNING_RATE)


def assert_equals_plain(results, spec, run=USUAL, tolerance=1e-12):
    """`results`: of `_train` on the ranks of one group."""
    state = weights(spec.options.get("bias", True), *run.features)
    plain = nn.Linear(*run.features, bias="bias" in state, dtype=run.dtype)
    plain.load_state_dict(state)
    dims = {"out": spec.y, "dx": spec.x} | PARAMETERS[spec.layer]
    cuts = {name: (dim, spec.options.get("stride", 1)) for name, dim in dims.items()}
    expected, _ = train(plain, batches(run), lr=LEARNING_RATE)
    assert_shards([result for result, _ in results], expected, cuts, tolerance)


def _train_all(cases):
    return [_train(*case) for case in cases]


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_outputs_gradients_steps_and_traffic_equal_a_plain_linear_for_all_options(p):
    results = launch(_train_all, p, args=([(spec,) for spec in SPECIFICATION],))
    assert len(results) == p
    for number, spec in enumerate(SPECIFICATION):
        assert_equals_plain([result[number] for result in results], spec)
        for result in results:
            sent = [list(spec.forward), list(spec.backward)]
            assert result[number][1] == (sent if p > 1 else [[], []]), spec


@pytest.mark.parametrize("spec", [Spec(COLUMN, {"stride": 2}, FULL, SLICE), Spec(ROW, {"stride": 2}, SLICE, FULL)])
def test_stride_2_cuts_rows_too(spec):
    run = Run(features=(8, 8))
    results = launch(_train_all, 2, args=([(spec, run)],))
    assert_equals_plain([result[0] for result in results], spec, run)


@pytest.mark.parametrize("p", [2, 4])
def test_inputs_of_one_two_and_three_dimensions_and_empty_batches_work(p):
    options = ({}, {"async_grad_allreduce": True}, {"gather_output": True}, {"input_is_parallel": False})
    specs = [spec for spec in SPECIFICATION if spec.options in options]
    assert len(specs) == 5
    cases = [(spec, Run(batch_shape=shape)) for spec in specs for shape in [(), (5,), (2, 3), (0,), (2, 0)]]
    results = launch(_train_all, p, args=(cases,))
    for number, case in enumerate(cases):
        assert_equals_plain([result[number] for result in results], *case)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
def test_lower_precisions_differ_from_plain_by_rounding_only(dtype, tolerance):
    run = Run(dtype=dtype)
    results = launch(_train_all, 4, args=([(spec, run) for spec in SPECIFICATION],))
    for number, spec in enumerate(SPECIFICATION):
        assert_equals_plain([result[number] for result in results], spec, run, tolerance)


def _train_in_groups(specs):
    group = own_group()
    return [_train(spec, group=group) for spec in specs]


def test_two_groups_side_by_side_are_two_layers():
    results = launch(_train_in_groups, 4, args=(SPECIFICATION,))
    for members in GROUPS:
        for number, spec in enumerate(SPECIFICATION):
            assert_equals_plain([results[rank][number] for rank in members], spec)


def _bias_returned(spec):
    layer = spec.layer(IN, OUT, **spec.options, dtype=torch.float64)
    load_full_state_dict(layer, weights())
    x = random((5, IN), "x")
    return layer(x if spec.x is FULL else cut(x, -1, dist.get_rank(), 2))


@pytest.mark.parametrize(
    "spec",
    [
        Spec(COLUMN, {"skip_bias_add": True}, FULL, SLICE),
        Spec(COLUMN, {"skip_bias_add": True, "gather_output": True}, FULL, FULL),
        Spec(ROW, {"skip_bias_add": True}, SLICE, FULL),
    ],
    ids=str,
)
def test_skip_bias_add_returns_the_bias_in_the_shape_of_the_output(spec):
    y, bias = random((5, IN), "x") @ weights()["weight"].T, weights()["bias"]
    for rank, (out, returned) in enumerate(launch(_bias_returned, 2, args=(spec,))):
        assert_close(out, y if spec.y is FULL else cut(y, -1, rank, 2))
        assert_close(returned, bias if spec.y is FULL else cut(bias, 0, rank, 2))


# Layouts, use and re-use


def _layouts(async_grad_allreduce):
    """x transposed and expanded, dy transposed, expanded and with gaps, through column, then row."""
    rank = dist.get_rank()
    column = ColumnParallelLinear(IN, OUT, async_grad_allreduce=async_grad_allreduce, dtype=torch.float64)
    row = RowParallelLinear(OUT, IN, dtype=torch.float64)
    load_full_state_dict(column, weights())
    load_full_state_dict(row, weights(in_features=OUT, out_features=IN))
    outcomes = []
    for x in _inputs():
        for dy in _upstream():
            x = x.detach().requires_grad_()
            before = x.detach().clone(), dy.clone()
            y = column(x)
            part = y.detach().mT.contiguous().mT.requires_grad_()  # the row layer's input transposed
            z = row(part)
            (dpart,) = torch.autograd.grad(z, part, dy)
            (dx,) = torch.autograd.grad(y, x, dpart.mT.contiguous().mT)
            (dx_of_sum,) = torch.autograd.grad(column(x).sum(), x)
            assert torch.equal(x, before[0])
            assert torch.equal(dy, before[1])
            outcomes.append((z.detach(), dx, dx_of_sum, rank))
    return outcomes


def _inputs():
    return [random((IN, 6), "x").T, random((IN,), "x").expand(6, IN), random((6, 2 * IN), "x")[:, ::2]]


def _upstream():
    return [random((IN, 6), "dy").T, random((), "dy").expand(6, IN), random((6, 2 * IN), "dy")[:, 1::2]]


@pytest.mark.parametrize("async_grad_allreduce", [False, True])
def test_transposed_expanded_and_strided_inputs_and_gradients_work(async_grad_allreduce):
    up, down = weights(), weights(in_features=OUT, out_features=IN)
    expected = []
    for x in _inputs():
        for dy in _upstream():
            z = (x @ up["weight"].T + up["bias"]) @ down["weight"].T + down["bias"]
            expected.append((z, dy @ down["weight"] @ up["weight"], up["weight"].sum(0).expand(6, IN)))
    results = launch(_layouts, 2, args=(async_grad_allreduce,))
    assert [outcomes[0][3] for outcomes in results] == [0, 1]
    for outcomes in results:
        for (z, dx, dx_of_sum, _), (z_plain, dx_plain, dx_of_sum_plain) in zip(outcomes, expected, strict=True):
            assert_close(z, z_plain)
            assert_close(dx, dx_plain)
            assert_close(dx_of_sum, dx_of_sum_plain)


def used_several_times(column, row, x):
    return row(column(row(column(x)))) + column(x)


def one_after_the_other(column, row, x):
    return row(torch.tanh(column(x)))


def compiled_in_one_graph(column, row, x):
    return torch.compile(nn.Sequential(column, nn.Tanh(), row), backend="aot_eager", fullgraph=True)(x)


def under_autocast(column, row, x):
    with torch.autocast("cpu", torch.bfloat16):
        return row(torch.tanh(column(x)))


class Program(NamedTuple):
    """A program of a column layer and a row layer, on the ranks and on one process."""

    parallel: Callable
    plain: Callable
    width: int  # between the layers
    column: dict
    row: dict
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12


WHOLE_BETWEEN = {"gather_output": True}, {"input_is_parallel": False}
PROGRAMS = [
    Program(used_several_times, used_several_times, IN, *WHOLE_BETWEEN),
    Program(compiled_in_one_graph, one_after_the_other, OUT, {"stride": 2, **WHOLE_BETWEEN[0]}, WHOLE_BETWEEN[1]),
    Program(under_autocast, under_autocast, OUT, {}, {}, torch.float32, 2**-6),
]


def outcome(program, column, row, dtype):
    """The output, and the gradients of the input and of all parameters."""
    x = random((5, IN), "x", dtype=dtype).requires_grad_()
    y = program(column, row, x)
    y.backward(random((5, IN), "dy", dtype=y.dtype))
    gradients = {name: p.grad for name, p in nn.ModuleDict({"column": column, "row": row}).named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}


def _run_program(program, async_grad_allreduce):
    overlap = {"async_grad_allreduce": async_grad_allreduce}
    column = ColumnParallelLinear(IN, program.width, **program.column, **overlap, dtype=program.dtype)
    row = RowParallelLinear(program.width, IN, **program.row, dtype=program.dtype)
    load_full_state_dict(column, weights(out_features=program.width))
    load_full_state_dict(row, weights(in_features=program.width, out_features=IN))
    return outcome(program.parallel, column, row, program.dtype)


@pytest.mark.parametrize("async_grad_allreduce", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.parallel.__name__)
def test_two_layers_in_a_program_have_the_output_and_gradients_of_plain_layers(program, async_grad_allreduce):
    column, row = (nn.Linear(*size, dtype=program.dtype) for size in ((IN, program.width), (program.width, IN)))
    column.load_state_dict(weights(out_features=program.width))
    row.load_state_dict(weights(in_features=program.width, out_features=IN))
    expected = outcome(program.plain, column, row, program.dtype)
    stride = program.column.get("stride", 1)
    cuts = {"column.weight": (0, stride), "column.bias": (0, stride), "row.weight": (1, 1)}
    assert_shards(launch(_run_program, 2, args=(program, async_grad_allreduce)), expected, cuts, program.tolerance)


# The overlap


class Order(TorchDispatchMode):
    """Writes down the operations in their order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def _order_of_backward(async_grad_allreduce):
    layer = ColumnParallelLinear(IN, OUT, async_grad_allreduce=async_grad_allreduce)
    y = layer(torch.randn(5, IN, requires_grad=True))
    with Order() as order, record() as section:
        y.backward(torch.randn_like(y))
    return [name for name in order.names if name in ("mm", "allreduce_")], section[0].end is not None


def test_the_async_all_reduce_starts_before_the_weight_gradient_and_is_waited_for():
    assert list(launch(_order_of_backward, 2, args=(True,))) == [(["mm", "allreduce_", "mm"], True)] * 2
    assert list(launch(_order_of_backward, 2, args=(False,))) == [(["mm", "mm", "allreduce_"], True)] * 2


def _frozen():
    outcomes = {}
    for async_grad_allreduce in (False, True):
        layer = ColumnParallelLinear(IN, OUT, async_grad_allreduce=async_grad_allreduce, dtype=torch.float64)
        load_full_state_dict(layer, weights())
        with record() as section:
            layer(random((5, IN), "x")).sum().backward()  # x needs no gradient
        quiet = len(section) == 0
        layer.requires_grad_(False)
        layer.weight.grad = None
        x = random((5, IN), "x").requires_grad_()
        layer(x).sum().backward()
        outcomes[async_grad_allreduce] = quiet, x.grad, layer.weight.grad
    return outcomes


def test_only_the_gradients_that_are_wanted_are_computed_and_sent():
    for outcomes in launch(_frozen, 2):
        for quiet, dx, dw in outcomes.values():
            assert quiet
            assert dw is None
            assert_close(dx, weights()["weight"].sum(0).expand(5, IN))


# Making layers


def test_without_a_process_group_a_layer_is_a_plain_linear_and_sends_nothing():
    plain = nn.Linear(IN, OUT)
    for layer_class in (ColumnParallelLinear, RowParallelLinear):
        for options in ({}, {"async_grad_allreduce": True}) if layer_class is ColumnParallelLinear else ({},):
            layer = layer_class.from_linear(plain, **options)
            with record() as section:
                out = layer(torch.ones(5, IN))
            assert torch.allclose(out, plain(torch.ones(5, IN)), rtol=0, atol=1e-6)
            assert len(section) == 0
            assert list(layer.state_dict()) == list(plain.state_dict())


def _sizes_and_attributes():
    column, row = ColumnParallelLinear(IN, OUT, stride=3), RowParallelLinear(IN, OUT, bias=False, stride=3)
    holds = [(name, tuple(t.shape), t.tensor_parallel) for name, t in column.named_parameters()]
    holds += [(name, tuple(t.shape), t.tensor_parallel) for name, t in row.named_parameters()]
    return holds, hasattr(RowParallelLinear(IN, OUT).bias, "tensor_parallel"), repr(row)


def test_a_rank_holds_only_its_part_and_the_parameters_say_which():
    for rank, (holds, row_bias_is_cut, text) in enumerate(launch(_sizes_and_attributes, 2)):
        assert [(name, shape, (cut.dim, cut.stride)) for name, shape, cut in holds] == [
            ("weight", (OUT // 2, IN), (0, 3)),
            ("bias", (OUT // 2,), (0, 3)),
            ("weight", (OUT, IN // 2), (1, 3)),
        ]
        assert not row_bias_is_cut
        assert f"in_features=12, out_features=24, bias=False, rank {rank} of 2 holds [24, 6]" in text


def _refusals():
    return refusals(
        lambda: ColumnParallelLinear(12, 10),
        lambda: RowParallelLinear(10, 12),
        lambda: ColumnParallelLinear(12, 20, stride=2, bias=False),
        lambda: ColumnParallelLinear(12, 16, stride=3),
        lambda: RowParallelLinear(12, 12, stride=0),
        lambda: RowParallelLinear(12, 8)(torch.ones(5, 12)),
        lambda: RowParallelLinear(12, 8, input_is_parallel=False)(torch.ones(5, 3)),
        lambda: ColumnParallelLinear(12, 8)(torch.ones(5, 3)),
        lambda: ColumnParallelLinear(12, 8)(torch.tensor(1.0)),
    )


def test_sizes_that_do_not_fit_are_refused_with_the_numbers():
    results = launch(_refusals, 4)
    assert_refused(
        results,
        "out_features=10 can't be divided over 4 ranks: each rank takes whole columns of A",
        "in_features=10 can't be divided over 4 ranks: each rank takes whole rows of A",
        "out_features/2=10 can't be divided over 4 ranks",
        "out_features=16 can't be cut into stride=3 equal blocks",
        "in_features=12 can't be cut into stride=0 equal blocks",
        "x [5, 12] should be [.., 3] with input_is_parallel=True, in_features=12 and 4 ranks",
        "x [5, 3] should be [.., 12] with input_is_parallel=False",
        "x [5, 3] should be [.., 12]: each rank needs all of x",
        "x [] should be [.., 12]",
    )
    assert all("Use p in 1, 2, 5, 10." in messages[0] for messages in results)


def _from_and_to_linear(plain):
    outcomes = []
    for layer_class, options in [
        (ColumnParallelLinear, {"stride": 2, "gather_output": True}),
        (RowParallelLinear, {"stride": 3, "input_is_parallel": False}),
    ]:
        random_state = torch.get_rng_state()
        layer = layer_class.from_linear(plain, **options)
        assert torch.equal(random_state, torch.get_rng_state())  # no random number was spent
        outcomes.append((layer(random((5, IN), "x")), layer.to_linear(), layer.weight.requires_grad, layer.training))
    return outcomes


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_trained_linear_becomes_shards_and_comes_back_the_same(bias, p):
    plain = nn.Linear(IN, OUT, bias, dtype=torch.float64).requires_grad_(False).eval()
    expected = plain(random((5, IN), "x"))
    for outcomes in launch(_from_and_to_linear, p, args=(plain,)):
        for out, back, requires_grad, training in outcomes:
            assert_close(out, expected)
            assert torch.equal(back.weight, plain.weight)
            assert back.bias is None if not bias else torch.equal(back.bias, plain.bias)
            assert not any([requires_grad, training, back.weight.requires_grad, back.training])


def _initial(stride, init_method=None, **options):
    torch.manual_seed(7)
    layers = [
        ColumnParallelLinear(IN, OUT, stride=stride, init_method=init_method, **options),
        RowParallelLinear(IN, OUT, stride=stride, init_method=init_method, **options),
    ]
    return [(layer.weight.detach(), layer.bias.detach()) for layer in layers], torch.rand(3)


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("stride", [1, 3])
def test_the_first_values_are_those_of_nn_linear_with_the_same_seed_for_every_p(stride, p):
    torch.manual_seed(7)
    column, row = nn.Linear(IN, OUT), nn.Linear(IN, OUT)
    afterwards = torch.rand(3)
    for rank, (layers, rank_afterwards) in enumerate(launch(_initial, p, args=(stride,))):
        (column_weight, column_bias), (row_weight, row_bias) = layers
        assert torch.equal(column_weight, cut(column.weight, 0, rank, p, stride))
        assert torch.equal(column_bias, cut(column.bias, 0, rank, p, stride))
        assert torch.equal(row_weight, cut(row.weight, 1, rank, p, stride))
        assert torch.equal(row_bias, row.bias)
        assert torch.equal(rank_afterwards, afterwards)  # what is drawn next is the same on all ranks too


def test_the_first_values_are_those_of_nn_linear_to_the_last_bit_for_every_width():
    for in_features in range(1, 130):
        torch.manual_seed(in_features)
        plain = nn.Linear(in_features, 3)
        torch.manual_seed(in_features)
        layer = ColumnParallelLinear(in_features, 3)
        assert torch.equal(layer.weight, plain.weight)
        assert torch.equal(layer.bias, plain.bias)


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_an_init_method_fills_the_whole_weight_and_leaves_the_bias_at_zero(p):
    torch.manual_seed(7)
    column = nn.init.xavier_normal_(torch.empty(OUT, IN))
    row = nn.init.xavier_normal_(torch.empty(OUT, IN))
    for rank, (layers, _) in enumerate(launch(_initial, p, args=(1, nn.init.xavier_normal_))):
        assert torch.equal(layers[0][0], cut(column, 0, rank, p))
        assert torch.equal(layers[1][0], cut(row, 1, rank, p))
        assert not layers[0][1].any()
        assert not layers[1][1].any()


def test_initialised_per_rank_shards_differ_and_replicated_biases_do_not():
    (first, after_first), (second, after_second) = launch(_initial, 2, args=(1,), kwargs={"per_rank_init": True})
    for (weight, _), (other_weight, _) in zip(first, second, strict=True):
        assert not torch.isclose(weight, other_weight).any()
    assert not torch.isclose(first[0][1], second[0][1]).any()  # the column layer's bias is cut
    assert torch.equal(first[1][1], second[1][1])  # the row layer's is replicated
    assert torch.equal(after_first, after_second)


def _on_meta():
    options = {"device": "meta", "dtype": torch.bfloat16, "per_rank_init": dist.get_rank() % 2 == 0}
    layers = [ColumnParallelLinear(IN, OUT, stride=2, **options), RowParallelLinear(IN, OUT, **options)]
    with torch.device("meta"):
        layers.append(ColumnParallelLinear(IN, OUT))
    all_meta = all(p.is_meta for layer in layers for p in layer.parameters())
    inputs = [torch.empty(5, n, device="meta", dtype=torch.bfloat16) for n in (IN, IN // 2)]
    shapes = [tuple(layers[0](inputs[0]).shape), tuple(F.linear(inputs[1], layers[1].weight).shape)]
    layer = layers[0].to_empty(device="cpu").double()
    load_full_state_dict(layer, weights())
    torch.manual_seed(7)
    row = layers[1].to_empty(device="cpu").float()
    row.per_rank_init = False
    row.reset_parameters()
    return all_meta, shapes, layer.weight.detach(), row.weight.detach(), layer.weight.tensor_parallel.stride


def test_layers_are_made_on_meta_without_memory_and_filled_later():
    torch.manual_seed(7)
    plain = nn.Linear(IN, OUT)
    for rank, (all_meta, shapes, column, row, stride) in enumerate(launch(_on_meta, 2)):
        assert all_meta
        assert shapes == [(5, OUT // 2), (5, OUT)]
        assert torch.equal(column, cut(weights()["weight"], 0, rank, 2, 2))
        assert torch.equal(row, cut(plain.weight, 1, rank, 2))
        assert stride == 2


def _pickled():
    layer = pickle.loads(pickle.dumps(ColumnParallelLinear(IN, OUT, stride=2)))
    return layer.weight.tensor_parallel, layer(torch.ones(1, IN)).shape


def test_a_layer_can_be_pickled():
    for sharding, shape in launch(_pickled, 2):
        assert (sharding.dim, sharding.stride) == (0, 2)
        assert shape == (1, OUT // 2)
