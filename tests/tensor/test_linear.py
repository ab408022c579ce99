"""ColumnParallelLinear and RowParallelLinear: `tplab.tensor.linear`, against nn.Linear on one process, in float64.

`SPECIFICATION` has a row for each set of options: which parts of x and y a rank has, and what it sends. The bias is
never zero and upstream gradients are random, because both would hide mistakes otherwise.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from tests.reference import assert_close, cut, random
from tests.tensor import operators as ops
from tests.tensor.on_ranks import assert_refuses, assert_trains_like, everywhere, with_random_weights
from tplab import record
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.linear import ColumnParallelLinear, RowParallelLinear

IN, OUT = 12, 24  # each divisible by stride * p for the strides and p used here, and different, so that a mix-up shows


class Spec(NamedTuple):
    """One way to build a layer: whether a rank has all of x and y, and what it sends, such as the sum of x."""

    layer: type
    options: dict
    all_x: bool
    all_y: bool
    forward: tuple = ()
    backward: tuple = ()


COLUMN, ROW = ColumnParallelLinear, RowParallelLinear
WHOLE_X, GATHERED = {"input_is_parallel": False}, {"gather_output": True}
OVERLAP, NO_BIAS, APART = {"async_grad_allreduce": True}, {"bias": False}, {"skip_bias_add": True}
# fmt: off
SPECIFICATION = [
    #    layer   options                                    all x  all y  forward                     backward
    Spec(COLUMN, {},                                        True,  False, (),                         ("sum x",)),
    Spec(COLUMN, {"stride": 2, **NO_BIAS},                  True,  False, (),                         ("sum x",)),
    Spec(COLUMN, GATHERED,                                  True,  True,  ("gather y",),              ("sum x",)),
    Spec(COLUMN, {"stride": 3, **GATHERED, **APART},        True,  True,  ("gather y", "gather b"),   ("sum x",)),
    Spec(COLUMN, APART,                                     True,  False, (),                         ("sum x",)),
    Spec(COLUMN, OVERLAP,                                   True,  False, (),                         ("sum x",)),
    Spec(COLUMN, {**OVERLAP, **NO_BIAS},                    True,  False, (),                         ("sum x",)),
    Spec(COLUMN, {**OVERLAP, "stride": 2, **GATHERED},      True,  True,  ("gather y",),              ("sum x",)),
    Spec(ROW,    {},                                        False, True,  ("sum y",),                 ()),
    Spec(ROW,    WHOLE_X,                                   True,  True,  ("sum y",),                 ("gather x",)),
    Spec(ROW,    {"stride": 3, **NO_BIAS, **WHOLE_X},       True,  True,  ("sum y",),                 ("gather x",)),
    Spec(ROW,    APART,                                     False, True,  ("sum y",),                 ()),
    Spec(ROW,    {**APART, **NO_BIAS},                      False, True,  ("sum y",),                 ()),
]
# fmt: on


class Run(NamedTuple):
    """A layer and how it is run: the leading dimensions of x, the memory layouts of x and dy."""

    spec: Spec
    batch_shape: tuple[int, ...] = (5,)
    layout: Callable = ops.contiguous
    dy_layout: Callable = ops.contiguous

    def batches(self) -> list:
        shapes = [("x", IN, self.layout), ("dy", OUT, self.dy_layout)]
        both = [[lay((*self.batch_shape, n), name, step) for name, n, lay in shapes] for step in (0, 1)]
        return [({"x": x}, dy) for x, dy in both]

    def traffic(self, names: tuple) -> list[tuple]:
        rows = torch.Size(self.batch_shape).numel()
        bytes_of = {name: 8 * n for name, n in (("x", rows * IN), ("y", rows * OUT), ("b", OUT))}
        calls = {"sum": ("all_reduce", "sum"), "gather": ("all_gather", None)}
        return [(*calls[call], bytes_of[tensor]) for call, tensor in (name.split() for name in names)]


USUAL = [spec for spec in SPECIFICATION if spec.options in ({}, OVERLAP, GATHERED, WHOLE_X)]
RUNS = [Run(spec) for spec in SPECIFICATION]
RUNS += [Run(spec, shape) for spec in USUAL for shape in [(), (2, 3), (0,)]]
RUNS += [
    Run(spec, layout=x, dy_layout=dy)
    for spec in USUAL
    for x, dy in [(ops.transposed, ops.expanded), (ops.every_second, ops.transposed), (ops.expanded, ops.every_second)]
]


def plain(bias=True):
    return with_random_weights(nn.Linear(IN, OUT, bias, dtype=torch.float64))


def _train_all(group):
    for run in RUNS:
        spec, options, along = run.spec, run.spec.options, (-1, run.spec.options.get("stride", 1))
        layer = spec.layer(IN, OUT, **options, group=group, dtype=torch.float64)
        cuts = {name: along for name, whole in (("x", spec.all_x), ("out", spec.all_y)) if not whole}
        sent = assert_trains_like(
            plain(options.get("bias", True)), layer, run.batches(), group, cuts=cuts,
            split_bias=options.get("skip_bias_add", False), lr=0.1,
        )  # fmt: skip
        several = rank_and_size(group)[1] > 1
        assert sent == [run.traffic(names) if several else [] for names in (spec.forward, spec.backward)], run


def _gradients_that_are_not_wanted():
    """They are neither computed nor sent, and an all-reduce is over when backward is. tests/trace has its place."""
    twin = plain()
    for overlap in ({}, OVERLAP):
        layer = ColumnParallelLinear(IN, OUT, **overlap, dtype=torch.float64)
        load_full_state_dict(layer, twin.state_dict())
        x = random((5, IN), "x").requires_grad_()
        with record() as quiet:
            layer(x.detach()).sum().backward()
        assert not quiet
        layer.requires_grad_(False)
        layer.weight.grad = None
        y = layer(x)
        with record() as section:
            y.sum().backward()
        assert section[0].end is not None
        assert layer.weight.grad is None
        assert_close(x.grad, twin.weight.detach().sum(0).expand(5, IN))


# Making layers


def _made(make, **options):
    """The parameters of two layers that are made one after the other, and what is drawn next."""
    torch.manual_seed(7)
    layers = [kind(IN, OUT, **options) for kind in make]
    return [parameter.detach() for layer in layers for parameter in layer.parameters()], torch.rand(3)


def _first_values():
    """With strides 1 and 3, they're those of nn.Linear."""
    rank, p = rank_and_size()
    wholes, afterwards = _made([nn.Linear, nn.Linear])
    for stride in (1, 3):
        found, then = _made([COLUMN, ROW], stride=stride)
        for whole, dim, own in zip(wholes, (0, 0, 1), found, strict=False):
            assert torch.equal(own, cut(whole, dim, rank, p, stride))
        assert torch.equal(found[3], wholes[3])  # the row layer's bias is replicated
        assert torch.equal(then, afterwards)  # what is drawn next is the same on all ranks too


