"""f, g, scatter and gather: `tplab.tensor.operators`, against their formulas in plain torch, on real ranks."""

import itertools
from contextlib import nullcontext

import torch
import torch.distributed as dist

from tests.reference import assert_close, cut, random
from tests.tensor import operators as ops
from tests.tensor.on_ranks import everywhere, refusals
from tests.tensor.operators import LAYOUTS, Case, Operator
from tplab import launch, record
from tplab.sequence.regions import (
    gather_from_sequence_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
)
from tplab.tensor.operators import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region

SUM, GATHER = "all_reduce", "all_gather"
# fmt: off
OPERATORS = {
    #                    call                 forward      backward    sent          x is a part  dim
    "f":       Operator(copy_to_region,      ops.same,    ops.summed, ("", SUM),    False,       -1),
    "g":       Operator(reduce_from_region,  ops.summed,  ops.same,   (SUM, ""),    False,       -1),
    "scatter": Operator(scatter_to_region,   ops.parts,   ops.joined, ("", GATHER), False,       -1),
    "gather":  Operator(gather_from_region,  ops.joined,  ops.parts,  (GATHER, ""), True,        -1),
}
# fmt: on
WITH_STRIDE = [OPERATORS["scatter"], OPERATORS["gather"]]
ALL = {name: operator.call for name, operator in OPERATORS.items()} | {
    "scatter tokens": scatter_to_sequence_region, "gather tokens": gather_from_sequence_region,
    "reduce-scatter tokens": reduce_scatter_to_sequence_region,
}  # fmt: skip
SHAPES = [(24,), (3, 24), (2, 3, 24), (2, 1, 3, 24), (0, 24), (2, 0, 24)]
CASES = [Case(operator, shape) for operator in OPERATORS.values() for shape in SHAPES]
CASES += [Case(operator, shape, stride) for operator in WITH_STRIDE for shape in SHAPES for stride in (2, 3)]
CASES += [Case(operator, (4, 24), 1, layout, layout) for operator in OPERATORS.values() for layout in LAYOUTS]
CASES += [Case(operator, (2, 3, 24), dtype=dtype) for operator in OPERATORS.values() for dtype in ops.TOLERANCES]


def test_forward_backward_and_traffic_are_the_formula_for_every_shape_stride_layout_and_dtype():
    everywhere(ops.assert_right, CASES)


# On two ranks


def _second_derivative(rank):
    """L = sum (g(a_r f(x)))^3 / 3, differentiated twice; a_r is another number on each rank."""
    a = random((4,), "a", 0) + random((4,), "a", 1)
    x = random((4,), "x").requires_grad_()
    y = reduce_from_region(random((4,), "a", rank) * copy_to_region(x))
    (dx,) = torch.autograd.grad((y**3).sum() / 3, x, create_graph=True)
    assert_close(dx.detach(), a * (a * x.detach()) ** 2)
    assert_close(torch.autograd.grad(dx.sum(), x)[0], 2 * a**3 * x.detach())
    part = scatter_to_region(x)
    (dpart,) = torch.autograd.grad((gather_from_region(part**2) ** 2).sum(), x, create_graph=True)
    assert_close(torch.autograd.grad(dpart.sum(), x)[0], 12 * x.detach() ** 2)


MODES = {
    "gradient": (True, nullcontext), "frozen": (False, nullcontext), "no_grad": (True, torch.no_grad),
    "inference_mode": (True, torch.inference_mode),
}  # fmt: skip


def _written_results():
    """Writing to a result never changes the input, and what autograd needs is refused."""
    refused = set()
    for (name, call), (mode, (wants_grad, context)) in itertools.product(ALL.items(), MODES.items()):
        x = random((2, 8, 8), name).requires_grad_(wants_grad)
        before = x.detach().clone()
        with context():
            y = call(x)
            (error,) = refusals(lambda y=y: y.add_(1), kind=RuntimeError)
        assert torch.equal(x, before), (name, mode)
        refused |= {(name, mode)} if error != "no error" else set()
    assert ("f", "gradient") in refused
    assert {mode for _, mode in refused} == {"gradient"}


def _uneven_parts_and_foreign_groups(rank):
    group = dist.new_group([1])
    foreign = group if rank == 0 else None
    uneven, member = refusals(
        lambda: scatter_to_region(torch.ones(3, 5)), lambda: copy_to_region(torch.ones(3), foreign)
    )
    assert "size=5 can't be divided over 2 ranks" in uneven
    assert ("rank 0 isn't a member of this group" if rank == 0 else "no error") in member


def _compiled(rank):
    """In one graph, they give the same."""
    group = [dist.new_group([0, 1]), dist.new_group([1])][0]

    def program(x, w):
        h = gather_from_region(torch.tanh(copy_to_region(x) @ w), group, stride=2)
        return reduce_from_region(scatter_to_region(h, stride=2) @ w.T, group)

    x, w = random((3, 4), "x").requires_grad_(), random((4, 4), "w", rank).requires_grad_()
    y = torch.compile(program, backend="aot_eager", fullgraph=True)(x, w)
    with record() as section:
        y.backward(random((3, 4), "dy"))
    assert [call.kind for call in section] == ["all_gather", "all_reduce"]
    plain_x = random((3, 4), "x").requires_grad_()
    ws = [random((4, 4), "w", each).requires_grad_() for each in range(2)]
    a, c = torch.cat([w[:, :2] for w in ws], 1), torch.cat([w[:, 2:] for w in ws], 1)
    h = torch.tanh(plain_x @ torch.cat([a, c], 1))  # stride 2: the first halves of both, then the second halves
    plain_y = sum(cut(h, 1, each, 2, 2) @ ws[each].T for each in range(2))
    plain_y.backward(random((3, 4), "dy"))
    for found, expected in ((y, plain_y), (x.grad, plain_x.grad), (w.grad, ws[rank].grad)):
        assert_close(found.detach(), expected.detach())


def _on_two_ranks():
    rank = dist.get_rank()
    _second_derivative(rank)
    _written_results()
    _uneven_parts_and_foreign_groups(rank)
    _compiled(rank)


def test_second_derivatives_and_graphs_are_right_and_written_results_and_uneven_parts_are_refused():
    launch(_on_two_ranks, 2)
