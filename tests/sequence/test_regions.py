"""The operators of `tplab.sequence.regions`, against their formulas in plain torch, on real ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.reference import cut, random
from tests.tensor import operators as ops
from tests.tensor.on_ranks import GROUPS, assert_refused, refusals
from tests.tensor.operators import LAYOUTS, Case, Operator
from tplab import launch
from tplab.sequence.regions import (
    gather_from_sequence_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
)


def gather_replicated(x, group=None):
    return gather_from_sequence_region(x, group, partial_grad=False)


# The y of a gather whose dy is partial is p vectors: each rank does something else with its copy
# fmt: off
OPERATORS = [
    #        call                               forward           backward          x             y
    Operator(scatter_to_sequence_region,        ops.parts,        ops.joined,       "replicated", "part",       1),
    Operator(gather_from_sequence_region,       ops.joined,       ops.parts_of_sum, "part",       "own",        1),
    Operator(gather_replicated,                 ops.joined,       ops.parts,        "part",       "replicated", 1),
    Operator(reduce_scatter_to_sequence_region, ops.parts_of_sum, ops.joined,       "own",        "part",       1),
]
# fmt: on
WORLD_SIZES = (2, 4)
SHAPE = (3, 8, 5)
OTHER_SHAPES = ((1, 4, 1), (3, 8), (2, 8, 3, 2), (0, 8, 2), (2, 0, 2))


def all_operators(*args, **kwargs):
    return [Case(operator, *(args or (SHAPE,)), **kwargs) for operator in OPERATORS]


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_forward_and_backward_are_the_formula_for_every_shape_and_layout(p):
    cases = [case for layout in LAYOUTS for dy in LAYOUTS for case in all_operators(layout=layout, dy_layout=dy)]
    ops.assert_right(cases + [case for shape in OTHER_SHAPES for case in all_operators(shape)], p)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)]
)
def test_dtypes_stay_and_round_as_their_precision_says(dtype, tolerance):
    ops.assert_right(all_operators(dtype=dtype), 4, tolerance=tolerance)


def test_each_operator_sends_the_whole_tensor_once_forward_or_backward():
    size = 3 * 8 * 5 * 8
    gathers = [("all_gather", size, "float64", None, True)]
    sums = [("reduce_scatter", size, "float64", "sum", True)]
    traffic = [[[], gathers], [gathers, sums], [gathers, []], [sums, gathers]]
    for (_, ranks), expected in zip(ops.outcomes(all_operators(), 2), traffic, strict=True):
        assert all(rank["traffic"] == expected for rank in ranks)


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_each_backward_is_the_adjoint(p):
    ops.assert_adjoint(all_operators(), p)


def test_two_groups_side_by_side_do_not_mix():
    ops.assert_right(all_operators(), 4, GROUPS)


def _whole_program(*leaves):
    """Parts and whole tensors, each used by ranks alike and unlike: all four operators, as one function of x."""
    x, w = leaves
    rank, p = dist.get_rank(), dist.get_world_size()
    part = torch.tanh(scatter_to_sequence_region(x))  # [b, s/p, h]
    hidden = torch.sin(gather_from_sequence_region(part) @ cut(w, 1, rank, p))  # [b, s, h/p]
    part = part + reduce_scatter_to_sequence_region(hidden @ cut(w, 1, rank, p).T)  # [b, s/p, h]
    return gather_replicated(part**2)  # [b, s, h]


def _checked_by_differences():
    x, w = random((2, 4, 4), "x").requires_grad_(), random((4, 4), "w")
    first = torch.autograd.gradcheck(lambda x: _whole_program(x, w), (x,), fast_mode=True)
    return first, torch.autograd.gradgradcheck(lambda x: _whole_program(x, w), (x,), fast_mode=True)


def test_gradients_of_a_program_of_all_operators_are_those_of_finite_differences_twice():
    torch.manual_seed(0)
    assert launch(_checked_by_differences, 2, timeout=120) == [(True, True)] * 2


def _refused():
    x = torch.ones(2, 9, 4)
    return refusals(lambda: scatter_to_sequence_region(x), lambda: reduce_scatter_to_sequence_region(x))


def test_a_sequence_that_p_does_not_divide_is_refused_with_the_numbers():
    results = launch(_refused, 2, timeout=120)
    assert_refused(results, *["sequence length s=9 can't be divided over 2 ranks"] * 2)
    assert_refused(results, *["Use p in 1, 3, 9"] * 2)


def test_one_rank_gets_its_own_tensor_back():
    x = torch.ones(2, 3, 4)
    assert all(operator.call(x) is x for operator in OPERATORS)
