"""The check for exercise 12.1, which tests gather and reduce-scatter along the sequence separately.

Every rank has a different x and a different upstream gradient, so that no wrong sum, slice, or order goes unnoticed.
The plain cases come first, followed by an input that autograd has saved, tensors that aren't contiguous, and the
gradient of .sum().
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

S = 8  # tokens in the full sequence, divisible by every p

OWN = "this rank's own x"
COPIES = "p copies of this rank's tokens"
STACKED = "the ranks' parts one behind the other along dimension 0, which is the batch"
SHUFFLED = "the ranks' parts put together along the batch and then reshaped: tokens of different sequences are mixed"
OWN_PART = "this rank's own tokens of its own gradient: the other ranks' terms are missing"
MY_TERM = "this rank's tokens of its own x: the other ranks' terms are missing"
MEAN_PART = "this rank's tokens of the mean over the ranks"
WHOLE_SUM = "the whole sum, with the tokens of all ranks"
COPIES_BACK = "this rank's gradient copied into the place of every rank's tokens"
PADDED = "this rank's gradient in the place of its own tokens, zeros elsewhere"
ALONG_BATCH = "the sum cut along dimension 0, which is the batch"


@dataclass(frozen=True)
class Input(checks.Case):
    """The input to one call of a mapping. x is [batch, s, *rest], or [batch, s/p, *rest] for a gather.

    layout:   memory layout of x and the upstream gradient: "contiguous", "sequence first", or "every second column"
    expanded: whether the upstream gradient is that of out.sum()
    exp:      whether x is the output of exp, which autograd has saved
    """

    note: str
    batch: int = 3
    rest: tuple[int, ...] = (2,)
    layout: str = "contiguous"
    expanded: bool = False
    exp: bool = False

    def describe(self, name: str) -> str:
        return f"{name}, {self.note}"


CASES = (
    Input("x [3, .., 2]"),
    Input("x of 4 dimensions", 2, (3, 2)),
    Input("one sequence, x [1, .., 2]", 1),
    Input("x after exp, whose output autograd has saved", exp=True),
    Input("x and the gradient laid out [s, b, h] in memory", layout="sequence first"),
    Input("x and the gradient every second column of a larger tensor", layout="every second column"),
    Input("the gradient of .sum(), with strides of 0", expanded=True),
)

Mistakes = dict[str, dict[str, Tensor]]  # {name of a result: {description of a mistake: the value it would produce}}


class Half(NamedTuple):
    """One direction of a mapping.

    right:      a function that computes the right results on all ranks from the inputs of all ranks
    collective: the collective that this direction uses. Its message is as large as the full tensor [b, s, ..]
    """

    right: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    collective: str


def all_tokens(parts: Sequence[Tensor]) -> list[Tensor]:
    """Gather [b, s/p, ..] from each rank into [b, s, ..] on every rank."""
    return [torch.cat(list(parts), 1)] * len(parts)


def parts_of_sum(terms: Sequence[Tensor]) -> list[Tensor]:
    """Sum [b, s, ..] over the ranks and split the sum into each rank's tokens, [b, s/p, ..]."""
    return list(torch.stack(list(terms)).sum(0).chunk(len(terms), 1))


TOGETHER, ADD_UP = Half(all_tokens, "all_gather"), Half(parts_of_sum, "reduce_scatter")


@dataclass(frozen=True)
class Mapping:
    """The forward and backward directions of one of the two mappings.

    mistakes: a function that computes the values that common mistakes would produce on a rank. Its arguments are x and
              the upstream gradient of all ranks, and the rank's index
    """

    name: str
    forward: Half
    backward: Half
    mistakes: Callable[[Sequence[Tensor], Sequence[Tensor], int], Mistakes]
    questions: Sequence[checks.Question]


class Problem(NamedTuple):
    """Each rank's x and upstream gradient."""

    xs: list[Tensor]  # [b, s, ..], or [b, s/p, ..] for the gather
    upstream: list[Tensor]  # [b, s, ..], or [b, s/p, ..] for the reduce-scatter


def draw(mapping: Mapping, case: Input, generator: torch.Generator, size: int) -> Problem:
    def tensors(sharded: bool) -> list[Tensor]:
        tokens = S // size if sharded else S
        return [checks.random_tensor(generator, case.batch, tokens, *case.rest) for _ in range(size)]

    xs, upstream = tensors(mapping.forward == TOGETHER), tensors(mapping.forward == ADD_UP)
    return Problem(xs, [torch.ones_like(gradient) for gradient in upstream] if case.expanded else upstream)


