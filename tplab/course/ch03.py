"""What chapter 03 asks: the checks of the four operators, the chapter's predictions, its table of symptoms.

Each operator is tested alone. Every rank has its own x and its own upstream gradient, also where the docstring of the
exercise says that they are replicated: so a wrong sum, a wrong slice or a needless broadcast can't hide. The plain
cases come first; the second run has an input that autograd has saved, tensors that are not contiguous, and the
expanded gradient of .sum().
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tplab.course.checking import (
    CheckFailed,
    Differences,
    Observed,
    Question,
    Traffic,
    Verdict,
    exercise,
    fail,
    fresh_generator,
    observe,
    run_ranks,
    verify,
)
from tplab.course.predictions import Prediction
from tplab.course.symptoms import Symptom
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


def run_cases(operator: Any, cases: Sequence[Case], xs: Sequence[Any], upstreams: Sequence[Any]) -> list[Observed]:
    """On a rank: every case, one after the other; xs[case][rank] and upstreams[case][rank] are this rank's."""
    rank = dist.get_rank()
    noted = []
    for case, x, upstream in zip(cases, xs, upstreams, strict=True):
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


Lookalikes = Mapping[str, Mapping[str, Sequence[Tensor]]]


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
            seen = _run(p, operator, cases, xs, upstreams)
            for index, case in enumerate(cases):
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
                    [noted[index] for noted in seen],
                    expected,
                    questions=questions,
                    lookalikes=lookalikes(x, upstream) if p > 1 and not case.exp else {},
                    note=case.note,
                )


def _run(p: int, operator: Any, cases: Sequence[Case], xs: Sequence[Any], upstreams: Sequence[Any]) -> Any:
    """`run_cases` on p ranks; a failure that these operators are known for gets a question of its own."""
    try:
        return run_ranks(run_cases, p, operator, cases, xs, upstreams)
    except CheckFailed as failure:
        for words, question in (
            ("returned an invalid gradient", _SHAPE),
            ("contiguous", _NOT_CONTIGUOUS),
            ("modified by an inplace operation", _SAVED),
        ):
            if words in failure.report:
                failure.question = question
        raise


def _random(generator: torch.Generator, p: int, leading: tuple[int, ...], last: int) -> list[Tensor]:
    return [torch.randn(*leading, last, generator=generator, dtype=torch.float64) for _ in range(p)]


