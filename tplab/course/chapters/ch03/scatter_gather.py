"""The checks for exercises 3.3, the operator scatter, and 3.4, the operator gather."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.course.chapters.ch03.operators import (
    BACKWARD_SENDS,
    FORWARD_SENDS,
    GATHER,
    NO_GRADIENT,
    OWN_X,
    ROUNDED,
    SPLIT,
    WROTE,
    ZERO_GRADIENT,
    ZERO_OUT,
    Mistakes,
    Operator,
    all_parts,
    check_operator,
    total,
)
from tplab.runtime import device

COPIES = "p copies of this rank's part"
SUM_PARTS = "the sum of the parts of all ranks"
STACKED = "the parts of all ranks, one after another along dimension 0"

# 3.3

PART_OF_0 = "part 0 of x, whatever the rank"
EVERY_PTH = "every p-th column of x"
PADDED = "this rank's part of the gradient, and zeros elsewhere"
WHOLE_X = "the whole x"
UNEVEN = "a size that can't be divided is refused"

SCATTER_QUESTIONS = (
    checks.Question(
        UNEVEN,
        "9 columns on 2 ranks: one rank would hold more than the other. What does the other half of the network make "
        "of that? (shard refuses such sizes for you.)",
    ),
    checks.LATE_QUESTION,
    ROUNDED,
    WROTE,
    ZERO_OUT,
    checks.Question(checks.kind_is("out", PART_OF_0), "Which part of x is this rank's own?"),
    checks.Question(
        checks.kind_is("out", EVERY_PTH, "value"), "A shard is a block of neighbours. Which columns does rank r hold?"
    ),
    checks.Question(checks.kind_is("out", WHOLE_X), "What is left for this rank to cut away?"),
    checks.Question(
        lambda d: "out" in d.names and not d.malformed,
        "Which dimension does scatter cut, how long is a part, and where does the part of rank r start?",
    ),
    FORWARD_SENDS,
    NO_GRADIENT,
    ZERO_GRADIENT,
    checks.Question(
        lambda d: d.kind("dx") in (PADDED, "partly zero"),
        "The rest of the gradient is not zero: other ranks hold it. How does it get here?",
    ),
    checks.Question(
        checks.kind_is("dx", COPIES), "Every part came from this rank. Which call brings the other ranks' parts?"
    ),
    checks.Question(
        lambda d: d.kind("dx") in (STACKED, "order") or "order" in d.kinds(),
        "x was cut along the last dimension, in rank order. Along which dimension, and in which order, do the parts "
        "go back?",
    ),
    checks.Question(
        checks.kind_is("dx", "1/p", "p times"),
        "Each column of x was used by one rank, once. Is there a p in its gradient?",
    ),
    checks.Question(
        lambda d: d.names == {"backward traffic"} and any("all_reduce" in row.text for row in d),
        "The gradient is right. But an all-reduce adds, and here nothing has to be added. Which collective only "
        "brings the parts together, for half of what an all-reduce sends?",
    ),
    BACKWARD_SENDS,
)


def scatter_mistakes(xs: Sequence[Tensor], upstream: Sequence[Tensor], rank: int) -> Mistakes:
    p, mine = len(xs), upstream[rank]
    return {
        "out": {PART_OF_0: xs[rank].chunk(p, -1)[0], EVERY_PTH: xs[rank][..., rank::p], WHOLE_X: xs[rank]},
        "dx": {
            PADDED: all_parts([mine if i == rank else torch.zeros_like(mine) for i in range(p)]),
            COPIES: all_parts([mine] * p),
            STACKED: torch.cat(list(upstream)).reshape(xs[rank].shape),
        },
    }


@checks.exercise("3.3", "scatter: cut forward, gather backward")
def scatter_to_region(operator: Any) -> checks.Verdict:
    check_operator("3.3", operator, Operator(SPLIT, GATHER, scatter_mistakes), SCATTER_QUESTIONS)
    seen = checks.run_ranks(scatter_unevenly, 2, operator)
    checks.verify("3.3", 2, list(seen), [{}] * 2, questions=SCATTER_QUESTIONS, note="9 columns")
    return checks.Verdict("One all-gather, backward.")


def scatter_unevenly(operator: Any) -> checks.Observed:
    """Apply the operator to 9 columns on 2 ranks, which must raise ValueError. Runs on every rank."""
    try:
        part = operator.apply(torch.zeros(4, 9, device=device()))
    except ValueError:
        return {UNEVEN: checks.Claim("")}
    return {UNEVEN: checks.Claim(f"cut all the same, to shape {list(part.shape)}")}


# 3.4

SLICE_OF_SUM = "this rank's slice of the sum of all ranks' gradients"
SLICE_OF_MEAN = "this rank's slice of the mean of all ranks' gradients"
SLICE_0 = "slice 0 of the gradient, whatever the rank"

GATHER_QUESTIONS = (
    checks.LATE_QUESTION,
    ROUNDED,
    WROTE,
    ZERO_OUT,
    checks.Question(checks.kind_is("out", OWN_X), "This is one part. Who holds the others?"),
    checks.Question(
        checks.kind_is("out", COPIES), "Every part came from this rank. Which call brings the other ranks' parts?"
    ),
    checks.Question(checks.kind_is("out", SUM_PARTS), "The parts are different columns. Should they be added?"),
    checks.Question(
        lambda d: "out" in d.names and (d.kind("out") in (STACKED, "value") or "order" in d.kinds()),
        "Along which dimension, and in which order, do the parts go together? (all_gather_into_tensor uses dimension "
        "0.)",
    ),
    checks.Question(
        lambda d: d.names == {"forward traffic"} and any("saw 1 all_reduce" in row.text for row in d),
        "The output is right. But an all-reduce adds, and here nothing has to be added. Which collective only brings "
        "the parts together, for half of what an all-reduce sends?",
    ),
    FORWARD_SENDS,
    NO_GRADIENT,
    ZERO_GRADIENT,
    checks.Question(
        checks.kind_is("dx", SLICE_OF_SUM, SLICE_OF_MEAN),
        "All ranks share one loss, and each holds its whole gradient already. What is there to add, or to average?",
    ),
    checks.Question(checks.kind_is("dx", SLICE_0), "Which columns of the whole did this rank put in?"),
    checks.Question(
        checks.kind_is("dx", "1/p", "p times"),
        "Each column was put in by one rank, once. Is there a p in its gradient?",
    ),
    BACKWARD_SENDS,
)


def gather_mistakes(xs: Sequence[Tensor], upstream: Sequence[Tensor], rank: int) -> Mistakes:
    p, slice_of_sum = len(xs), total(upstream).chunk(len(xs), -1)[rank]
    return {
        "out": {
            OWN_X: xs[rank],
            COPIES: all_parts([xs[rank]] * p),
            SUM_PARTS: total(xs),
            STACKED: torch.cat(list(xs)),
        },
        "dx": {
            SLICE_OF_SUM: slice_of_sum,
            SLICE_OF_MEAN: slice_of_sum / p,
            SLICE_0: upstream[rank].chunk(p, -1)[0],
        },
    }


@checks.exercise("3.4", "gather: gather forward, cut backward")
def gather_from_region(operator: Any) -> checks.Verdict:
    check_operator("3.4", operator, Operator(GATHER, SPLIT, gather_mistakes), GATHER_QUESTIONS)
    return checks.Verdict("One all-gather, forward.")
