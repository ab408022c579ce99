"""f, g, scatter and gather: `tplab.tensor.operators`, against their formulas in plain torch, on real ranks."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.reference import assert_close, cut, random
from tests.tensor import operators as ops
from tests.tensor.on_ranks import GROUPS, refusals
from tests.tensor.operators import LAYOUTS, Case, Operator
from tplab import launch, record
from tplab.sequence.regions import (
    gather_from_sequence_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
)
from tplab.tensor.operators import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region

# fmt: off
OPERATORS = {
    #                    call                 forward      backward     x             y
    "f":       Operator(copy_to_region,      ops.same,    ops.summed,  "replicated", "own",        -1),
    "g":       Operator(reduce_from_region,  ops.summed,  ops.same,    "own",        "replicated", -1),
    "scatter": Operator(scatter_to_region,   ops.parts,   ops.joined,  "replicated", "part",       -1),
    "gather":  Operator(gather_from_region,  ops.joined,  ops.parts,   "part",       "replicated", -1),
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
CASES += [
    Case(operator, (4, 24), 1, layout, dy) for operator in OPERATORS.values() for layout in LAYOUTS for dy in LAYOUTS
]


@pytest.mark.parametrize(("p", "groups"), [(2, None), (4, None), (4, GROUPS)])
def test_forward_and_backward_are_the_formula_for_every_shape_stride_and_layout(p, groups):
    ops.assert_right(CASES, p, groups)


@pytest.mark.parametrize("p", [2, 4])
def test_each_backward_is_the_adjoint(p):
    cases = [Case(operator, (3, 24)) for operator in OPERATORS.values()]
    ops.assert_adjoint(cases + [Case(operator, (3, 24), stride=2) for operator in WITH_STRIDE], p)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]
)
def test_each_operator_sends_the_whole_tensor_once_and_rounds_as_its_precision_says(dtype, tolerance):
    size, name = 2 * 3 * 24 * dtype.itemsize, str(dtype).removeprefix("torch.")
    reduction, gathering = [("all_reduce", size, name, "sum", True)], [("all_gather", size, name, None, True)]
    traffic = [[[], reduction], [reduction, []], [[], gathering], [gathering, []]]
    found = ops.assert_right([Case(each, (2, 3, 24), dtype=dtype) for each in OPERATORS.values()], 4, None, tolerance)
    for (_, ranks), expected in zip(found, traffic, strict=True):
        assert all(rank["traffic"] == expected for rank in ranks)


def _after_a_saving_function():
    """exp saves its output: an operator that reduced in place would change it under autograd's feet."""
    rank = dist.get_rank()
    x = random((3, 4), rank).requires_grad_()
    reduce_from_region(x.exp()).backward(random((3, 4), "dy"))
    z = random((3, 4), "z", rank).requires_grad_()
    y = copy_to_region(z)
    y.exp().backward(random((3, 4), "dy", rank))
    return x.grad, z.grad


def test_what_autograd_saved_is_not_overwritten():
    results = launch(_after_a_saving_function, 2)
    z_grads = [random((3, 4), "z", rank).exp() * random((3, 4), "dy", rank) for rank in range(2)]
    for rank, (x_grad, z_grad) in enumerate(results):
        assert_close(x_grad, random((3, 4), rank).exp() * random((3, 4), "dy"))
        assert_close(z_grad, z_grads[0] + z_grads[1])


def _second_derivative():
    """L = sum (g(a_r f(x)))^3 / 3, differentiated twice; a_r is another number on each rank."""
    a = random((4,), "a", dist.get_rank())
    x = random((4,), "x").requires_grad_()
    y = reduce_from_region(a * copy_to_region(x))
    (dx,) = torch.autograd.grad((y**3).sum() / 3, x, create_graph=True)
    part = scatter_to_region(x)
    (dpart,) = torch.autograd.grad((gather_from_region(part**2) ** 2).sum(), x, create_graph=True)
    return dx.detach(), torch.autograd.grad(dx.sum(), x)[0], torch.autograd.grad(dpart.sum(), x)[0]


def test_the_operators_can_be_differentiated_twice():
    x, a = random((4,), "x"), random((4,), "a", 0) + random((4,), "a", 1)
    for first, second, fourth_power in launch(_second_derivative, 2):
        assert_close(first, a * (a * x) ** 2)
        assert_close(second, 2 * a**3 * x)
        assert_close(fourth_power, 12 * x**2)


