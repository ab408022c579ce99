"""The operators of `tplab.sequence.regions`, against their formulas in plain torch, on real ranks.

Every tensor is random and another one on each rank, also where a layer would have replicated ones.
"""

import pytest
import torch
import torch.distributed as dist

from tests.reference import assert_close, cut, random
from tplab import launch, record
from tplab.sequence.regions import (
    gather_from_sequence_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
)


def gather_replicated(x, group=None):
    return gather_from_sequence_region(x, group, partial_grad=False)


OPERATORS = {
    "scatter": scatter_to_sequence_region,
    "gather": gather_from_sequence_region,
    "gather, replicated gradient": gather_replicated,
    "reduce-scatter": reduce_scatter_to_sequence_region,
}
CONJUGATE = {
    "scatter": "gather, replicated gradient",
    "gather, replicated gradient": "scatter",
    "gather": "reduce-scatter",
    "reduce-scatter": "gather",
}
WORLD_SIZES = (2, 4)
BATCH, SEQUENCE, HIDDEN = 3, 8, 5


def expected_forward(name, xs):
    """Of a list of every rank's tensor, what each rank should get."""
    p = len(xs)
    if name == "scatter":
        return [cut(x, 1, rank, p) for rank, x in enumerate(xs)]
    if name == "reduce-scatter":
        return [cut(torch.stack(xs).sum(0), 1, rank, p) for rank in range(p)]
    return [torch.cat(xs, 1)] * p


def contiguous(shape, *key):
    return random(shape, *key)


def sequence_first(shape, *key):
    """[b, s, h] as a view of [s, b, h], in which a part of the sequence is one piece of memory."""
    return random((shape[1], shape[0], *shape[2:]), *key).transpose(0, 1)


def every_second(shape, *key):
    return random((*shape[:-1], 2 * shape[-1]), *key)[..., ::2]


def expanded(shape, *key):
    return random((), *key).expand(shape)  # strides 0, as the gradient of sum() has


LAYOUTS = (contiguous, sequence_first, every_second, expanded)
SHAPES = ((1, 4, 1), (BATCH, SEQUENCE), (2, SEQUENCE, 3, 2), (0, SEQUENCE, 2), (2, 0, 2))


def _operate(name, shape, layout=contiguous, dy_layout=contiguous, dtype=torch.float64, group=None):
    rank, p = dist.get_rank(), dist.get_world_size(group)
    if name.startswith("gather"):
        shape = (shape[0], shape[1] // p, *shape[2:])
    x = layout(shape, "x", rank).to(dtype)
    x_before, x = x.clone(), x.requires_grad_()
    with record() as forward:
        y = OPERATORS[name](x, group)
    dy = dy_layout(tuple(y.shape), "dy", rank).to(dtype)
    dy_before = dy.clone()
    with record() as backward:
        (dx,) = torch.autograd.grad(y, x, dy)
    return {
        "x": x_before,
        "y": y.detach(),
        "dy": dy_before,
        "dx": dx,
        "unchanged": torch.equal(x, x_before) and torch.equal(dy, dy_before),
        "traffic": [[(call.kind, call.bytes, call.end is not None) for call in part] for part in (forward, backward)],
    }


def _operate_on_all(cases):
    return [_operate(*case) for case in cases]


def assert_right(name, results, tolerance=1e-12):
    """`results`: of one operator on the ranks of one group."""
    ys = expected_forward(name, [result["x"] for result in results])
    dxs = expected_forward(CONJUGATE[name], [result["dy"] for result in results])
    for result, y, dx in zip(results, ys, dxs, strict=True):
        assert_close(result["y"], y, tolerance)
        assert_close(result["dx"], dx, tolerance)
        assert result["unchanged"], "the caller's tensors were written to"


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_forward_and_backward_are_the_formula_for_every_shape_and_layout(p):
    shape = (BATCH, SEQUENCE, HIDDEN)
    cases = [(name, shape, layout, dy_layout) for name in OPERATORS for layout in LAYOUTS for dy_layout in LAYOUTS]
    cases += [(name, shape) for name in OPERATORS for shape in SHAPES]
    results = launch(_operate_on_all, p, args=(cases,), timeout=120)
    assert len(results) == p
    for case, (name, *_) in enumerate(cases):
        assert_right(name, [result[case] for result in results])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)]
)
def test_dtypes_stay_and_round_as_their_precision_says(dtype, tolerance):
    cases = [(name, (BATCH, SEQUENCE, HIDDEN), contiguous, contiguous, dtype) for name in OPERATORS]
    results = launch(_operate_on_all, 4, args=(cases,), timeout=120)
    for case, (name, *_) in enumerate(cases):
        assert_right(name, [result[case] for result in results], tolerance)
        assert all(result[case]["y"].dtype == result[case]["dx"].dtype == dtype for result in results)


