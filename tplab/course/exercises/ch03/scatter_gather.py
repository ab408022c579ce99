"""The check for exercise 3.3: the operators g, scatter and gather."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.course.exercises.ch03.operators import (
    ADD,
    BACKWARD_SENDS,
    COPY,
    FORWARD_SENDS,
    G_QUESTIONS,
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
    g_mistakes,
    total,
)
from tplab.runtime import device

COPIES = "p copies of this rank's slice"
SUM_PARTS = "the sum of all ranks' slices"
STACKED = "all ranks' slices, concatenated along dimension 0"

# scatter

PART_OF_0 = "slice 0 of x on every rank"
EVERY_PTH = "every p-th column of x"
PADDED = "this rank's slice of the gradient, and zeros elsewhere"
WHOLE_X = "the full x"
UNEVEN = "a size that can't be divided evenly is refused"

SCATTER_QUESTIONS = (
    checks.Question(
        UNEVEN,
        "If you split 9 columns across 2 ranks, one rank gets more columns than the other, and a later collective "
        "hangs or fails. How can your code reject such a size? (The `shard` function already does so.)",
    ),
    checks.LATE_QUESTION,
    ROUNDED,
    WROTE,
    ZERO_OUT,
    checks.Question(
        checks.kind_is("out", PART_OF_0), "Every rank returned slice 0. Which slice of x belongs to this rank?"
    ),
    checks.Question(
        checks.kind_is("out", EVERY_PTH, "value"),
        "A shard is a contiguous block of columns. Which block belongs to rank r?",
    ),
    checks.Question(checks.kind_is("out", WHOLE_X), "You returned all of x. Which slice of x should this rank keep?"),
    checks.Question(
        lambda d: "out" in d.names and not d.malformed,
        "Which dimension should scatter slice? How long is each slice? Where does rank r's slice start?",
    ),
    FORWARD_SENDS,
    NO_GRADIENT,
    ZERO_GRADIENT,
    checks.Question(
        lambda d: d.kind("dx") in (PADDED, "partly zero"),
        "Your gradient contains zeros where the other ranks' slices should be. Which collective brings the other "
        "ranks' slices to this rank?",
    ),
    checks.Question(
        checks.kind_is("dx", COPIES),
        "You concatenated p copies of this rank's own slice. Which collective brings the other ranks' slices to "
        "this rank?",
    ),
    checks.Question(
        lambda d: d.kind("dx") in (STACKED, "order") or "order" in d.kinds(),
        "In the forward pass, scatter slices x along the last dimension, in rank order. Does your backward pass "
        "concatenate the slices of the gradient along the last dimension and in rank order?",
    ),
    checks.Question(
        checks.kind_is("dx", "1/p", "p times"),
        "Each column of x is used by exactly one rank. Should a column's gradient depend on the number of ranks?",
    ),
    checks.Question(
        lambda d: d.names == {"backward traffic"} and any("all_reduce" in row.text for row in d),
        "The gradient is correct. But an all-reduce adds tensors, and here there's nothing to add. Which collective "
        "just collects the slices and sends only half as many bytes?",
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


def scatter_unevenly(operator: Any) -> checks.Observed:
    """Apply the operator to 9 columns on 2 ranks, which must raise ValueError. This function runs on every rank."""
    try:
        part = operator.apply(torch.zeros(4, 9, device=device()))
    except ValueError:
        return {UNEVEN: checks.Claim("")}
    return {UNEVEN: checks.Claim(f"it was split anyway, into shape {list(part.shape)}")}


# gather

SLICE_OF_SUM = "this rank's slice of the sum of all ranks' gradients"
SLICE_OF_MEAN = "this rank's slice of the mean of all ranks' gradients"
SLICE_0 = "slice 0 of the gradient, whatever the rank"

GATHER_QUESTIONS = (
    checks.LATE_QUESTION,
    ROUNDED,
    WROTE,
    ZERO_OUT,
    checks.Question(
        checks.kind_is("out", OWN_X),
        "You only returned this rank's own slice. How do you get the other ranks' slices?",
    ),
    checks.Question(
        checks.kind_is("out", COPIES),
        "The output consists of p copies of this rank's own slice. Which collective brings the other ranks' slices to "
        "this rank?",
    ),
    checks.Question(
        checks.kind_is("out", SUM_PARTS),
        "You added the slices, but each slice holds different columns of the output. How should you combine the slices "
        "instead of adding them?",
    ),
    checks.Question(
        lambda d: "out" in d.names and (d.kind("out") in (STACKED, "value") or "order" in d.kinds()),
        "Does your code concatenate the slices along the last dimension and in rank order? Note that "
        "`all_gather_into_tensor` always concatenates along dimension 0.",
    ),
    checks.Question(
        lambda d: d.names == {"forward traffic"} and any("saw 1 all_reduce" in row.text for row in d),
        "The output is correct. But an all-reduce adds tensors, and here there's nothing to add. Which collective "
        "just collects the slices and sends only half as many bytes?",
    ),
    FORWARD_SENDS,
    NO_GRADIENT,
    ZERO_GRADIENT,
    checks.Question(
        checks.kind_is("dx", SLICE_OF_SUM, SLICE_OF_MEAN),
        "All ranks share one loss, and each of them already has the full gradient of the output. Does your "
        "backward pass need to add or average anything?",
    ),
    checks.Question(
        checks.kind_is("dx", SLICE_0),
        "Your backward pass returns slice 0 of the gradient on every rank. Which columns of the output came from this "
        "rank?",
    ),
    checks.Question(
        checks.kind_is("dx", "1/p", "p times"),
        "Each column of the output came from exactly one rank. Should a column's gradient depend on the number of "
        "ranks?",
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


@checks.exercise("3.3", "g, scatter and gather")
def g_scatter_and_gather(reduce: Any, scatter: Any, gather: Any) -> checks.Verdict:
    check_operator("3.3", "g", reduce, Operator(ADD, COPY, g_mistakes), G_QUESTIONS)
    check_operator("3.3", "scatter", scatter, Operator(SPLIT, GATHER, scatter_mistakes), SCATTER_QUESTIONS)
    seen = checks.run_ranks(scatter_unevenly, 2, scatter)
    checks.verify("3.3", 2, list(seen), [{}] * 2, questions=SCATTER_QUESTIONS, note="scatter of 9 columns")
    check_operator("3.3", "gather", gather, Operator(GATHER, SPLIT, gather_mistakes), GATHER_QUESTIONS)
    return checks.Verdict(
        "Each operator calls a collective in one of its two passes and sends nothing in the other pass."
    )
