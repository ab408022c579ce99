"""The check of exercise 3.4, the operator gather: gather forward, cut backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tplab.course.chapters.ch03.operators import GATHER, check_operator, my_part, total
from tplab.course.chapters.ch03.questions import (
    BACKWARD_SENDS,
    COPIES,
    FORWARD_SENDS,
    NO_GRADIENT,
    OWN_X,
    ROUNDED,
    STACKED,
    SUM_PARTS,
    WROTE,
    ZERO_GRADIENT,
    ZERO_OUT,
)
from tplab.course.checks import LATE_QUESTION, Lookalikes, Question, Verdict, exercise, kind_is

_SLICE_OF_SUM = "this rank's slice of the sum of all ranks' gradients"
_SLICE_OF_MEAN = "this rank's slice of the mean of all ranks' gradients"
_SLICE_0 = "slice 0 of the gradient, whatever the rank"
_WHOLE = "the whole gradient"

GATHER_QUESTIONS = (
    LATE_QUESTION,
    ROUNDED,
    WROTE,
    ZERO_OUT,
    Question(kind_is("out", OWN_X), "This is one part. Who holds the others?"),
    Question(kind_is("out", COPIES), "Every part came from this rank. Which call brings the other ranks' parts?"),
    Question(kind_is("out", SUM_PARTS), "The parts are different columns. Should they be added?"),
    Question(
        lambda d: "out" in d.names and (d.kind("out") in (STACKED, "value") or "order" in d.kinds()),
        "Along which dimension, and in which order, do the parts go together? (all_gather_into_tensor uses dimension "
        "0.)",
    ),
    Question(
        lambda d: d.names == {"forward traffic"} and any("saw 1 all_reduce" in row.text for row in d),
        "The output is right. But an all-reduce adds, and here nothing has to be added. Which collective only brings "
        "the parts together, for half of what an all-reduce sends?",
    ),
    FORWARD_SENDS,
    NO_GRADIENT,
    ZERO_GRADIENT,
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
    BACKWARD_SENDS,
)


def gather_lookalikes(x: Sequence[Tensor], upstream: Sequence[Tensor]) -> Lookalikes:
    p = len(x)
    mean = [t / p for t in total(upstream)]
    return {
        "out": {
            OWN_X: x,
            COPIES: [torch.cat([part] * p, -1) for part in x],
            SUM_PARTS: total(x),
            STACKED: [torch.cat(list(x))] * p,
        },
        "dx": {
            _SLICE_OF_SUM: my_part(total(upstream)),
            _SLICE_OF_MEAN: my_part(mean),
            _SLICE_0: [t.chunk(p, -1)[0] for t in upstream],
            _WHOLE: upstream,
        },
    }


@exercise("3.4", "gather: gather forward, cut backward")
def gather_from_region(operator: Any) -> Verdict:
    check_operator("3.4", operator, GATHER, GATHER_QUESTIONS, gather_lookalikes)
    return Verdict("One all-gather, forward.")
