"""Operators between regions, forward and backward, against what they should do to a list of every rank's tensor.

Every tensor is random and differs from rank to rank, even where a layer would have replicated ones. So an operator that
uses rank 0's tensor on all ranks, or that forgets a rank, gives wrong numbers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tests.reference import assert_close, cut, random
from tplab import record
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.operators import all_gather


class Operator(NamedTuple):
    call: Callable
    forward: Callable  # every rank's x -> every rank's y
    backward: Callable  # every rank's dy -> every rank's dx
    sent: tuple[str, str]  # the collective of each pass, or "", which sends the whole tensor
    x_is_part: bool
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


def every_second(shape, *key):
    return random((*shape[:-1], 2 * shape[-1]), *key)[..., ::2]


def expanded(shape, *key):
    return random((), *key).expand(shape)  # strides 0, as the gradient of sum() has


def expanded_rows(shape, *key):
    return random((1, *shape[1:]), *key).expand(shape)


LAYOUTS = (contiguous, transposed, every_second, expanded, expanded_rows)


class Case(NamedTuple):
    operator: Operator
    shape: tuple[int, ...]  # of the whole tensor
    stride: int = 1
    layout: Callable = contiguous
    dy_layout: Callable = contiguous


def assert_right(group, cases: Sequence[Case]) -> None:
    """What each rank gets is what the formulas say, the traffic is the operator's, and nothing was written to.

    A single rank gets its own tensor back and sends nothing.
    """
    rank, p = rank_and_size(group)
    for case in cases:
        operator, shape, size = case.operator, list(case.shape), 8 * torch.Size(case.shape).numel()
        if operator.x_is_part:
            shape[operator.dim] //= p
        x = case.layout(tuple(shape), "x", rank_and_size()[0])
        x_before, x = x.clone(), x.requires_grad_()
        with record() as forward:
            y = operator.call(x, group, **({} if case.stride == 1 else {"stride": case.stride}))
        dy = case.dy_layout(tuple(y.shape), "dy", rank_and_size()[0])
        dy_before = dy.clone()
        assert (y is x) == (p == 1)
        with record() as backward:
            (dx,) = torch.autograd.grad(y, x, dy)
        assert torch.equal(x, x_before), "x was written to"
        assert torch.equal(dy, dy_before), "dy was written to"
        xs, dys = (all_gather(t, group) if p > 1 else [t] for t in (x_before, dy_before))
        assert_close(y.detach(), operator.forward(xs, operator.dim, case.stride)[rank])
        assert_close(dx, operator.backward(dys, operator.dim, case.stride)[rank])
        for section, kind in zip((forward, backward), operator.sent, strict=True):
            expected = [(kind, size, None if kind == "all_gather" else "sum", True)] if kind and p > 1 else []
            assert [(c.kind, c.bytes, c.op, c.end is not None) for c in section] == expected
