"""The checks for exercises 3.1, f, and 3.2, g, and the code that checks any of chapter 03's four operators.

Each operator runs alone, on 2, 4 and 1 ranks. Every rank has a different x and a different upstream gradient, even
where the exercise's docstring says that they are replicated, so that a wrong sum, a wrong slice or an unnecessary
broadcast can't go unnoticed. The plain cases come first, followed by an input that autograd has saved, tensors that
aren't contiguous, and the expanded gradient of .sum().
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from tplab.course import checks
from tplab.runtime import device

H = 8  # the last dimension of the full tensor: divisible by every p


@dataclass(frozen=True)
class Input(checks.Case):
    """The input of one call of an operator.

    leading:  all dimensions except the last
    layout:   memory layout of x and the upstream gradient: "contiguous", "transposed" or "every second column"
    expanded: whether the upstream gradient is that of out.sum()
    zero:     whether the upstream gradient of the first rank is zero
    twice:    whether x goes through the operator twice: out is one result plus two times the other
    exp:      whether x is the output of exp, which autograd has saved
    """

    note: str
    leading: tuple[int, ...] = (5,)
    layout: str = "contiguous"
    expanded: bool = False
    exp: bool = False
    zero: bool = False
    twice: bool = False

    def describe(self, name: str) -> str:
        return self.note


CASES = (
    Input("x of 2 dimensions"),
    Input("x of 3 dimensions", (2, 3)),
    Input("x of 1 dimension", ()),
    Input("x after exp, whose output autograd has saved", exp=True),
    Input("x and the gradient transposed in memory", layout="transposed"),
    Input("x and the gradient every second column of a larger tensor", layout="every second column"),
    Input("the gradient of .sum(), with strides of 0", (2, 3), expanded=True),
    Input("a gradient that is zero on rank 0", zero=True),
    Input("x used twice, in y(x) + 2 y(x)", twice=True),
)


class Half(NamedTuple):
    """One direction of an operator.

    right:      computes the right result on the rank with this index, from the inputs of all ranks
    collective: the collective that it uses, or "" for none. Its message is as large as the full tensor
    """

    right: Callable[[Sequence[Tensor], int], Tensor]
    collective: str = ""


def own(tensors: Sequence[Tensor], rank: int) -> Tensor:
    return tensors[rank]


def total(tensors: Sequence[Tensor], rank: int = 0) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def my_part(tensors: Sequence[Tensor], rank: int) -> Tensor:
    return tensors[rank].chunk(len(tensors), -1)[rank]


def all_parts(tensors: Sequence[Tensor], rank: int = 0) -> Tensor:
    return torch.cat(list(tensors), -1)


COPY, ADD = Half(own), Half(total, "all_reduce")
SPLIT, GATHER = Half(my_part), Half(all_parts, "all_gather")


Mistakes = dict[str, dict[str, Tensor]]  # {observation: {description of the mistake: the value it gives}}


@dataclass(frozen=True)
class Operator:
    """The forward and backward of one of the four operators.

    mistakes: computes the values that known mistakes give, from all ranks' x and upstream gradients and the rank's
              index
    """

    forward: Half
    backward: Half
    mistakes: Callable[[Sequence[Tensor], Sequence[Tensor], int], Mistakes]


class Problem(NamedTuple):
    """Each rank's x and upstream gradient."""

    xs: list[Tensor]  # [..., H], or [..., H/p] for an operator that gathers
    upstream: list[Tensor]  # [..., H], or [..., H/p] for an operator that splits