def _alone():
    x = random((3, 5), "x").requires_grad_()  # 5 columns can be "divided" over one rank
    with record() as section:
        outs = [operator.call(x, group=None) for operator in OPERATORS.values()]
        sum(outs).backward(random((3, 5), "dy"))
    return all(out is x for out in outs), len(section), x.grad


@pytest.mark.parametrize("how", ["no process group", "one rank"])
def test_one_rank_gets_its_own_tensor_back_and_sends_nothing(how):
    (same, calls, grad), *others = [_alone()] if how == "no process group" else launch(_alone, 1)
    assert same
    assert calls == 0
    assert not others
    assert_close(grad, 4 * random((3, 5), "dy"))


MODES = {
    "gradient": (True, nullcontext), "frozen": (False, nullcontext), "no_grad": (True, torch.no_grad),
    "inference_mode": (True, torch.inference_mode),
}  # fmt: skip


def _written_results():
    """Operator and mode -> what came of adding 1 to the result in place: an error, or whether x is still the same."""
    found = {}
    for (name, operator), (mode, (wants_grad, context)) in itertools.product(ALL.items(), MODES.items()):
        x = random((2, 8, 8), name).requires_grad_(wants_grad)
        before = x.detach().clone()
        with context():
            y = operator(x)
            (found[name, mode],) = refusals(lambda y=y: y.add_(1), kind=RuntimeError)
        assert torch.equal(x, before), (name, mode)
    return found


def test_writing_to_a_result_never_changes_the_input_and_what_autograd_needs_is_refused():
    for found in launch(_written_results, 2):
        errors = {key: error for key, error in found.items() if error != "no error"}
        assert {mode for _, mode in errors} == {"gradient"}
        assert "is a view and is being modified inplace" in errors["f", "gradient"]


def _refused():
    group = dist.new_group([1])
    foreign = group if dist.get_rank() == 0 else None
    return refusals(lambda: scatter_to_region(torch.ones(3, 5)), lambda: copy_to_region(torch.ones(3), foreign))


def test_uneven_parts_and_foreign_groups_are_refused():
    (uneven, foreign), (uneven_too, member) = launch(_refused, 2)
    assert "size=5 can't be divided over 2 ranks" in uneven
    assert uneven == uneven_too
    assert "rank 0 isn't a member of this group" in foreign
    assert member == "no error"


def _compiled(backend):
    rank = dist.get_rank()
    group = [dist.new_group([0, 1]), dist.new_group([1])][0]

    def program(x, w):
        h = gather_from_region(torch.tanh(copy_to_region(x) @ w), group, stride=2)
        return reduce_from_region(scatter_to_region(h, stride=2) @ w.T, group)

    x = random((3, 4), "x").requires_grad_()
    w = random((4, 4), "w", rank).requires_grad_()
    y = torch.compile(program, backend=backend, fullgraph=True)(x, w)
    with record() as section:
        y.backward(random((3, 4), "dy"))
    return y.detach(), x.grad, w.grad, [c.kind for c in section]


def _compiled_in_plain_torch():
    x = random((3, 4), "x").requires_grad_()
    ws = [random((4, 4), "w", rank).requires_grad_() for rank in range(2)]
    a, c = torch.cat([w[:, :2] for w in ws], 1), torch.cat([w[:, 2:] for w in ws], 1)
    h = torch.tanh(x @ torch.cat([a, c], 1))  # stride 2: the first halves of both, then the second halves
    y = sum(cut(h, 1, rank, 2, 2) @ ws[rank].T for rank in range(2))
    y.backward(random((3, 4), "dy"))
    return y.detach(), x.grad, [w.grad for w in ws]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph_they_give_the_same(backend):
    y, dx, dws = _compiled_in_plain_torch()
    results = launch(_compiled, 2, args=(backend,))
    for rank, (y_compiled, dx_compiled, dw_compiled, backward) in enumerate(results):
        assert_close(y_compiled, y)
        assert_close(dx_compiled, dx)
        assert_close(dw_compiled, dws[rank])
        assert backward == ["all_gather", "all_reduce"]