def test_a_layer_is_made_on_meta_without_memory_and_filled_later():
    for kind in (COLUMN, ROW):
        layer = kind(IN, OUT, stride=2, device="meta", dtype=torch.bfloat16)
        assert layer(torch.empty(5, IN, device="meta", dtype=torch.bfloat16)).shape == (5, OUT)
        layer = layer.to_empty(device="cpu").float()
        torch.manual_seed(7)
        later = nn.Linear(IN, OUT)
        torch.manual_seed(7)
        layer.reset_parameters()
        assert torch.equal(layer.weight, later.weight)


# On ranks


def _refuse():
    """Sizes that don't fit are refused with the numbers."""
    column, row = ColumnParallelLinear, RowParallelLinear
    assert_refuses(
        (lambda: column(12, 10), "out_features=10", "4 ranks", "columns of A"),
        (lambda: column(12, 20, stride=2), "out_features/2=10", "4 ranks"),
        (lambda: row(12, 8)(torch.ones(5, 12)), "x [5, 12]", "[.., 3]", "input_is_parallel=True"),
        (lambda: column(12, 8)(torch.ones(5, 3)), "x [5, 3]", "[.., 12]"),
    )


def _everything(group):
    _train_all(group)
    if group is None:
        _first_values()
    if group is None and rank_and_size()[1] == 4:
        _gradients_that_are_not_wanted()
        _refuse()


def test_outputs_gradients_steps_traffic_and_first_values_are_those_of_a_plain_linear_for_all_options():
    """tests/gpu/test_on_the_cpu.py has other dtypes."""
    everywhere(_everything)