def draw(operator: Operator, case: Input, generator: torch.Generator, size: int) -> Problem:
    def tensors(sharded: bool) -> list[Tensor]:
        return [checks.random_tensor(generator, *case.leading, H // size if sharded else H) for _ in range(size)]

    xs, upstream = tensors(operator.forward == GATHER), tensors(operator.forward == SPLIT)
    if case.zero:
        upstream[0].zero_()
    return Problem(xs, [torch.ones_like(gradient) for gradient in upstream] if case.expanded else upstream)


def give(case: Input, problem: Problem, place: checks.Place) -> tuple[Tensor, Tensor]:
    return problem.xs[place.index], problem.upstream[place.index]


def run(operator: Any, case: Input, given: tuple[Tensor, Tensor], group: Any) -> checks.Observed:
    x, upstream = (laid_out(tensor.to(device()), case.layout) for tensor in given)

    def apply(x: Tensor) -> Any:
        x = x.exp() if case.exp else x
        return operator.apply(x) + 2 * operator.apply(x) if case.twice else operator.apply(x)

    return checks.observe(apply, None if case.expanded else upstream, inputs={"x": x}, any_width=True)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the tensor's values in this memory layout."""
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "every second column":
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 7.0)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor


def expect(operator: Operator, case: Input, problem: Problem, place: checks.Place) -> checks.Expected:
    rank, upstream = place.index, problem.upstream
    xs = [x.exp() if case.exp else x for x in problem.xs]
    dx = operator.backward.right(upstream, rank)
    size = max(xs[0].numel(), upstream[0].numel())
    times, calls = (3, 2) if case.twice else (1, 1)
    forward, backward = (
        place.traffic(*[(half.collective, size)] * (calls if half.collective else 0))
        for half in (operator.forward, operator.backward)
    )
    right = {
        "out": times * operator.forward.right(xs, rank),
        "forward traffic": forward,
        "dx": times * dx * (xs[rank] if case.exp else 1),
        "backward traffic": backward,
    }
    return checks.Expected(
        right, operator.mistakes(xs, upstream, rank) if place.size > 1 and not (case.exp or case.twice) else {}
    )


def check_operator(number: str, answer: Any, operator: Operator, questions: Sequence[checks.Question]) -> None:
    """Check the outputs, gradients and traffic of an operator by running it alone on 2, 4 and 1 ranks."""
    if not (isinstance(answer, type) and issubclass(answer, Function)):
        checks.fail(
            number,
            "the answer is not a class made from torch.autograd.Function.",
            "Is the line `class ...(Function):` still there?",
        )
    checks.check_cases(
        number, answer, CASES, draw=partial(draw, operator), give=give, run=run, expect=partial(expect, operator),
        questions=questions, ask_instead=about_report,
        world_sizes=(2, 4, 1),  # two ranks reveal the most about a mistake
    )  # fmt: skip


_CUT = "Which dimension does the task cut, and in which order does shard take (tensor, dim, rank, world_size)?"
_ASKED_ABOUT = {  # words in a report: the question
    "isn't one of": _CUT,
    "can't be divided over": _CUT,
    "modified by an inplace operation": (
        "x came out of exp, and autograd keeps that output for the derivative of exp. Who wrote into it? (Putting the "
        "old numbers back is a second write.)"
    ),
    "contiguous": (
        "A collective wants memory without gaps, and takes what it is given. Is this tensor contiguous in every case? "
        "(Gradients often are not: that of .sum() is one number with strides of 0.)"
    ),
    "returned an invalid gradient": (
        "A gradient has the shape of the tensor it belongs to: here, of what went into forward. Is that the whole, "
        "[.., h], or this rank's part, [.., h/p]? And what do you return?"
    ),
}


def about_report(failure: checks.CheckFailed) -> str | None:
    """Return a specific question if the failure is one that these operators are known for, else None."""
    return next((question for words, question in _ASKED_ABOUT.items() if words in failure.report), None)


# Questions and names of mistakes that several operators share


def traffic_too(name: str, kind: str, traffic: str) -> Callable[[checks.Differences], bool]:
    """Return a predicate that tests whether `name` is wrong in this way and `traffic` differs as well."""
    return lambda differences: differences.kind(name) == kind and traffic in differences.names


FORWARD_SENDS = checks.Question(
    lambda d: "forward traffic" in d.names and d.kind("forward traffic") == "traffic" and not d.malformed,
    "What does this operator have to send in the forward pass? Read its row in the table again.",
)

BACKWARD_SENDS = checks.Question(
    lambda d: d.names == {"backward traffic"},
    "The gradient is right. What has to be sent for it in the backward pass? Read the operator's row in the table "
    "again.",
)

ROUNDED = checks.Question(
    lambda d: bool({"rounded", "dtype"} & d.kinds()),
    "Which step leaves the dtype of the tensor? Fewer bytes are sent that way, and digits are lost.",
)

WROTE = checks.Question(
    lambda d: any(d.kind(name) == "changed" for name in d.names),
    "A collective writes into the tensor it is given. Was that one yours? The caller still needs x, and autograd the "
    "upstream gradient: what has to be made first? (.contiguous() makes no copy of a tensor that is contiguous "
    "already.)",
)

NO_GRADIENT = checks.Question(
    checks.kind_is("dx", "none"),
    "backward returned nothing for x. What is its last line? (dist.all_reduce changes its argument and returns None.)",
)

ZERO_GRADIENT = checks.Question(
    checks.kind_is("dx", "zeros"), "The gradient has the right shape. Which line puts numbers in?"
)
ZERO_OUT = checks.Question(
    checks.kind_is("out", "zeros"), "The output has the right shape. Which line puts numbers in?"
)
ONLY_ROOT = "Rank 0 is right, the others are not. Which collective gives its result to one rank only, and which to all?"
OWN_X = "this rank's own x"

# 3.1

OWN_TERM = "this rank's own upstream gradient, before the sum"
SUM_X = "the sum of x over all ranks"
MEAN_X = "the mean of x over all ranks"
X_OF_0 = "the x of rank 0"
P_TIMES_OWN = "p times this rank's own upstream gradient"
LARGEST = "the largest over the ranks, entry by entry"

F_QUESTIONS = (
    checks.LATE_QUESTION,
    ROUNDED,
    WROTE,
    checks.Question(
        checks.kind_is("out", SUM_X, X_OF_0, MEAN_X),
        "Forward, every rank has the right x already. What is left for f to do?",
    ),
    ZERO_OUT,
    FORWARD_SENDS,
    NO_GRADIENT,
    ZERO_GRADIENT,
    checks.Question(lambda d: d.p > 1 and "dx" in d.names and 0 not in d.ranks("dx"), ONLY_ROOT),
    checks.Question(
        traffic_too("dx", OWN_TERM, "backward traffic"),
        "x went to every rank, and the gradient of each rank covers its own path only. Who adds up the paths?",
    ),
    checks.Question(
        checks.kind_is("dx", OWN_TERM),
        "An all-reduce ran, but the tensor you return does not hold the sum. Which tensor did it write into?",
    ),
    checks.Question(
        checks.kind_is("dx", P_TIMES_OWN),
        "x went to every rank, and each rank's gradient is a different one. Where do the other ranks' come in?",
    ),
    checks.Question(checks.kind_is("dx", "1/p"), "The chain rule adds over all uses of x. Does it take their mean?"),
    checks.Question(checks.kind_is("dx", LARGEST), "The chain rule adds over all uses of x. Does it take the largest?"),
    checks.Question(checks.kind_is("dx", "p times"), "How many times is each rank's term added?"),
    checks.Question(
        lambda d: d.names == {"backward traffic"} and any("all_gather" in row.text for row in d),
        "The gradient is right, but every rank received p tensors to add them up itself. Which collective adds on "
        "the way?",
    ),
    BACKWARD_SENDS,
)


def f_mistakes(xs: Sequence[Tensor], upstream: Sequence[Tensor], rank: int) -> Mistakes:
    p = len(xs)
    return {
        "out": {SUM_X: total(xs), MEAN_X: total(xs) / p, X_OF_0: xs[0]},
        "dx": {
            OWN_TERM: upstream[rank],
            P_TIMES_OWN: p * upstream[rank],
            LARGEST: torch.stack(list(upstream)).amax(0),
        },
    }


@checks.exercise("3.1", "f: copy forward, add backward")
def copy_to_region(operator: Any) -> checks.Verdict:
    check_operator("3.1", operator, Operator(COPY, ADD, f_mistakes), F_QUESTIONS)
    return checks.Verdict(
        "One all-reduce, backward. Strided and expanded gradients are right too, and nobody's tensor was touched."
    )


# 3.2

SUM_UP = "the sum of the upstream gradients of all ranks"
UP_OF_0 = "the upstream gradient of rank 0"

G_QUESTIONS = (
    checks.LATE_QUESTION,
    ROUNDED,
    WROTE,
    ZERO_OUT,
    checks.Question(lambda d: d.p > 1 and "out" in d.names and 0 not in d.ranks("out"), ONLY_ROOT),
    checks.Question(
        traffic_too("out", OWN_X, "forward traffic"),
        "Each rank holds one term of a sum. Who adds them up?",
    ),
    checks.Question(
        checks.kind_is("out", OWN_X),
        "An all-reduce ran, but the tensor you return does not hold the sum. Which tensor did it write into? "
        "(.contiguous() makes a copy of a tensor that is not contiguous.)",
    ),
    checks.Question(checks.kind_is("out", "1/p"), "The network adds the terms. Does it take their mean?"),
    checks.Question(checks.kind_is("out", "p times"), "How many times is each rank's term added?"),
    checks.Question(
        lambda d: d.names == {"forward traffic"} and any("all_gather" in row.text for row in d),
        "The sum is right, but every rank received p tensors to add them up itself. Which collective adds on the way?",
    ),
    FORWARD_SENDS,
    NO_GRADIENT,
    ZERO_GRADIENT,
    checks.Question(
        checks.kind_is("dx", SUM_UP),
        "All ranks share one loss, and each holds its whole gradient already. How often is it counted if you add the "
        "ranks' copies?",
    ),
    checks.Question(
        checks.kind_is("dx", "1/p", "p times"),
        "z = z_0 + z_1: how much does z change when one term changes by 1? Is there a p in it?",
    ),
    checks.Question(checks.kind_is("dx", UP_OF_0), "Every rank holds the gradient already. Why ask rank 0 for it?"),
    BACKWARD_SENDS,
)


def g_mistakes(xs: Sequence[Tensor], upstream: Sequence[Tensor], rank: int) -> Mistakes:
    return {"out": {OWN_X: xs[rank]}, "dx": {SUM_UP: total(upstream), UP_OF_0: upstream[0]}}


@checks.exercise("3.2", "g: add forward, copy backward")
def reduce_from_region(operator: Any) -> checks.Verdict:
    check_operator("3.2", operator, Operator(ADD, COPY, g_mistakes), G_QUESTIONS)
    return checks.Verdict("One all-reduce, forward. The tensor that autograd saved is still what it was.")