def give(case: Input, problem: Problem, place: checks.Place) -> tuple[Tensor, Tensor]:
    return problem.xs[place.index], problem.upstream[place.index]


def run(operator: Any, case: Input, given: tuple[Tensor, Tensor], group: Any) -> checks.Observed:
    x, upstream = (laid_out(tensor.to(device()), case.layout) for tensor in given)
    return checks.observe(
        lambda x: operator.apply(x.exp() if case.exp else x), None if case.expanded else upstream, inputs={"x": x}
    )


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return a tensor with the same values in this memory layout."""
    if layout == "sequence first":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "every second column":
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 7.0)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor


def expect(mapping: Mapping, case: Input, problem: Problem, place: checks.Place) -> checks.Expected:
    rank, upstream = place.index, problem.upstream
    xs = [x.exp() if case.exp else x for x in problem.xs]
    dx = mapping.backward.right(upstream)[rank]
    size = max(xs[0].numel(), upstream[0].numel())
    right = {
        "out": mapping.forward.right(xs)[rank],
        "forward traffic": place.traffic((mapping.forward.collective, size)),
        "dx": dx * xs[rank] if case.exp else dx,
        "backward traffic": place.traffic((mapping.backward.collective, size)),
    }
    return checks.Expected(right, mapping.mistakes(xs, upstream, rank) if place.size > 1 and not case.exp else {})


def gather_mistakes(xs: Sequence[Tensor], upstream: Sequence[Tensor], rank: int) -> Mistakes:
    p, stacked = len(xs), torch.cat(list(xs))
    return {
        "out": {
            OWN: xs[rank],
            COPIES: torch.cat([xs[rank]] * p, 1),
            STACKED: stacked,
            SHUFFLED: stacked.reshape(upstream[0].shape),
        },
        "dx": {OWN_PART: upstream[rank].chunk(p, 1)[rank], MEAN_PART: parts_of_sum(upstream)[rank] / p},
    }


def scatter_mistakes(xs: Sequence[Tensor], upstream: Sequence[Tensor], rank: int) -> Mistakes:
    p, mine = len(xs), upstream[rank]
    total = torch.stack(list(xs)).sum(0)
    return {
        "out": {
            MY_TERM: xs[rank].chunk(p, 1)[rank],
            MEAN_PART: total.chunk(p, 1)[rank] / p,
            WHOLE_SUM: total,
            ALONG_BATCH: total.reshape(p, *mine.shape)[rank],
        },
        "dx": {
            COPIES_BACK: torch.cat([mine] * p, 1),
            PADDED: torch.cat([mine if i == rank else torch.zeros_like(mine) for i in range(p)], 1),
        },
    }


@checks.exercise("12.1", "Gather and reduce-scatter along the sequence")
def mappings(gather: Any, reduce_scatter: Any) -> checks.Verdict:
    for mapping, answer in ((GATHER, gather), (SCATTER, reduce_scatter)):
        if not (isinstance(answer, type) and issubclass(answer, Function)):
            checks.fail(
                "12.1",
                f"{mapping.name} is not a class made from torch.autograd.Function.",
                "Is the line `class ...(Function):` still there?",
            )
        checks.check_cases(
            "12.1", answer, CASES, draw=partial(draw, mapping), give=give, run=run, expect=partial(expect, mapping),
            questions=mapping.questions, ask_instead=about_report,
            world_sizes=(2, 4, 1),  # two ranks first, because they reveal the most about a mistake
            layouts_differ=True,
        )  # fmt: skip
    return checks.Verdict("Each is the other's backward. Together they send what one all-reduce sends.")


_ASKED_ABOUT = {  # words in a report, and the question to ask about it
    "returned an invalid gradient": "A gradient has the shape of what went into forward. Of [b, s/p, h] and [b, s, h], "
    "which went in here, and which does your backward return?",
    "contiguous": "A collective wants memory without gaps. A piece of dimension 1 is no contiguous piece of memory "
    "where b > 1, and gradients may have gaps too. Which tensor do you hand over as it is?",
    "modified by an inplace operation": "x came out of exp, and autograd keeps that output. Who wrote into it?",
    "incorrect number of gradients": "backward returns one gradient for each argument of forward behind ctx.",
}


def about_report(failure: checks.CheckFailed) -> str | None:
    """Return a specific question if the failure is a typical one for these mappings, and None otherwise."""
    return next((question for words, question in _ASKED_ABOUT.items() if words in failure.report), None)


_COMMON = (
    checks.Question(
        checks.changed,
        "A collective writes into the tensor that it is given as output. Was that one yours, or one that the caller or "
        "autograd still needs?",
    ),
    checks.Question(
        checks.has_kind("out", "none", "type"),
        "What does forward return? dist.all_gather and dist.reduce_scatter write into tensors they are given and "
        "return None.",
    ),
    checks.Question(
        checks.has_kind("dx", "none"),
        "backward returned nothing for x. What is its last line? (Collectives return None.)",
    ),
    checks.Question(
        checks.has_kind("out", STACKED, SHUFFLED, ALONG_BATCH),
        "The sequence is dimension 1 here. `all_gather_into_tensor` and `reduce_scatter_tensor` put parts together, "
        "and cut, along dimension 0: what do the numbers mean then?",
    ),
    checks.Question(
        checks.has_kind("out", "order"), "In which order do the parts go together? Rank 0 has the first s/p tokens."
    ),
)
_TWICE_AS_MUCH = checks.Question(
    lambda d: all("traffic" in name for name in d.names) and any("all_reduce" in row.text for row in d),
    "The numbers are right, the communication is not. An all-reduce gives every rank the whole sum, and sends twice "
    "what a reduce-scatter or an all-gather sends. Which of the two is enough here?",
)
GATHER_QUESTIONS = (
    *_COMMON,
    checks.Question(checks.has_kind("out", OWN), "These are this rank's tokens. Who has the others?"),
    checks.Question(
        checks.has_kind("out", COPIES), "Every part came from this rank. Which call brings the other ranks' tokens?"
    ),
    _TWICE_AS_MUCH,
    checks.Question(
        checks.has_kind("dx", OWN_PART),
        "Behind the gather each rank computes something else with the same tokens, its own columns or heads. So each "
        "rank's gradient of a token is one term. Who adds up the terms of your tokens?",
    ),
    checks.Question(
        checks.has_kind("dx", MEAN_PART, "1/p"), "Are the terms of a gradient added up, or is their mean taken?"
    ),
    checks.Question(
        checks.has_kind("dx", "other rank", "order"),
        "The sum is right, but the tokens are another rank's. Which ones did this rank put in?",
    ),
    checks.Question(checks.has_kind("dx", "p times"), "How many times is each rank's term added?"),
    checks.Question(
        lambda d: "dx" in d.names,
        "dx is [b, s/p, h]: for each token that this rank put in, the sum over all ranks of what they made of it. What "
        "does your backward compute?",
    ),
    checks.Question(
        lambda d: "out" in d.names,
        "y is [b, s, h]: the tokens of rank 0, then those of rank 1, and so on, along dimension 1. What is yours?",
    ),
)
SCATTER_QUESTIONS = (
    *_COMMON,
    checks.Question(
        checks.has_kind("out", MY_TERM), "This is one term of the sum. Who adds the terms of the other ranks?"
    ),
    checks.Question(checks.has_kind("out", MEAN_PART, "1/p"), "Are the terms added up, or is their mean taken?"),
    checks.Question(
        checks.has_kind("out", "other rank", "order"),
        "The sum is right, but the tokens are another rank's. Which are yours?",
    ),
    checks.Question(
        checks.has_kind("out", WHOLE_SUM), "This is the sum of all tokens. Which of them does this rank go on with?"
    ),
    checks.Question(checks.has_kind("out", "p times"), "How many times is each rank's term added?"),
    _TWICE_AS_MUCH,
    checks.Question(
        checks.has_kind("dx", PADDED, "partly zero"),
        "Zeros for the tokens of the other ranks? This rank's x had a term in *their* sums too, so their gradients "
        "concern it. Where can it get them?",
    ),
    checks.Question(
        checks.has_kind("dx", COPIES_BACK),
        "Each token has a gradient of its own, and this rank has those of its own tokens. Who has the others?",
    ),
    checks.Question(
        checks.has_kind("dx", "p times", "1/p"),
        "y of a token is the plain sum of the ranks' terms, so each term has the gradient of the sum. Where does a p "
        "come from?",
    ),
    checks.Question(
        lambda d: "dx" in d.names,
        "dx is [b, s, h]: every token's gradient, each from the rank that went on with that token. What does your "
        "backward compute?",
    ),
    checks.Question(
        lambda d: "out" in d.names,
        "y is [b, s/p, h]: the sum over all ranks, of this rank's tokens alone. What is yours?",
    ),
)

GATHER = Mapping("GatherFromSequence", TOGETHER, ADD_UP, gather_mistakes, GATHER_QUESTIONS)
SCATTER = Mapping("ReduceScatterToSequence", ADD_UP, TOGETHER, scatter_mistakes, SCATTER_QUESTIONS)
