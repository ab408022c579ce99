"""The operators of `tplab.sequence.regions`, against their formulas in plain torch, on real ranks."""

import torch
import torch.distributed as dist

from tests.reference import cut, random
from tests.tensor import operators as ops
from tests.tensor.on_ranks import assert_refused, everywhere, refusals
from tests.tensor.operators import LAYOUTS, Case, Operator
from tplab import launch
from tplab.sequence.regions import (
    gather_from_sequence_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
)


def gather_replicated(x, group=None):
    return gather_from_sequence_region(x, group, partial_grad=False)


GATHER, SCATTER = "all_gather", "reduce_scatter"
# fmt: off
OPERATORS = [
    #        call                               forward           backward          sent               x is a part  dim
    Operator(scatter_to_sequence_region,        ops.parts,        ops.joined,       ("", GATHER),      False,       1),
    Operator(gather_from_sequence_region,       ops.joined,       ops.parts_of_sum, (GATHER, SCATTER), True,        1),
    Operator(gather_replicated,                 ops.joined,       ops.parts,        (GATHER, ""),      True,        1),
    Operator(reduce_scatter_to_sequence_region, ops.parts_of_sum, ops.joined,       (SCATTER, GATHER), False,       1),
]
# fmt: on
SHAPE = (3, 8, 5)
CASES = [Case(each, SHAPE, layout=layout, dy_layout=layout) for each in OPERATORS for layout in LAYOUTS]
CASES += [Case(operator, shape) for operator in OPERATORS for shape in ((1, 4, 1), (3, 8), (2, 8, 3, 2), (0, 8, 2))]


def test_forward_backward_and_traffic_are_the_formula_for_every_shape_and_layout():
    everywhere(ops.assert_right, CASES)


def _whole_program(x, w):
    """Parts and whole tensors, each used by ranks alike and unlike: all four operators, as one function of x."""
    rank, p = dist.get_rank(), dist.get_world_size()
    part = torch.tanh(scatter_to_sequence_region(x))  # [b, s/p, h]
    hidden = torch.sin(gather_from_sequence_region(part) @ cut(w, 1, rank, p))  # [b, s, h/p]
    part = part + reduce_scatter_to_sequence_region(hidden @ cut(w, 1, rank, p).T)  # [b, s/p, h]
    return gather_replicated(part**2)  # [b, s, h]


def _on_two_ranks():
    x, w, nine = random((2, 4, 4), "x").requires_grad_(), random((4, 4), "w"), torch.ones(2, 9, 4)
    assert torch.autograd.gradcheck(lambda x: _whole_program(x, w), (x,), fast_mode=True)
    return refusals(lambda: scatter_to_sequence_region(nine), lambda: reduce_scatter_to_sequence_region(nine))


def test_gradients_of_a_program_are_those_of_finite_differences_and_uneven_sequences_are_refused():
    torch.manual_seed(0)
    refused = launch(_on_two_ranks, 2, timeout=120)
    assert_refused(refused, *[("s=9", "2 ranks")] * 2)
