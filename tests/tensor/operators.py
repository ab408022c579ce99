"""Operators between regions, forward and backward, against what they should do to a list of every rank's tensor.

Every tensor is random and differs from rank to rank, even where a layer would have replicated ones. So an operator that
uses rank 0's tensor on all ranks, or that forgets a rank, gives wrong numbers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.reference import TOLERANCE, assert_close, cut, random
from tests.tensor.on_ranks import own_group
from tplab import launch, record


class Operator(NamedTuple):
    call: Callable
    forward: Callable  # every rank's x -> every rank's y
    backward: Callable  # every rank's dy -> every rank's dx
    x: str  # what a layer has there: "replicated", a "part", or each rank's "own" tensor of the full size
    y: str
    dim: int  # of the parts


def same(xs, dim, stride):
    return xs


def summed(xs, dim, stride):
    return [torch.stack(xs).sum(0)] * len(xs)


def parts(xs, dim, stride):
    return [cut(x, dim, rank, len(xs), stride) for rank, x in enumerate(xs)]


def parts_of_sum(xs, dim, stride):
    return parts(summed(xs, dim, stride), dim, stride)


def joined(xs, dim, stride):
    blocks = zip(*(x.chunk(stride, dim) for x in xs), strict=True)
    return [torch.cat([part for block in blocks for part in block], dim)] * len(xs)


# Layouts: each returns a tensor of the given shape whose values depend on the key.


def contiguous(shape, *key):
    return random(shape, *key)


def transposed(shape, *key):
    return random(shape[::-1], *key).permute(*reversed(range(len(shape))))


def sequence_first(shape, *key):
    """[b, s, h] as a view of [s, b, h], in which a part of the sequence is contiguous."""
    return random((shape[1], shape[0], *shape[2:]), *key).transpose(0, 1)


def every_second(shape, *key):
    return random((*shape[:-1], 2 * shape[-1]), *key)[..., ::2]


def offset(shape, *key):
    return random((shape[0] + 1, *shape[1:]), *key)[1:]


def expanded(shape, *key):
    return random((), *key).expand(shape)  # strides 0, as the gradient of sum() has


def expanded_rows(shape, *key):
    return random((1, *shape[1:]), *key).expand(shape)


def transposed_on_odd_ranks(shape, name, rank):
    return (transposed if rank % 2 else contiguous)(shape, name, rank)


LAYOUTS = (
    contiguous, transposed, sequence_first, every_second, offset, expanded, expanded_rows, transposed_on_odd_ranks,
)  # fmt: skip


class Case(NamedTuple):
    operator: Operator
    shape: tuple[int, ...]  # of the whole tensor
    stride: int = 1
    layout: Callable = contiguous
    dy_layout: Callable = contiguous
    dtype: torch.dtype = torch.float64
    as_in_a_layer: bool = False  # replicate what is replicated in a layer


def _operate(case, group):
    operator, shape, (rank, p) = case.operator, list(case.shape), (dist.get_rank(), dist.get_world_size(group))
    if operator.x == "part":
        shape[operator.dim] //= p
    key_x, key_y = (0 if case.as_in_a_layer and side == "replicated" else rank for side in (operator.x, operator.y))
    x = case.layout(tuple(shape), "x", key_x).to(case.dtype)
    x_before, x = x.clone(), x.requires_grad_()
    with record() as forward:
        y = operator.call(x, group, **({} if case.stride == 1 else {"stride": case.stride}))
    dy = case.dy_layout(tuple(y.shape), "dy", key_y).to(case.dtype)
    dy_before = dy.clone()
    with record() as backward:
        (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(x, x_before), "x was written to"
    assert torch.equal(dy, dy_before), "dy was written to"
    sent = [[(c.kind, c.bytes, c.dtype, c.op, c.end is not None) for c in section] for section in (forward, backward)]
    return {"x": x_before, "y": y.detach(), "dy": dy_before, "dx": dx, "traffic": sent}


def _operate_on_all(cases, in_groups):
    group = own_group() if in_groups else None
    return [_operate(case, group) for case in cases]


def outcomes(cases: Sequence[Case], p: int, groups: Sequence[Sequence[int]] | None = None) -> list:
    """(case, [outcome of each of its ranks]) for each group and each case."""
    results = launch(_operate_on_all, p, args=(cases, groups is not None), timeout=120)
    assert len(results) == p
    return [
        (case, [results[rank][number] for rank in members])
        for members in groups or [range(p)]
        for number, case in enumerate(cases)
    ]


def assert_right(cases: Sequence[Case], p: int, groups=None, tolerance: float = TOLERANCE) -> list:
    """Compare the `outcomes`, and return them."""
    found = outcomes(cases, p, groups)
    for case, ranks in found:
        operator = case.operator
        ys = operator.forward([rank["x"] for rank in ranks], operator.dim, case.stride)
        dxs = operator.backward([rank["dy"] for rank in ranks], operator.dim, case.stride)
        for rank, y, dx in zip(ranks, ys, dxs, strict=True):
            assert_close(rank["y"], y, tolerance)
            assert_close(rank["dx"], dx, tolerance)
    return found


def assert_adjoint(cases: Sequence[Case], p: int) -> None:
    """<dy, A x> = <A^T dy, x>. A replicated tensor is one vector and counts once; the ranks' own tensors are p."""
    for (operator, *_), ranks in outcomes([case._replace(as_in_a_layer=True) for case in cases], p):
        products = []
        for side, given, result in ((operator.y, "dy", "y"), (operator.x, "x", "dx")):
            of_ranks = [torch.sum(rank[given] * rank[result]) for rank in ranks]
            products.append(of_ranks[0] if side == "replicated" else sum(of_ranks))
            assert side != "replicated" or all(torch.equal(rank[result], ranks[0][result]) for rank in ranks)
        assert abs(products[0] - products[1]) < 1e-10, operator
