"""Operators between regions, forward and backward, against what they should do to a list of every rank's tensor.

Every tensor is random and differs from rank to rank, even where a layer would have replicated ones. So an operator that
uses rank 0's tensor on all ranks, or that forgets a rank, gives wrong numbers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tests.reference import TOLERANCE, assert_close, cut, random
from tplab import record
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.operators import all_gather

TOLERANCES = {torch.float64: TOLERANCE, torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


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


def assert_right(group, cases: Sequence[Case]) -> None:
    """What each rank gets is what the formulas say, the traffic is the operator's, and nothing was written to.

    A single rank gets its own tensor back and sends nothing.
    """
    rank, p = rank_and_size(group)
    for case in cases:
        operator, shape, size = case.operator, list(case.shape), torch.Size(case.shape).numel() * case.dtype.itemsize
        if operator.x_is_part:
            shape[operator.dim] //= p
        x = case.layout(tuple(shape), "x", rank_and_size()[0]).to(case.dtype)
        x_before, x = x.clone(), x.requires_grad_()
        with record() as forward:
            y = operator.call(x, group, **({} if case.stride == 1 else {"stride": case.stride}))
        dy = case.dy_layout(tuple(y.shape), "dy", rank_and_size()[0]).to(case.dtype)
        dy_before = dy.clone()
        assert (y is x) == (p == 1)
        with record() as backward:
            (dx,) = torch.autograd.grad(y, x, dy)
        assert torch.equal(x, x_before), "x was written to"
        assert torch.equal(dy, dy_before), "dy was written to"
        xs, dys = (all_gather(t, group) if p > 1 else [t] for t in (x_before, dy_before))
        assert_close(y.detach(), operator.forward(xs, operator.dim, case.stride)[rank], TOLERANCES[case.dtype])
        assert_close(dx, operator.backward(dys, operator.dim, case.stride)[rank], TOLERANCES[case.dtype])
        for section, kind in zip((forward, backward), operator.sent, strict=True):
            op, name = None if kind == "all_gather" else "sum", str(case.dtype).removeprefix("torch.")
            expected = [(kind, size, name, op, True)] if kind and p > 1 else []
            assert [(c.kind, c.bytes, c.dtype, c.op, c.end is not None) for c in section] == expected
