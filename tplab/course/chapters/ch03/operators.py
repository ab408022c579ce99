"""Run one of chapter 03's operators alone, on 1, 2 and 4 ranks, and compare it with what is right.

Each operator is tested alone. Every rank has its own x and its own upstream gradient, also where the docstring of the
exercise says that they are replicated: so a wrong sum, a wrong slice or a needless broadcast can't hide. The plain
cases come first; the second run has an input that autograd has saved, tensors that are not contiguous, and the
expanded gradient of .sum().
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tplab.course.checks import (
    CheckFailed,
    Lookalikes,
    Observed,
    Question,
    Traffic,
    fail,
    fresh_generator,
    observe,
    random_tensor,
    run_cases,
    verify,
)
from tplab.runtime import device

H = 8  # the last dimension of the whole tensor: divisible by every p


@dataclass(frozen=True)
class Case:
    """One run of an operator.

    leading:  all dimensions but the last
    layout:   of x and of the upstream gradient in memory: "contiguous", "transposed" or "every second column"
    expanded: the upstream gradient is that of out.sum()
    exp:      x is the output of exp, which autograd has saved
    """

    note: str
    leading: tuple[int, ...] = (5,)
    layout: str = "contiguous"
    expanded: bool = False
    exp: bool = False


PLAIN = (Case("x of 2 dimensions"), Case("x of 3 dimensions", (2, 3)), Case("x of 1 dimension", ()))

SPECIAL = (
    Case("x after exp, whose output autograd has saved", exp=True),
    Case("x and the gradient transposed in memory", layout="transposed"),
    Case("x and the gradient every second column of a larger tensor", layout="every second column"),
    Case("the gradient of .sum(), with strides of 0", (2, 3), expanded=True),
)

_NOT_CONTIGUOUS = (
    "A collective wants memory without gaps, and takes what it is given. Is this tensor contiguous in every case? "
    "(Gradients often are not: that of .sum() is one number with strides of 0.)"
)

_SHAPE = (
    "A gradient has the shape of the tensor it belongs to: here, of what went into forward. Is that the whole, [.., "
    "h], or this rank's part, [.., h/p]? And what do you return?"
)

_CUT = "Which dimension does the task cut, and in which order does shard take (tensor, dim, rank, world_size)?"

_SAVED = (
    "x came out of exp, and autograd keeps that output for the derivative of exp. Who wrote into it? (Putting the "
    "old numbers back is a second write.)"
)


@dataclass(frozen=True)
class Operator:
    """What an operator should do.

    sharded_in, sharded_out: the last dimension of x, of the output, is H/p instead of H
    forward, backward:       the right output and dx on every rank, from everybody's x and everybody's upstream gradient
    traffic_forward, traffic_backward: the kind of collective, "" for none; its message has the size of the whole tensor
    """

    sharded_in: bool
    sharded_out: bool
    forward: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    backward: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    traffic_forward: str
    traffic_backward: str


def same(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors


def total(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [torch.stack(list(tensors)).sum(0)] * len(tensors)


def my_part(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.chunk(len(tensors), -1)[rank] for rank, tensor in enumerate(tensors)]


def all_parts(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [torch.cat(list(tensors), -1)] * len(tensors)


F = Operator(False, False, same, total, "", "all_reduce")
G = Operator(False, False, total, same, "all_reduce", "")
SCATTER = Operator(False, True, my_part, all_parts, "", "all_gather")
GATHER = Operator(True, False, all_parts, my_part, "all_gather", "")


def run_operator(operator: Any, cases: Sequence[Case], data: Sequence[tuple[Any, Any]]) -> list[Observed]:
    """On a rank: every case, one after the other; data[case] is (x, upstream gradient), each of every rank."""
    rank = dist.get_rank()
    noted = []
    for case, (x, upstream) in zip(cases, data, strict=True):
        mine = laid_out(x[rank].to(device()), case.layout)
        gradient = None if case.expanded else laid_out(upstream[rank].to(device()), case.layout)

        def run(x: Tensor, case: Case = case) -> Any:
            return operator.apply(x.exp() if case.exp else x)

        noted.append(observe(run, gradient, inputs={"x": mine}))
    return noted


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers, arranged in memory as `layout` says."""
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "every second column":
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 7.0)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor


def check_operator(
    number: str,
    operator: Any,
    right: Operator,
    questions: Sequence[Question],
    lookalikes: Callable[[Sequence[Tensor], Sequence[Tensor]], Lookalikes],
) -> None:
    """Run an operator alone, on 2, 4 and 1 ranks, and compare outputs, gradients and traffic with what is right."""
    if not (isinstance(operator, type) and issubclass(operator, Function)):
        fail(
            number,
            "the answer is not a class made from torch.autograd.Function.",
            "Is the line `class ...(Function):` still there?",
        )
    for p in (2, 4, 1):  # two ranks tell most about a mistake
        for cases in (PLAIN, SPECIAL):
            generator = fresh_generator()
            xs, upstreams = [], []
            for case in cases:
                xs.append(_random(generator, p, case.leading, H // p if right.sharded_in else H))
                shape = (*case.leading, H // p if right.sharded_out else H)
                ones = [torch.ones(shape, dtype=torch.float64)] * p
                upstreams.append(ones if case.expanded else _random(generator, p, *_split_shape(shape)))
            runs = _run(p, operator, cases, list(zip(xs, upstreams, strict=True)))
            for index, (case, seen) in enumerate(zip(cases, runs, strict=True)):
                x, upstream = [t.exp() if case.exp else t for t in xs[index]], upstreams[index]
                dx = [d * e if case.exp else d for d, e in zip(right.backward(upstream), x, strict=True)]
                size = max(x[0].numel(), upstream[0].numel())
                expected = [
                    {
                        "out": right.forward(x)[rank],
                        "forward traffic": _traffic(p, right.traffic_forward, size),
                        "dx": dx[rank],
                        "backward traffic": _traffic(p, right.traffic_backward, size),
                    }
                    for rank in range(p)
                ]
                verify(
                    number,
                    p,
                    seen,
                    expected,
                    questions=questions,
                    lookalikes=lookalikes(x, upstream) if p > 1 and not case.exp else {},
                    note=case.note,
                )


def _run(p: int, operator: Any, cases: Sequence[Case], data: Sequence[Any]) -> Iterator[list[Observed]]:
    """What each case gave on p ranks; a failure that these operators are known for gets a question of its own."""
    try:
        yield from run_cases(run_operator, p, operator, cases, data, note=lambda case: case.note)
    except CheckFailed as failure:
        for words, question in (
            ("returned an invalid gradient", _SHAPE),
            ("contiguous", _NOT_CONTIGUOUS),
            ("modified by an inplace operation", _SAVED),
            ("can't be divided over", _CUT),
            ("isn't one of", _CUT),
        ):
            if words in failure.report:
                failure.question = question
        raise


def _random(generator: torch.Generator, p: int, leading: tuple[int, ...], last: int) -> list[Tensor]:
    return [random_tensor(generator, *leading, last) for _ in range(p)]


def _split_shape(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    return shape[:-1], shape[-1]


def _traffic(p: int, kind: str, size: int) -> Traffic:
    return Traffic.expected(p, (kind, size)) if kind else Traffic.expected(p)
