"""ColumnParallelLinear and RowParallelLinear: `tplab.tensor.linear`, against nn.Linear on one process, in float64.

`SPECIFICATION` has a row for each set of options. The ranks run the layer; the test runs the plain twin, cuts its
values with torch.chunk as the row says, and compares every rank with its part. The bias is never zero and upstream
gradients are random, because both would hide mistakes otherwise.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.reference import assert_close, cut, random
from tests.tensor import operators as ops
from tests.tensor.on_ranks import assert_refused_on, assert_shards, on_ranks, results_of, train
from tplab import launch, record
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.linear import ColumnParallelLinear, RowParallelLinear

IN, OUT = 12, 24  # each divisible by stride * p for the strides and p used here, and different, so that a mix-up shows
STEPS = 3
SLICE, FULL = -1, None  # the dimension along which a rank has its part of x or y, or none


class Spec(NamedTuple):
    """One way to build a layer: what a rank is given and returns, and what it sends if p > 1, such as the sum of x."""

    layer: type
    options: dict
    x: int | None
    y: int | None
    forward: tuple = ()
    backward: tuple = ()


COLUMN, ROW = ColumnParallelLinear, RowParallelLinear
WHOLE_X, GATHERED = {"input_is_parallel": False}, {"gather_output": True}
OVERLAP, NO_BIAS, APART = {"async_grad_allreduce": True}, {"bias": False}, {"skip_bias_add": True}
# fmt: off
SPECIFICATION = [
    #    layer   options                                    x      y      forward                     backward
    Spec(COLUMN, {},                                        FULL,  SLICE, (),                         ("sum x",)),
    Spec(COLUMN, {"stride": 2, **NO_BIAS},                  FULL,  SLICE, (),                         ("sum x",)),
    Spec(COLUMN, GATHERED,                                  FULL,  FULL,  ("gather y",),              ("sum x",)),
    Spec(COLUMN, {"stride": 3, **GATHERED, **APART},        FULL,  FULL,  ("gather y", "gather b"),   ("sum x",)),
    Spec(COLUMN, APART,                                     FULL,  SLICE, (),                         ("sum x",)),
    Spec(COLUMN, {**APART, **NO_BIAS},                      FULL,  SLICE, (),                         ("sum x",)),
    Spec(COLUMN, OVERLAP,                                   FULL,  SLICE, (),                         ("sum x",)),
    Spec(COLUMN, {**OVERLAP, **NO_BIAS},                    FULL,  SLICE, (),                         ("sum x",)),
    Spec(COLUMN, {**OVERLAP, "stride": 2, **GATHERED},      FULL,  FULL,  ("gather y",),              ("sum x",)),
    Spec(ROW,    {},                                        SLICE, FULL,  ("sum y",),                 ()),
    Spec(ROW,    WHOLE_X,                                   FULL,  FULL,  ("sum y",),                 ("gather x",)),
    Spec(ROW,    {"stride": 3},                             SLICE, FULL,  ("sum y",),                 ()),
    Spec(ROW,    {"stride": 3, **NO_BIAS, **WHOLE_X},       FULL,  FULL,  ("sum y",),                 ("gather x",)),
    Spec(ROW,    APART,                                     SLICE, FULL,  ("sum y",),                 ()),
    Spec(ROW,    {**APART, **NO_BIAS},                      SLICE, FULL,  ("sum y",),                 ()),
]
# fmt: on
PARAMETERS = {COLUMN: {"weight": 0, "bias": 0}, ROW: {"weight": 1, "bias": FULL}}  # the dimension that is cut


class Run(NamedTuple):
    """A layer and how it is run: the leading dimensions of x, the dtype, the memory layouts of x and dy."""

    spec: Spec
    batch_shape: tuple[int, ...] = (5,)
    dtype: torch.dtype = torch.float64
    layout: Callable = ops.contiguous
    dy_layout: Callable = ops.contiguous


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-6, torch.bfloat16: 2**-6}
USUAL = [spec for spec in SPECIFICATION if spec.options in ({}, OVERLAP, GATHERED, WHOLE_X)]
RUNS = [Run(spec) for spec in SPECIFICATION]
RUNS += [Run(spec, shape) for spec in USUAL for shape in [(), (2, 3), (0,), (2, 0)]]
RUNS += [Run(spec, dtype=dtype) for spec in SPECIFICATION for dtype in (torch.float32, torch.bfloat16)]
RUNS += [
    Run(spec, layout=x, dy_layout=dy)
    for spec in USUAL
    for x, dy in [(ops.transposed, ops.expanded), (ops.every_second, ops.transposed), (ops.expanded, ops.every_second)]
]


def weights(bias: bool = True, in_features: int = IN, out_features: int = OUT) -> dict[str, Tensor]:
    state = {"weight": random((out_features, in_features), "weight") / 4}
    return {**state, "bias": random((out_features,), "bias")} if bias else state


def batches(run, part=lambda tensor, name: tensor):
    for step in range(STEPS):
        x = run.layout((*run.batch_shape, IN), "x", step).to(run.dtype)
        yield {"x": part(x, "x")}, part(run.dy_layout((*run.batch_shape, OUT), "dy", step).to(run.dtype), "dy")


def _train_all(group):
    """For each run, a few SGD steps on this rank, and the first step's traffic."""
    rank, p = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    outcomes = []
    for run in RUNS:
        spec, options = run.spec, run.spec.options
        layer = spec.layer(IN, OUT, **options, group=group, dtype=run.dtype)
        load_full_state_dict(layer, weights(options.get("bias", True)), group)
        dims, stride = {"x": spec.x, "dy": spec.y}, options.get("stride", 1)

        def part(tensor, name, dims=dims, stride=stride):
            if dims[name] is FULL:
                return tensor
            return tensor.chunk(p, -1)[rank] if stride == 1 else cut(tensor, -1, rank, p, stride)

        outcomes.append(train(layer, batches(run, part), options.get("skip_bias_add", False), lr=0.1))
    return outcomes


