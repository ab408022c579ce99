"""f, g, scatter and gather: `tplab.tensor.operators`, against their formulas in plain torch, on real ranks.

tests/gpu/test_on_the_cpu.py has other dtypes, within layers.
"""

import torch
import torch.distributed as dist

from tests.reference import assert_close, random
from tests.tensor import operators as ops
from tests.tensor.on_ranks import everywhere, refusals
from tests.tensor.operators import LAYOUTS, Case, Operator
from tplab import launch
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
OF_TOKENS = (scatter_to_sequence_region, gather_from_sequence_region, reduce_scatter_to_sequence_region)
SHAPES = [(24,), (2, 3, 24), (0, 24)]
CASES = [Case(operator, shape) for operator in OPERATORS.values() for shape in SHAPES]
CASES += [Case(operator, shape, stride) for operator in WITH_STRIDE for shape in SHAPES for stride in (2, 3)]
CASES += [Case(operator, (4, 24), 1, layout, layout) for operator in OPERATORS.values() for layout in LAYOUTS]


def test_forward_backward_and_traffic_are_the_formula_for_every_shape_stride_and_layout():
    everywhere(ops.assert_right, CASES)


# On two ranks


def _second_derivative():
    """L = sum (g(a_r f(x)))^3 / 3, differentiated twice; a_r is another number on each rank."""
    a = random((4,), "a", 0) + random((4,), "a", 1)
    x = random((4,), "x").requires_grad_()
    y = reduce_from_region(random((4,), "a", dist.get_rank()) * copy_to_region(x))
    (dx,) = torch.autograd.grad((y**3).sum() / 3, x, create_graph=True)
    assert_close(dx.detach(), a * (a * x.detach()) ** 2)
    assert_close(torch.autograd.grad(dx.sum(), x)[0], 2 * a**3 * x.detach())


def _written_results():
    """Writing to a result never changes the input. Where autograd would have to know, it is refused."""
    for call in (*(operator.call for operator in OPERATORS.values()), *OF_TOKENS):
        for wants_grad in (True, False):
            x = random((2, 8, 8), "x").requires_grad_(wants_grad)
            y = call(x)
            (message,) = refusals(lambda y=y: y.add_(1), kind=RuntimeError)
            assert torch.equal(x, random((2, 8, 8), "x")), call
            assert message == "no error" or wants_grad
    assert refusals(lambda: copy_to_region(random((4,), "x").requires_grad_()).add_(1), kind=RuntimeError) != [
        "no error"
    ]


def _on_two_ranks():
    _second_derivative()
    _written_results()


def test_second_derivatives_are_right_and_no_write_to_a_result_reaches_the_input():
    launch(_on_two_ranks, 2)
