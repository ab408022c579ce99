"""The check for exercise 3.2 (f), the questions about g, and the code that checks any of chapter 03's four operators.

Each operator runs alone, on 2, 4 and 1 ranks. Every rank has a different x and a different upstream gradient, even
where the exercise's docstring says that they are replicated, so that a wrong sum, a wrong slice or an unnecessary
broadcast can't go unnoticed. The plain cases come first, followed by an x that autograd has saved, tensors that aren't
contiguous, and the expanded gradient of .sum(). An observation is a named value that the check compares, such as dx.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from tplab.course import checks
from tplab.runtime import device

H = 8  # the size of the full tensor's last dimension, which is divisible by every p


@dataclass(frozen=True)
class Input(checks.Case):
    """The input of one call of an operator.

    leading:  all dimensions except the last
    scalar:   whether x has no dimensions at all
    layout:   the memory layout of x and the upstream gradient: "contiguous", "transposed" or "every other column"
    expanded: whether the upstream gradient is the expanded gradient of out.sum()
    zero:     whether the upstream gradient is zero on rank 0
    twice:    whether x goes through the operator twice, so that out is one result plus two times the other
    exp:      whether x is the output of exp, which autograd has saved
    """

    note: str
    leading: tuple[int, ...] = (5,)
    scalar: bool = False
    layout: str = "contiguous"
    expanded: bool = False
    exp: bool = False
    zero: bool = False
    twice: bool = False

    def describe(self, name: str) -> str:
        return self.note


CASES = (
    Input("x with 2 dimensions"),
    Input("x with 3 dimensions", (2, 3)),
    Input("x with 1 dimension", ()),
    Input("x after exp, whose output autograd has saved", exp=True),
    Input("x, transposed in memory, like the gradient", layout="transposed"),
    Input("x, which is every other column of a larger tensor, like the gradient", layout="every other column"),
    Input("x, with the gradient of .sum(), which has strides of 0", (2, 3), expanded=True),
    Input("x, with a gradient that's zero on rank 0", zero=True),
    Input("x, used twice, in y(x) + 2 y(x)", twice=True),
)
SCALAR = Input("x, which is a scalar", scalar=True)  # for operators that don't work along a dimension


class Half(NamedTuple):
    """The forward or backward pass of an operator.

    right:      computes the correct result on one rank, given the inputs of all ranks and the index of that rank
    collective: the collective that this pass calls, or "" for none. Its message is as large as the full tensor
    """

    right: Callable[[Sequence[Tensor], int], Tensor]
    collective: str = ""


def total(tensors: Sequence[Tensor], rank: int = 0) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def my_part(tensors: Sequence[Tensor], rank: int) -> Tensor:
    return tensors[rank].chunk(len(tensors), -1)[rank]


def all_parts(tensors: Sequence[Tensor], rank: int = 0) -> Tensor:
    return torch.cat(list(tensors), -1)


COPY, ADD = Half(lambda tensors, rank: tensors[rank]), Half(total, "all_reduce")
SPLIT, GATHER = Half(my_part), Half(all_parts, "all_gather")

Mistakes = dict[str, dict[str, Tensor]]  # {observation: {description of the mistake: the value it would produce}}


@dataclass(frozen=True)
class Operator:
    """The forward and backward passes of one of the four operators.

    mistakes: computes what common mistakes would produce on one rank, given all ranks' x and upstream gradients
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
        shape = () if case.scalar else (*case.leading, H // size if sharded else H)
        return [checks.random_tensor(generator, *shape, 1)[..., 0] for _ in range(size)]

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

    return checks.observe(apply, None if case.expanded else upstream, inputs={"x": x}, any_size=-1)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return a tensor with the same values in this memory layout."""
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "every other column":
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


def check_operator(
    number: str, name: str, answer: Any, operator: Operator, questions: Sequence[checks.Question]
) -> None:
    """Check the outputs, gradients and traffic of an operator by running it alone on 2, 4 and 1 ranks."""
    if not (isinstance(answer, type) and issubclass(answer, Function)):
        checks.fail(
            number,
            f"the answer for {name} isn't a subclass of torch.autograd.Function.",
            "Does your cell still contain the line `class ...(Function):`?",
        )
    anywhere = {operator.forward, operator.backward} <= {COPY, ADD}
    cases = [replace(case, note=f"{name} of {case.note}") for case in (*CASES, *[SCALAR] * anywhere)]
    checks.check_cases(
        number, answer, cases, draw=partial(draw, operator), give=give, run=run, expect=partial(expect, operator),
        questions=questions, ask_instead=about_report,
        world_sizes=(2, 4, 1),  # two ranks come first, as they reveal the most about a mistake
        layouts_differ=True,
    )  # fmt: skip


_CUT = (
    "Which dimension should you slice? The signature of `shard` is `shard(tensor, dim, rank, world_size)`. Does your "
    "code pass the arguments of `shard` in this order?"
)
_ASKED_ABOUT = {  # {words in a report: the question to ask}
    "isn't one of": _CUT,
    "can't be divided over": _CUT,
    "modified by an inplace operation": (
        "In this case, x is the output of exp, which autograd saved to compute the derivative of exp. Which line of "
        "your code writes into x? Restoring the old values doesn't help, because that writes into x a second time."
    ),
    "contiguous": (
        "Collectives need contiguous tensors. Is the tensor you pass to the collective always contiguous? Gradients "
        "often aren't contiguous, and the gradient of `.sum()` even has strides of 0."
    ),
    "returned an invalid gradient": (
        "The gradient that `backward` returns must have the same shape as the tensor that `forward` received. Does "
        "`forward` receive the full tensor `[.., h]` or a slice `[.., h/p]`? What shape does your `backward` return?"
    ),
}


def about_report(failure: checks.CheckFailed) -> str | None:
    """Return a specific question if the report shows a failure that's common with these operators, or else None."""
    return next((question for words, question in _ASKED_ABOUT.items() if words in failure.report), None)


# Questions, and descriptions of mistakes, that several operators share


def traffic_too(name: str, kind: str, traffic: str) -> Callable[[checks.Differences], bool]:
    """Return a predicate that tests whether `name` is wrong in this way and `traffic` differs as well."""
    return lambda differences: differences.kind(name) == kind and traffic in differences.names


FORWARD_SENDS = checks.Question(
    lambda d: "forward traffic" in d.names and d.kind("forward traffic") == "traffic" and not d.malformed,
    "What does this operator need to send in the forward pass? Look at the operator's row in your table.",
)

BACKWARD_SENDS = checks.Question(
    lambda d: d.names == {"backward traffic"},
    "The gradient is correct, but your backward pass doesn't run the expected collectives. According to your "
    "table, which collective should the backward pass call, if any? How many calls should there be?",
)

ROUNDED = checks.Question(
    lambda d: bool({"rounded", "dtype"} & d.kinds()),
    "Your code casts the tensor to a different dtype somewhere. With a smaller dtype, you'd send fewer bytes, but "
    "you'd also lose precision. Which line does the cast?",
)

WROTE = checks.Question(
    lambda d: any(d.kind(name) == "changed" for name in d.names),
    "Your operator overwrote one of its inputs. The caller still needs x, and autograd still needs the upstream "
    "gradient. If you passed the input to a collective, what should you pass instead? Note that `.contiguous()` "
    "doesn't copy a tensor that's already contiguous.",
)

NO_GRADIENT = checks.Question(
    checks.kind_is("dx", "none"),
    "Your backward pass returned nothing for x. What does its last line return? Note that `dist.all_reduce` changes "
    "its argument and returns `None`.",
)

ZERO_GRADIENT = checks.Question(
    checks.kind_is("dx", "zeros"),
    "The gradient has the right shape, but it's all zeros. Which line should fill in the values?",
)
ZERO_OUT = checks.Question(
    checks.kind_is("out", "zeros"),
    "The output has the right shape, but it's all zeros. Which line should fill in the values?",
)
ONLY_ROOT = (
    "Only rank 0 has the correct result. Did you use a collective that delivers its result to only one rank? "
    "Which collective gives the sum to every rank?"
)
OWN_X = "this rank's own x"

# f

OWN_TERM = "this rank's own upstream gradient, before the sum"
SUM_X = "the sum of x over all ranks"
MEAN_X = "the mean of x over all ranks"
X_OF_0 = "the x of rank 0"
P_TIMES_OWN = "p times this rank's own upstream gradient"
LARGEST = "the elementwise maximum across ranks"

F_QUESTIONS = (
    checks.LATE_QUESTION,
    ROUNDED,
    WROTE,
    checks.Question(
        checks.kind_is("out", SUM_X, X_OF_0, MEAN_X),
        "Every rank already has the correct x. Is there anything left for f to do in the forward pass?",
    ),
    ZERO_OUT,
    FORWARD_SENDS,
    NO_GRADIENT,
    ZERO_GRADIENT,
    checks.Question(lambda d: d.p > 1 and "dx" in d.names and 0 not in d.ranks("dx"), ONLY_ROOT),
    checks.Question(
        traffic_too("dx", OWN_TERM, "backward traffic"),
        "Every rank uses x, but each rank's gradient only accounts for its own path through the network. Which "
        "collective computes the sum of all these gradients?",
    ),
    checks.Question(
        checks.kind_is("dx", OWN_TERM),
        "The tensor you return doesn't hold the sum. Which tensor did the all-reduce write into?",
    ),
    checks.Question(
        checks.kind_is("dx", P_TIMES_OWN),
        "You multiplied this rank's own gradient by p, but every rank has a different gradient. Which collective sums "
        "the gradients across all ranks?",
    ),
    checks.Question(
        checks.kind_is("dx", "1/p"),
        "You returned the mean across ranks. Does the chain rule add or average the gradients from all uses of x?",
    ),
    checks.Question(
        checks.kind_is("dx", LARGEST),
        "You took the maximum across ranks. How does the chain rule combine the gradients from all uses of x?",
    ),
    checks.Question(
        checks.kind_is("dx", "p times"),
        "The gradient is p times too large. Does your code add each rank's gradient more than once?",
    ),
    checks.Question(
        lambda d: d.names == {"backward traffic"} and any("all_gather" in row.text for row in d),
        "The gradient is right, but every rank gathers p full tensors just to sum them locally. That wastes memory. "
        "Which collective computes the sum for you?",
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


@checks.exercise("3.2", "f")
def copy_to_region(operator: Any) -> checks.Verdict:
    check_operator("3.2", "f", operator, Operator(COPY, ADD, f_mistakes), F_QUESTIONS)
    return checks.Verdict(
        "Your operator computes the correct gradient with a single all-reduce in the backward pass. The operator also "
        "handles strided and expanded gradients, and it doesn't overwrite any of its inputs."
    )


# g

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
        "Your output only contains this rank's term of the sum. Which collective adds up the terms from all ranks?",
    ),
    checks.Question(
        checks.kind_is("out", OWN_X),
        "The tensor you return doesn't hold the sum. Which tensor did the all-reduce write into? Note that "
        "`.contiguous()` copies a tensor that isn't contiguous.",
    ),
    checks.Question(
        checks.kind_is("out", "1/p"),
        "You returned the mean of x across ranks. Does the network need the mean or the sum of x across ranks?",
    ),
    checks.Question(
        checks.kind_is("out", "p times"), "The output is p times too large. Is each rank's x counted more than once?"
    ),
    checks.Question(
        lambda d: d.names == {"forward traffic"} and any("all_gather" in row.text for row in d),
        "The sum is right, but every rank gathers p full tensors just to sum them locally. That wastes memory. "
        "Which collective computes the sum for you?",
    ),
    FORWARD_SENDS,
    NO_GRADIENT,
    ZERO_GRADIENT,
    checks.Question(
        checks.kind_is("dx", SUM_UP),
        "All ranks share one loss, and each of them already has the full gradient. How many times would "
        "that loss be counted if you summed the gradients across ranks?",
    ),
    checks.Question(
        checks.kind_is("dx", "1/p", "p times"),
        "The output of g is the sum of the terms from all ranks. If one of the terms changes by 1, how much does the "
        "sum change? Does your answer depend on p?",
    ),
    checks.Question(
        checks.kind_is("dx", UP_OF_0),
        "Every rank already has the gradient of the output, so why does your code use rank 0's gradient?",
    ),
    BACKWARD_SENDS,
)


def g_mistakes(xs: Sequence[Tensor], upstream: Sequence[Tensor], rank: int) -> Mistakes:
    return {"out": {OWN_X: xs[rank]}, "dx": {SUM_UP: total(upstream), UP_OF_0: upstream[0]}}