def traffic_of(run: Run, names: tuple) -> list[tuple]:
    rows = torch.Size(run.batch_shape).numel()
    bytes_of = {name: n * run.dtype.itemsize for name, n in (("x", rows * IN), ("y", rows * OUT), ("b", OUT))}
    calls = {"sum": ("all_reduce", "sum"), "gather": ("all_gather", None)}
    return [(*calls[call], bytes_of[tensor]) for call, tensor in (name.split() for name in names)]


@on_ranks
def test_outputs_gradients_steps_and_traffic_equal_a_plain_linear_for_all_options(p, in_groups):
    for results in results_of(_train_all, p, in_groups):
        for number, run in enumerate(RUNS):
            spec, stride = run.spec, run.spec.options.get("stride", 1)
            state = weights(spec.options.get("bias", True))
            plain = nn.Linear(IN, OUT, "bias" in state, dtype=run.dtype)
            plain.load_state_dict(state)
            expected, _ = train(plain, batches(run), lr=0.1)
            dims = {"out": spec.y, "dx": spec.x} | PARAMETERS[spec.layer]
            cuts = {name: (dim, stride) for name, dim in dims.items()}
            assert_shards([result[number][0] for result in results], expected, cuts, TOLERANCES[run.dtype])
            sent = [traffic_of(run, names) if len(results) > 1 else [] for names in (spec.forward, spec.backward)]
            assert all(result[number][1] == sent for result in results), run


def used_several_times(column, row):
    """The output of a program that uses both layers more than once, and the gradients of x and all parameters."""
    x = random((5, IN), "x").requires_grad_()
    y = row(column(row(column(x)))) + column(x)
    y.backward(random((5, IN), "dy"))
    gradients = {name: p.grad for name, p in nn.ModuleDict({"column": column, "row": row}).named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}


def filled(column, row):
    """Both layers, square, with the weights of the tests."""
    load_full_state_dict(column, weights(out_features=IN))
    load_full_state_dict(row, weights(in_features=IN, out_features=IN))
    return column, row


