"""f, g, scatter and gather: `tplab.tensor.mappings`, against their formulas in plain torch, on real ranks.

Every tensor is random and another one on each rank, also where a layer would have replicated ones, so that an operator
that takes rank 0's numbers for everybody's, or forgets one rank, gives wrong numbers.
"""

import pytest
import torch
import torch.distributed as dist

from tests.reference import assert_close, cut, random
from tplab import launch, record
from tplab.tensor.mappings import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region

OPERATORS = {"f": copy_to_region, "g": reduce_from_region, "scatter": scatter_to_region, "gather": gather_from_region}
CONJUGATE = {"f": "g", "g": "f", "scatter": "gather", "gather": "scatter"}
WORLD_SIZES = (2, 4)


# What the operators should give: a list of every rank's tensor -> a list of every rank's tensor.


def expected_forward(name, xs, stride=1):
    p = len(xs)
    if name == "f":
        return xs
    if name == "g":
        return [torch.stack(xs).sum(0)] * p
    if name == "scatter":
        return [cut(x, -1, rank, p, stride) for rank, x in enumerate(xs)]
    blocks = [[x.chunk(stride, -1)[block] for x in xs] for block in range(stride)]
    return [torch.cat([part for block in blocks for part in block], -1)] * p


def expected_backward(name, dys, stride=1):
    return expected_forward(CONJUGATE[name], dys, stride)


# Layouts: each gives a tensor of the wanted shape whose numbers depend on the key.


def contiguous(shape, *key):
    return random(shape, *key)


def transposed(shape, *key):
    return random(shape[::-1], *key).permute(*reversed(range(len(shape))))


def every_second(shape, *key):
    return random((*shape[:-1], 2 * shape[-1]), *key)[..., ::2]


def offset(shape, *key):
    return random((shape[0] + 1, *shape[1:]), *key)[1:]


def expanded(shape, *key):
    return random((), *key).expand(shape)  # strides 0, as the gradient of sum() has


def expanded_rows(shape, *key):
    return random((1, *shape[1:]), *key).expand(shape)


LAYOUTS = [contiguous, transposed, every_second, offset, expanded, expanded_rows]
SHAPES = [(24,), (3, 24), (2, 3, 24), (2, 1, 3, 24), (0, 24), (2, 0, 24)]


def _operate(name, shape, layout, dy_layout, stride=1, dtype=torch.float64, group=None):
    """One operator, forward and backward: what came out, and whether the caller's tensors are as they were."""
    rank, p = dist.get_rank(), dist.get_world_size(group)
    if name == "gather":
        shape = (*shape[:-1], shape[-1] // p)
    x = layout(shape, "x", rank).to(dtype)
    x_before, x = x.clone(), x.requires_grad_()
    y = OPERATORS[name](x, group, **({"stride": stride} if name in ("scatter", "gather") else {}))
    dy = dy_layout(tuple(y.shape), "dy", rank).to(dtype)
    dy_before = dy.clone()
    (dx,) = torch.autograd.grad(y, x, dy)
    unchanged = torch.equal(x, x_before) and torch.equal(dy, dy_before)
    return {"x": x_before, "y": y.detach(), "dy": dy_before, "dx": dx, "unchanged": unchanged, "rank": rank}


def _operate_on_all(cases):
    return [_operate(*case) for case in cases]


def _ranks(results, case=None):
    return [result if case is None else result[case] for result in results]


def _assert_right(results, name, stride=1, tolerance=1e-12):
    """`results`: of one operator on the ranks of one group."""
    xs, dys = [result["x"] for result in results], [result["dy"] for result in results]
    for rank, (y, dx) in enumerate(
        zip(expected_forward(name, xs, stride), expected_backward(name, dys, stride), strict=True)
    ):
        assert_close(results[rank]["y"], y, tolerance)
        assert_close(results[rank]["dx"], dx, tolerance)
        assert results[rank]["unchanged"], f"the caller's tensors were written to on rank {rank}"


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("name", OPERATORS)
def test_forward_and_backward_are_the_formula_for_every_shape_and_stride(name, p):
    cases = [(name, shape, contiguous, contiguous) for shape in SHAPES]
    if name in ("scatter", "gather"):
        cases += [(name, shape, contiguous, contiguous, stride) for shape in SHAPES for stride in (2, 3)]
    results = launch(_operate_on_all, p, args=(cases,))
    assert len(results) == p
    for case, arguments in enumerate(cases):
        _assert_right(_ranks(results, case), name, *arguments[4:])


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("name", OPERATORS)
def test_any_layout_works_and_the_callers_tensors_stay_as_they_are(name, p):
    cases = [(name, (4, 24), layout, dy_layout) for layout in LAYOUTS for dy_layout in LAYOUTS]
    results = launch(_operate_on_all, p, args=(cases,))
    for case in range(len(cases)):
        _assert_right(_ranks(results, case), name)


def _one_rank_transposed():
    rank = dist.get_rank()
    x = (transposed if rank else contiguous)((4, 6), rank)
    return reduce_from_region(x), gather_from_region(x)


def test_a_transposed_tensor_on_one_rank_is_summed_and_gathered_by_what_it_holds():
    xs = [contiguous((4, 6), 0), transposed((4, 6), 1)]
    for total, whole in launch(_one_rank_transposed, 2):
        assert_close(total, xs[0] + xs[1])
        assert_close(whole, torch.cat(xs, -1))


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("stride", [1, 2])
def test_each_backward_is_the_adjoint(stride, p):
    """<y, A x> = <A^T y, x>; a replicated tensor is one vector (it counts once), the ranks' parts or summands are p."""
    names = ["f", "g", "scatter", "gather"] if stride == 1 else ["scatter", "gather"]
    for (name, x_replicated, y_replicated), results in zip(
        [(name, name in ("f", "scatter"), name in ("g", "gather")) for name in names],
        zip(*launch(_adjoints, p, args=(names, stride)), strict=True),
        strict=True,
    ):
        left = [torch.sum(result["dy"] * result["y"]) for result in results]
        right = [torch.sum(result["dx"] * result["x"]) for result in results]
        left_total = left[0] if y_replicated else sum(left)
        right_total = right[0] if x_replicated else sum(right)
        assert abs(left_total - right_total) < 1e-10, name
        for result in results:  # what should be replicated is
            assert not y_replicated or torch.equal(result["y"], results[0]["y"])
            assert not x_replicated or torch.equal(result["dx"], results[0]["dx"])


def _adjoints(names, stride):
    rank, p = dist.get_rank(), dist.get_world_size()
    outcomes = []
    for name in names:
        shape = (3, 24 // p) if name == "gather" else (3, 24)
        x = random(shape, "x", 0 if name in ("f", "scatter") else rank).requires_grad_()
        y = OPERATORS[name](x, **({"stride": stride} if name in ("scatter", "gather") else {}))
        dy = random(tuple(y.shape), "y", 0 if name in ("g", "gather") else rank)
        (dx,) = torch.autograd.grad(y, x, dy)
        outcomes.append({"x": x.detach(), "y": y.detach(), "dy": dy, "dx": dx})
    return outcomes


@pytest.mark.parametrize("name", OPERATORS)
def test_two_groups_side_by_side_do_not_mix(name):
    results = launch(_in_groups, 4, args=(name,))
    for members in ([0, 2], [1, 3]):
        _assert_right([results[rank] for rank in members], name)


def _in_groups(name):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # every rank makes both
    return _operate(name, (3, 8), contiguous, transposed, group=groups[dist.get_rank() % 2])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]
)
def test_dtypes_stay_and_round_as_their_precision_says(dtype, tolerance):
    cases = [(name, (3, 24), contiguous, contiguous, 1, dtype) for name in OPERATORS]
    results = launch(_operate_on_all, 4, args=(cases,))
    for case, (name, *_) in enumerate(cases):
        _assert_right(_ranks(results, case), name, tolerance=tolerance)
        assert all(result[case]["y"].dtype == result[case]["dx"].dtype == dtype for result in results)