def _split_shape(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    return shape[:-1], shape[-1]


def _traffic(p: int, kind: str, size: int) -> Traffic:
    return Traffic.expected(p, (kind, size)) if kind else Traffic.expected(p)


# ---------------------------------------------------------------------------------------------------------------------
# Questions


def kind_is(name: str, *kinds: str) -> Callable[[Differences], bool]:
    return lambda differences: differences.kind(name) in kinds


def traffic_too(name: str, kind: str, traffic: str) -> Callable[[Differences], bool]:
    """`name` is wrong in this way, and `traffic` differs as well."""
    return lambda differences: differences.kind(name) == kind and traffic in differences.names


_FORWARD_SENDS = Question(
    lambda d: "forward traffic" in d.names and d.kind("forward traffic") == "traffic" and not d.malformed,
    "What does this operator have to send in the forward pass? Read its row in the table again.",
)
_BACKWARD_SENDS = Question(
    lambda d: d.names == {"backward traffic"},
    "The gradient is right. What has to be sent for it in the backward pass? Read the operator's row in the table "
    "again.",
)
_LATE = Question(
    lambda d: "never waited" in d.kinds(),
    "The collective was started with async_op=True. From when on may its result be read?",
)
_ROUNDED = Question(
    lambda d: bool({"rounded", "dtype"} & d.kinds()),
    "Which step leaves the dtype of the tensor? Fewer bytes are sent that way, and digits are lost.",
)
_WROTE = Question(
    lambda d: any(d.kind(name) == "changed" for name in d.names),
    "A collective writes into the tensor it is given. Was that one yours? The caller still needs x, and autograd the "
    "upstream gradient: what has to be made first? (.contiguous() makes no copy of a tensor that is contiguous "
    "already.)",
)
_NO_GRADIENT = Question(
    kind_is("dx", "none"),
    "backward returned nothing for x. What is its last line? (dist.all_reduce changes its argument and returns None.)",
)
_ZERO_GRADIENT = Question(kind_is("dx", "zeros"), "The gradient has the right shape. Which line puts numbers in?")
_ZERO_OUT = Question(kind_is("out", "zeros"), "The output has the right shape. Which line puts numbers in?")

_OWN_TERM = "this rank's own upstream gradient, before the sum"
_OWN_X = "this rank's own x"
_SUM_X = "the sum of x over all ranks"
_SUM_UP = "the sum of the upstream gradients of all ranks"
_MEAN_X = "the mean of x over all ranks"
_X_OF_0 = "the x of rank 0"
_UP_OF_0 = "the upstream gradient of rank 0"
_P_TIMES_OWN = "p times this rank's own upstream gradient"
_LARGEST = "the largest over the ranks, entry by entry"

_ONLY_ROOT = (
    "Rank 0 is right, the others are not. Which collective gives its result to one rank only, and which to all?"
)

_F_QUESTIONS = (
    _LATE,
    _ROUNDED,
    _WROTE,
    Question(
        kind_is("out", _SUM_X, _X_OF_0, _MEAN_X),
        "Forward, every rank has the right x already. What is left for f to do?",
    ),
    _ZERO_OUT,
    _FORWARD_SENDS,
    _NO_GRADIENT,
    _ZERO_GRADIENT,
    Question(lambda d: d.p > 1 and "dx" in d.names and 0 not in d.ranks("dx"), _ONLY_ROOT),
    Question(
        traffic_too("dx", _OWN_TERM, "backward traffic"),
        "x went to every rank, and the gradient of each rank covers its own path only. Who adds up the paths?",
    ),
    Question(
        kind_is("dx", _OWN_TERM),
        "An all-reduce ran, but the tensor you return does not hold the sum. Which tensor did it write into?",
    ),
    Question(
        kind_is("dx", _P_TIMES_OWN),
        "x went to every rank, and each rank's gradient is a different one. Where do the other ranks' come in?",
    ),
    Question(kind_is("dx", "1/p"), "The chain rule adds over all uses of x. Does it take their mean?"),
    Question(kind_is("dx", _LARGEST), "The chain rule adds over all uses of x. Does it take the largest?"),
    Question(kind_is("dx", "p times"), "How many times is each rank's term added?"),
    Question(
        lambda d: d.names == {"backward traffic"} and any("all_gather" in row.text for row in d),
        "The gradient is right, but every rank received p tensors to add them up itself. Which collective adds on "
        "the way?",
    ),
    _BACKWARD_SENDS,
)

_G_QUESTIONS = (
    _LATE,
    _ROUNDED,
    _WROTE,
    _ZERO_OUT,
    Question(lambda d: d.p > 1 and "out" in d.names and 0 not in d.ranks("out"), _ONLY_ROOT),
    Question(
        traffic_too("out", _OWN_X, "forward traffic"),
        "Each rank holds one term of a sum. Who adds them up?",
    ),
    Question(
        kind_is("out", _OWN_X),
        "An all-reduce ran, but the tensor you return does not hold the sum. Which tensor did it write into? "
        "(.contiguous() makes a copy of a tensor that is not contiguous.)",
    ),
    Question(kind_is("out", "1/p"), "The network adds the terms. Does it take their mean?"),
    Question(kind_is("out", "p times"), "How many times is each rank's term added?"),
    Question(
        lambda d: d.names == {"forward traffic"} and any("all_gather" in row.text for row in d),
        "The sum is right, but every rank received p tensors to add them up itself. Which collective adds on the way?",
    ),
    _FORWARD_SENDS,
    _NO_GRADIENT,
    _ZERO_GRADIENT,
    Question(
        kind_is("dx", _SUM_UP),
        "All ranks share one loss, and each holds its whole gradient already. How often is it counted if you add the "
        "ranks' copies?",
    ),
    Question(
        kind_is("dx", "1/p", "p times"),
        "z = z_0 + z_1: how much does z change when one term changes by 1? Is there a p in it?",
    ),
    Question(kind_is("dx", _UP_OF_0), "Every rank holds the gradient already. Why ask rank 0 for it?"),
    _BACKWARD_SENDS,
)

_PART_OF_0 = "part 0 of x, whatever the rank"
_EVERY_PTH = "every p-th column of x"
_PADDED = "this rank's part of the gradient, and zeros elsewhere"
_COPIES = "p copies of this rank's part"
_SUM_PARTS = "the sum of the parts of all ranks"
_STACKED = "the parts of all ranks, one after another along dimension 0"
_SLICE_OF_SUM = "this rank's slice of the sum of all ranks' gradients"
_SLICE_OF_MEAN = "this rank's slice of the mean of all ranks' gradients"
_SLICE_0 = "slice 0 of the gradient, whatever the rank"
_WHOLE = "the whole gradient"
_WHOLE_X = "the whole x"

_UNEVEN = "a size that can't be divided"
_SCATTER_QUESTIONS = (
    Question(
        _UNEVEN,
        "9 columns on 2 ranks: one rank would hold more than the other. What does the other half of the network make "
        "of that? (shard refuses such sizes for you.)",
    ),
    _LATE,
    _ROUNDED,
    _WROTE,
    _ZERO_OUT,
    Question(kind_is("out", _PART_OF_0), "Which part of x is this rank's own?"),
    Question(kind_is("out", _EVERY_PTH, "value"), "A shard is a block of neighbours. Which columns does rank r hold?"),
    Question(kind_is("out", _WHOLE_X), "What is left for this rank to cut away?"),
    Question(
        lambda d: "out" in d.names and not d.malformed,
        "Which dimension does scatter cut, how long is a part, and where does the part of rank r start?",
    ),
    _FORWARD_SENDS,
    _NO_GRADIENT,
    _ZERO_GRADIENT,
    Question(
        lambda d: d.kind("dx") in (_PADDED, "partly zero"),
        "The rest of the gradient is not zero: other ranks hold it. How does it get here?",
    ),
    Question(kind_is("dx", _COPIES), "Every part came from this rank. Which call brings the other ranks' parts?"),
    Question(kind_is("dx", _SUM_PARTS), "The parts are gradients of different columns of x. Should they be added?"),
    Question(
        lambda d: d.kind("dx") in (_STACKED, "order") or "order" in d.kinds(),
        "x was cut along the last dimension, in rank order. Along which dimension, and in which order, do the parts "
        "go back?",
    ),
    Question(
        kind_is("dx", "1/p", "p times"), "Each column of x was used by one rank, once. Is there a p in its gradient?"
    ),
    Question(
        lambda d: d.names == {"backward traffic"} and any("all_reduce" in row.text for row in d),
        "The gradient is right. But an all-reduce adds, and here nothing has to be added. Which collective only "
        "brings the parts together, for half of what an all-reduce sends?",
    ),
    _BACKWARD_SENDS,
)

_GATHER_QUESTIONS = (
    _LATE,
    _ROUNDED,
    _WROTE,
    _ZERO_OUT,
    Question(kind_is("out", _OWN_X), "This is one part. Who holds the others?"),
    Question(kind_is("out", _COPIES), "Every part came from this rank. Which call brings the other ranks' parts?"),
    Question(kind_is("out", _SUM_PARTS), "The parts are different columns. Should they be added?"),
    Question(
        lambda d: "out" in d.names and (d.kind("out") in (_STACKED, "value") or "order" in d.kinds()),
        "Along which dimension, and in which order, do the parts go together? (all_gather_into_tensor uses dimension "
        "0.)",
    ),
    Question(
        lambda d: d.names == {"forward traffic"} and any("saw 1 all_reduce" in row.text for row in d),
        "The output is right. But an all-reduce adds, and here nothing has to be added. Which collective only brings "
        "the parts together, for half of what an all-reduce sends?",
    ),
    _FORWARD_SENDS,
    _NO_GRADIENT,
    _ZERO_GRADIENT,
    Question(
        kind_is("dx", _SLICE_OF_SUM, _SLICE_OF_MEAN),
        "All ranks share one loss, and each holds its whole gradient already. What is there to add, or to average?",
    ),
    Question(kind_is("dx", _SLICE_0), "Which columns of the whole did this rank put in?"),
    Question(
        lambda d: "dx" in d.names and any("got gradient" in row.text or "whole" in row.text for row in d),
        "This rank put in h/p columns. Which part of the whole gradient is theirs?",
    ),
    Question(
        kind_is("dx", "1/p", "p times"), "Each column was put in by one rank, once. Is there a p in its gradient?"
    ),
    _BACKWARD_SENDS,
)


def _f_lookalikes(x: Sequence[Tensor], upstream: Sequence[Tensor]) -> Lookalikes:
    p = len(x)
    return {
        "out": {_SUM_X: total(x), _MEAN_X: [t / p for t in total(x)], _X_OF_0: [x[0]] * p},
        "dx": {
            _OWN_TERM: upstream,
            _P_TIMES_OWN: [p * up for up in upstream],
            _LARGEST: [torch.stack(list(upstream)).amax(0)] * p,
        },
    }


def _g_lookalikes(x: Sequence[Tensor], upstream: Sequence[Tensor]) -> Lookalikes:
    return {"out": {_OWN_X: x}, "dx": {_SUM_UP: total(upstream), _UP_OF_0: [upstream[0]] * len(x)}}


def _scatter_lookalikes(x: Sequence[Tensor], upstream: Sequence[Tensor]) -> Lookalikes:
    p = len(x)
    zeros = torch.zeros_like(upstream[0])
    padded = [torch.cat([upstream[r] if r == i else zeros for i in range(p)], -1) for r in range(p)]
    return {
        "out": {
            _PART_OF_0: [t.chunk(p, -1)[0] for t in x],
            _EVERY_PTH: [t[..., rank::p] for rank, t in enumerate(x)],
            _WHOLE_X: x,
        },
        "dx": {
            _PADDED: padded,
            _COPIES: [torch.cat([part] * p, -1) for part in upstream],
            _SUM_PARTS: total(upstream),
            _STACKED: [torch.cat(list(upstream)).reshape(x[0].shape)] * p,
        },
    }


def _gather_lookalikes(x: Sequence[Tensor], upstream: Sequence[Tensor]) -> Lookalikes:
    p = len(x)
    mean = [t / p for t in total(upstream)]
    return {
        "out": {
            _OWN_X: x,
            _COPIES: [torch.cat([part] * p, -1) for part in x],
            _SUM_PARTS: total(x),
            _STACKED: [torch.cat(list(x))] * p,
        },
        "dx": {
            _SLICE_OF_SUM: my_part(total(upstream)),
            _SLICE_OF_MEAN: my_part(mean),
            _SLICE_0: [t.chunk(p, -1)[0] for t in upstream],
            _WHOLE: upstream,
        },
    }


# ---------------------------------------------------------------------------------------------------------------------
# The exercises


@exercise("3.1", "f: copy forward, add backward")
def copy_to_region(operator: Any) -> Verdict:
    check_operator("3.1", operator, F, _F_QUESTIONS, _f_lookalikes)
    return Verdict(
        "One all-reduce, backward. Strided and expanded gradients are right too, and nobody's tensor was touched."
    )


@exercise("3.2", "g: add forward, copy backward")
def reduce_from_region(operator: Any) -> Verdict:
    check_operator("3.2", operator, G, _G_QUESTIONS, _g_lookalikes)
    return Verdict("One all-reduce, forward. The tensor that autograd saved is still what it was.")


@exercise("3.3", "scatter: cut forward, gather backward")
def scatter_to_region(operator: Any) -> Verdict:
    check_operator("3.3", operator, SCATTER, _SCATTER_QUESTIONS, _scatter_lookalikes)
    seen = run_ranks(scatter_unevenly, 2, operator)
    verify(
        "3.3", 2, list(seen), [{_UNEVEN: "refused with a ValueError"}] * 2, questions=_SCATTER_QUESTIONS, note=_UNEVEN
    )
    return Verdict("One all-gather, backward.")


def scatter_unevenly(operator: Any) -> Observed:
    """On a rank: 9 columns over 2 ranks."""
    try:
        part = operator.apply(torch.zeros(4, 9, device=device()))
    except ValueError:
        return {_UNEVEN: "refused with a ValueError"}
    return {_UNEVEN: f"cut all the same, to shape {list(part.shape)}"}


@exercise("3.4", "gather: gather forward, cut backward")
def gather_from_region(operator: Any) -> Verdict:
    check_operator("3.4", operator, GATHER, _GATHER_QUESTIONS, _gather_lookalikes)
    return Verdict("One all-gather, forward.")


# ---------------------------------------------------------------------------------------------------------------------

PREDICTIONS = {
    "3.a": Prediction(
        question="What does each rank find for dx on its own path, a_r · dy_r, and what is the right dx?",
        answer={"rank_0": -12, "rank_1": 20, "right": 8},
        why="Rank 0: 3 · (-4) = -12. Rank 1: 5 · 4 = 20. L = 2x², so dL/dx = 4x = 8, and that is their sum.",
        wrong={
            "rank_0": "a_0 = 3 and dy_0 = -4.",
            "rank_1": "a_1 = 5 and dy_1 = 4.",
            ("right", 4): "4 is the average of the two, or dL/dx at x = 1. Here x = 2.",
            "right": "L = 2x². What is its derivative, at x = 2?",
        },
    ),
    "3.b": Prediction(
        question="The all-reduce wrote into the output of exp, which autograd kept. What does each rank get for dw?",
        answer={"rank_0": 3, "rank_1": 3},
        why="The derivative of exp is the output that autograd kept, and after the write it holds the sum, 3, on "
        "both ranks.",
        wrong={
            ("rank_0", 1): "That is the right gradient. But what does the tensor that autograd kept hold by then?",
            ("rank_1", 2): "That is the right gradient. But what does the tensor that autograd kept hold by then?",
            "rank_0": "The derivative of exp is its output, as autograd kept it. What was written into it?",
            "rank_1": "The derivative of exp is its output, as autograd kept it. What was written into it?",
        },
    ),
    "3.c": Prediction(
        question="An all-reduce whose backward is an all-reduce too, in place of g. By what factor are the gradients "
        "too large, on 2 and on 4 ranks?",
        answer={"factor_2": 2, "factor_4": 4},
        why="Every rank holds the whole dz. Adding the p equal copies makes p times dz, and everything below is "
        "linear in dz.",
        wrong={
            "factor_2": "Both ranks hold the same dz = -4. What do they hold after an all-reduce?",
            "factor_4": "Four ranks hold the same dz. What does an all-reduce make of them?",
        },
    ),
    "3.d": Prediction(
        question="[2, 16, 64] in float32 through all four operators, forward and backward, on 4 ranks. How many "
        "collectives does each rank enter? Bytes of the message of one?",
        answer={"collectives": 4, "bytes": 8192},
        why="One per operator, in one direction. Each message is the whole tensor: 2 · 16 · 64 numbers of 4 bytes.",
        wrong={
            ("collectives", 8): "Each operator sends in one direction only.",
            ("collectives", 2): "f and g need an all-reduce each. What do scatter and gather need?",
            "collectives": "Go through the table: which cells of its two traffic columns are not empty?",
            (
                "bytes",
                2048,
            ): "That is the count of numbers, or one rank's part. The message is the whole tensor, in bytes.",
            "bytes": "2 · 16 · 64 numbers of 4 bytes.",
        },
    ),
}

SYMPTOMS = [
    Symptom(
        "Outputs and weight gradients right; only the gradient of the input is wrong, and differs between ranks",
        "f is missing, or its backward adds nothing: each rank sees its own path only",
        "3.1",
    ),
    Symptom(
        "All gradients below a point are exactly p times too large",
        "g adds backward as well: one loss was counted p times",
        "3.2",
    ),
    Symptom(
        "Output right, gradient silently wrong, after exp, sigmoid, softmax, ...",
        "A collective wrote into a tensor that autograd had saved",
        "3.2",
    ),
    Symptom(
        "The process dies, or numbers elsewhere change, in the backward of .sum() or .mean()",
        "An in-place collective on an expanded gradient: it writes past its end",
        "3.1",
    ),
    Symptom(
        "Right with contiguous tensors, not reduced at all with others",
        "all_reduce(x.contiguous()) reduced a copy, and x was returned",
        "3.2",
    ),
    Symptom(
        "The gradient is zero outside this rank's columns",
        "scatter's backward padded with zeros where it should gather",
        "3.3",
    ),
    Symptom(
        "Gradient None",
        "backward returned what dist.all_reduce returns",
        "3.1",
    ),
]