def test_each_operator_sends_the_whole_tensor_once_forward_or_backward():
    cases = [(name, (BATCH, SEQUENCE, HIDDEN)) for name in OPERATORS]
    size = BATCH * SEQUENCE * HIDDEN * 8
    gathers, sums = [("all_gather", size, True)], [("reduce_scatter", size, True)]
    traffic = {
        "scatter": [[], gathers],
        "gather": [gathers, sums],
        "gather, replicated gradient": [gathers, []],
        "reduce-scatter": [sums, gathers],
    }
    for result in launch(_operate_on_all, 2, args=(cases,), timeout=120):
        for (name, _), outcome in zip(cases, result, strict=True):
            assert outcome["traffic"] == traffic[name], name


X_REPLICATED = ("scatter",)
Y_REPLICATED = ("gather, replicated gradient",)


def _adjoints():
    rank, p = dist.get_rank(), dist.get_world_size()
    outcomes = {}
    for name, operator in OPERATORS.items():
        tokens = SEQUENCE // p if name.startswith("gather") else SEQUENCE
        x = random((BATCH, tokens, HIDDEN), "x", 0 if name in X_REPLICATED else rank).requires_grad_()
        y = operator(x)
        dy = random(tuple(y.shape), "dy", 0 if name in Y_REPLICATED else rank)
        (dx,) = torch.autograd.grad(y, x, dy)
        outcomes[name] = torch.sum(dy * y).item(), torch.sum(dx * x).item()
    return outcomes


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_each_backward_is_the_adjoint(p):
    """<dy, A x> = <A^T dy, x>. A replicated tensor is one vector and counts once; parts and summands are p of them.

    The y of a gather whose dy is partial is p vectors: each rank does something else with its copy.
    """
    results = launch(_adjoints, p, timeout=120)
    for name in OPERATORS:
        left = [result[name][0] for result in results]
        right = [result[name][1] for result in results]
        left_total = left[0] if name in Y_REPLICATED else sum(left)
        right_total = right[0] if name in X_REPLICATED else sum(right)
        assert abs(left_total - right_total) < 1e-10, name


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


def _in_groups():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # every rank makes both
    group = groups[dist.get_rank() % 2]
    return [_operate(name, (BATCH, SEQUENCE, HIDDEN), group=group) for name in OPERATORS]


def test_two_groups_side_by_side_do_not_mix():
    results = launch(_in_groups, 4, timeout=120)
    for members in ([0, 2], [1, 3]):
        for case, name in enumerate(OPERATORS):
            assert_right(name, [results[rank][case] for rank in members])


def _refused():
    messages = []
    for operator in (scatter_to_sequence_region, reduce_scatter_to_sequence_region):
        try:
            operator(torch.ones(2, 9, 4))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_sequence_that_p_does_not_divide_is_refused_with_the_numbers():
    for messages in launch(_refused, 2, timeout=120):
        assert len(messages) == 2
        for message in messages:
            assert "sequence length s=9 can't be divided over 2 ranks" in message
            assert "Use p in 1, 3, 9" in message


def test_one_rank_gets_its_own_tensor_back():
    x = torch.ones(2, 3, 4)
    assert all(operator(x) is x for operator in OPERATORS.values())