def _measured(name, dtype):
    rank, p = dist.get_rank(), dist.get_world_size()
    shape = (2, 3, 24 // p) if name == "gather" else (2, 3, 24)
    x = random(shape, rank, dtype=dtype).requires_grad_()
    with record() as forward:
        y = OPERATORS[name](x)
    with record() as backward:
        y.backward(random(tuple(y.shape), "dy", rank, dtype=dtype))
    return [[(c.kind, c.bytes, c.dtype, c.op, c.end is not None) for c in section] for section in (forward, backward)]


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_each_operator_sends_the_whole_tensor_once_forward_or_backward(dtype, p):
    size = 2 * 3 * 24 * dtype.itemsize
    dtype_name = str(dtype).removeprefix("torch.")
    reduction = [("all_reduce", size, dtype_name, "sum", True)]
    gathering = [("all_gather", size, dtype_name, None, True)]
    traffic = {"f": [[], reduction], "g": [reduction, []], "scatter": [[], gathering], "gather": [gathering, []]}
    results = launch(_measured_all, p, args=(dtype,))
    assert len(results) == p
    for result in results:
        assert result == traffic


def _measured_all(dtype):
    return {name: _measured(name, dtype) for name in OPERATORS}


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


def _sum_backward():
    x = random((3, 8), "x").requires_grad_()
    copy_to_region(x).sum().backward()
    first, x.grad = x.grad, None
    gather_from_region(scatter_to_region(x)).sum().backward()
    return first, x.grad


def test_the_expanded_gradient_of_sum_is_reduced_and_cut():
    for through_f, through_scatter in launch(_sum_backward, 4):
        assert_close(through_f, torch.full((3, 8), 4.0, dtype=torch.float64))
        assert_close(through_scatter, torch.ones(3, 8, dtype=torch.float64))


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
        outs = [operator(x, group=None) for operator in OPERATORS.values()]
        sum(outs).backward(random((3, 5), "dy"))
    return all(out is x for out in outs), len(section), x.grad


@pytest.mark.parametrize("how", ["no process group", "one rank"])
def test_one_rank_gets_its_own_tensor_back_and_sends_nothing(how):
    (same, calls, grad), *others = [_alone()] if how == "no process group" else launch(_alone, 1)
    assert same
    assert calls == 0
    assert not others
    assert_close(grad, 4 * random((3, 5), "dy"))


def _refused():
    group = dist.new_group([1])
    messages = []
    for operator, x in [(scatter_to_region, torch.ones(3, 5)), (copy_to_region, torch.ones(3))]:
        try:
            operator(x, group if operator is copy_to_region and dist.get_rank() == 0 else None)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_uneven_parts_and_foreign_groups_are_refused():
    (uneven, foreign), (uneven_too, member) = launch(_refused, 2)
    assert "size=5 can't be divided over 2 ranks" in uneven
    assert uneven == uneven_too
    assert "rank 0 isn't a member of this group" in foreign
    assert member == ""


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