def _several_times():
    outcomes = []
    for overlap in ({}, OVERLAP):
        column = ColumnParallelLinear(IN, IN, **GATHERED, **overlap, dtype=torch.float64)
        row = RowParallelLinear(IN, IN, **WHOLE_X, dtype=torch.float64)
        outcomes.append(used_several_times(*filled(column, row)))
    return outcomes


def test_layers_that_are_used_several_times_have_the_gradients_of_plain_layers():
    expected = used_several_times(*filled(*(nn.Linear(IN, IN, dtype=torch.float64) for _ in range(2))))
    cuts = {"column.weight": (0, 1), "column.bias": (0, 1), "row.weight": (1, 1)}
    for results in zip(*launch(_several_times, 2), strict=True):
        assert_shards(results, expected, cuts)


class Order(TorchDispatchMode):
    """Writes down the operations in their order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def _backward(overlap):
    """The order of the operations in backward; then what is sent and computed if not all gradients are wanted."""
    layer = ColumnParallelLinear(IN, OUT, async_grad_allreduce=overlap, dtype=torch.float64)
    load_full_state_dict(layer, weights())
    x = random((5, IN), "x").requires_grad_()
    y = layer(x)
    with Order() as order, record() as section:
        y.backward(torch.ones_like(y))
    names = [name for name in order.names if name in ("mm", "allreduce_")]
    with record() as quiet:
        layer(x.detach()).sum().backward()
    layer.requires_grad_(False)
    x.grad = layer.weight.grad = None
    layer(x).sum().backward()
    return names, section[0].end is not None, len(quiet), layer.weight.grad, x.grad


def test_an_overlapped_all_reduce_starts_before_dw_and_only_the_gradients_that_are_wanted_are_computed():
    dx = weights()["weight"].sum(0).expand(5, IN)
    for overlap, order in ((True, ["mm", "allreduce_", "mm"]), (False, ["mm", "mm", "allreduce_"])):
        for names, ended, sent, dw, got in launch(_backward, 2, args=(overlap,)):
            assert (names, ended, sent, dw) == (order, True, 0, None)
            assert_close(got, dx)


# Making layers


def _initial(stride=1, **options):
    torch.manual_seed(7)
    layers = [layer(IN, OUT, stride=stride, **options) for layer in (ColumnParallelLinear, RowParallelLinear)]
    return [(layer.weight.detach(), layer.bias.detach()) for layer in layers], torch.rand(3)


def _first_values():
    """With strides 1 and 3; with an init method; drawn per rank."""
    init_method = nn.init.xavier_normal_
    return _initial(1), _initial(3), _initial(init_method=init_method), _initial(per_rank_init=True)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_the_first_values_are_those_of_nn_linear_with_the_same_seed_for_every_p(p):
    torch.manual_seed(7)
    linears = [nn.Linear(IN, OUT) for _ in range(2)]
    afterwards = torch.rand(3)
    torch.manual_seed(7)
    filled = [nn.init.xavier_normal_(torch.empty(OUT, IN)) for _ in range(2)]
    results = launch(_first_values, p)
    for rank, (*plain, (by_method, _), (own, own_afterwards)) in enumerate(results):
        for stride, (((column, column_bias), (row, row_bias)), then) in zip((1, 3), plain, strict=True):
            assert torch.equal(column, cut(linears[0].weight, 0, rank, p, stride))
            assert torch.equal(column_bias, cut(linears[0].bias, 0, rank, p, stride))
            assert torch.equal(row, cut(linears[1].weight, 1, rank, p, stride))
            assert torch.equal(row_bias, linears[1].bias)
            assert torch.equal(then, afterwards)  # what is drawn next is the same on all ranks too
        for dim, (weight, bias) in enumerate(by_method):
            assert torch.equal(weight, cut(filled[dim], dim, rank, p))
            assert not bias.any()
        for (weight, _), (other_weight, _) in zip(own, results[0][3][0], strict=True):
            assert rank == 0 or not torch.isclose(weight, other_weight).any()
        assert rank == 0 or not torch.isclose(own[0][1], results[0][3][0][0][1]).any()  # the column layer's bias
        assert torch.equal(own[1][1], results[0][3][0][1][1])  # the row layer's is replicated
        assert torch.equal(own_afterwards, results[0][3][1])


def test_the_first_values_are_those_of_nn_linear_to_the_last_bit_for_every_width():
    for in_features in range(1, 130):
        torch.manual_seed(in_features)
        plain = nn.Linear(in_features, 3)
        torch.manual_seed(in_features)
        layer = ColumnParallelLinear(in_features, 3)
        assert torch.equal(layer.weight, plain.weight)
        assert torch.equal(layer.bias, plain.bias)


def _on_meta():
    options = {"device": "meta", "dtype": torch.bfloat16, "per_rank_init": dist.get_rank() % 2 == 0}
    layers = [ColumnParallelLinear(IN, OUT, stride=2, **options), RowParallelLinear(IN, OUT, **options)]
    with torch.device("meta"):
        layers.append(ColumnParallelLinear(IN, OUT))
    assert all(p.is_meta for layer in layers for p in layer.parameters())
    inputs = [torch.empty(5, n, device="meta", dtype=torch.bfloat16) for n in (IN, IN // 2)]
    shapes = [tuple(layers[0](inputs[0]).shape), tuple(F.linear(inputs[1], layers[1].weight).shape)]
    column = layers[0].to_empty(device="cpu").double()
    load_full_state_dict(column, weights())
    torch.manual_seed(7)
    row = layers[1].to_empty(device="cpu").float()
    row.per_rank_init = False
    row.reset_parameters()
    marks = [getattr(p, "tensor_parallel", None) for layer in (column, row) for p in layer.parameters()]
    return shapes, column.weight.detach(), row.weight.detach(), [m and (m.dim, m.stride) for m in marks], repr(row)


def test_layers_are_made_on_meta_without_memory_and_filled_later_and_say_what_they_hold():
    torch.manual_seed(7)
    plain = nn.Linear(IN, OUT)
    for rank, (shapes, column, row, marks, text) in enumerate(launch(_on_meta, 2)):
        assert shapes == [(5, OUT // 2), (5, OUT)]
        assert torch.equal(column, cut(weights()["weight"], 0, rank, 2, 2))
        assert torch.equal(row, cut(plain.weight, 1, rank, 2))
        assert marks == [(0, 2), (0, 2), (1, 1), None]
        assert f"in_features=12, out_features=24, bias=True, rank {rank} of 2 holds [24, 6]" in text


def test_sizes_that_do_not_fit_are_refused_with_the_numbers():
    assert_refused_on(
        4,
        (
            lambda: ColumnParallelLinear(12, 10),
            "out_features=10 can't be divided over 4 ranks: each rank takes whole co",
        ),
        (lambda: ColumnParallelLinear(12, 10), "Use p in 1, 2, 5, 10."),
        (lambda: RowParallelLinear(10, 12), "in_features=10 can't be divided over 4 ranks: each rank takes whole rows"),
        (lambda: ColumnParallelLinear(12, 20, stride=2), "out_features/2=10 can't be divided over 4 ranks"),
        (lambda: ColumnParallelLinear(12, 16, stride=3), "out_features=16 can't be cut into stride=3 equal blocks"),
        (lambda: RowParallelLinear(12, 12, stride=0), "in_features=12 can't be cut into stride=0 equal blocks"),
        (
            lambda: RowParallelLinear(12, 8)(torch.ones(5, 12)),
            "x [5, 12] should be [.., 3] with input_is_parallel=True",
        ),
        (
            lambda: RowParallelLinear(12, 8, **WHOLE_X)(torch.ones(5, 3)),
            "x [5, 3] should be [.., 12] with input_is_par",
        ),
        (
            lambda: ColumnParallelLinear(12, 8)(torch.ones(5, 3)),
            "x [5, 3] should be [.., 12]: each rank needs all of x",
        ),
        (lambda: ColumnParallelLinear(12, 8)(torch.tensor(1.0)), "x [] should be [.., 12]"),
    )
