"""The check of exercise 3.1, the operator f: copy forward, add backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tplab.course.chapters.ch03.operators import F, check_operator, total
from tplab.course.chapters.ch03.questions import (
    BACKWARD_SENDS,
    FORWARD_SENDS,
    NO_GRADIENT,
    ONLY_ROOT,
    ROUNDED,
    WROTE,
    ZERO_GRADIENT,
    ZERO_OUT,
    traffic_too,
)
from tplab.course.checks import LATE_QUESTION, Lookalikes, Question, Verdict, exercise, kind_is

_OWN_TERM = "this rank's own upstream gradient, before the sum"
_SUM_X = "the sum of x over all ranks"
_MEAN_X = "the mean of x over all ranks"
_X_OF_0 = "the x of rank 0"
_P_TIMES_OWN = "p times this rank's own upstream gradient"
_LARGEST = "the largest over the ranks, entry by entry"

F_QUESTIONS = (
    LATE_QUESTION,
    ROUNDED,
    WROTE,
    Question(
        kind_is("out", _SUM_X, _X_OF_0, _MEAN_X),
        "Forward, every rank has the right x already. What is left for f to do?",
    ),
    ZERO_OUT,
    FORWARD_SENDS,
    NO_GRADIENT,
    ZERO_GRADIENT,
    Question(lambda d: d.p > 1 and "dx" in d.names and 0 not in d.ranks("dx"), ONLY_ROOT),
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
    BACKWARD_SENDS,
)


def f_lookalikes(x: Sequence[Tensor], upstream: Sequence[Tensor]) -> Lookalikes:
    p = len(x)
    return {
        "out": {_SUM_X: total(x), _MEAN_X: [t / p for t in total(x)], _X_OF_0: [x[0]] * p},
        "dx": {
            _OWN_TERM: upstream,
            _P_TIMES_OWN: [p * up for up in upstream],
            _LARGEST: [torch.stack(list(upstream)).amax(0)] * p,
        },
    }


@exercise("3.1", "f: copy forward, add backward")
def copy_to_region(operator: Any) -> Verdict:
    check_operator("3.1", operator, F, F_QUESTIONS, f_lookalikes)
    return Verdict(
        "One all-reduce, backward. Strided and expanded gradients are right too, and nobody's tensor was touched."
    )
