"""The check of exercise 3.2, the operator g: add forward, copy backward."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tplab.course.chapters.ch03.operators import G, check_operator, total
from tplab.course.chapters.ch03.questions import (
    BACKWARD_SENDS,
    FORWARD_SENDS,
    NO_GRADIENT,
    ONLY_ROOT,
    OWN_X,
    ROUNDED,
    WROTE,
    ZERO_GRADIENT,
    ZERO_OUT,
    traffic_too,
)
from tplab.course.checks import LATE_QUESTION, Lookalikes, Question, Verdict, exercise, kind_is

_SUM_UP = "the sum of the upstream gradients of all ranks"
_UP_OF_0 = "the upstream gradient of rank 0"

G_QUESTIONS = (
    LATE_QUESTION,
    ROUNDED,
    WROTE,
    ZERO_OUT,
    Question(lambda d: d.p > 1 and "out" in d.names and 0 not in d.ranks("out"), ONLY_ROOT),
    Question(
        traffic_too("out", OWN_X, "forward traffic"),
        "Each rank holds one term of a sum. Who adds them up?",
    ),
    Question(
        kind_is("out", OWN_X),
        "An all-reduce ran, but the tensor you return does not hold the sum. Which tensor did it write into? "
        "(.contiguous() makes a copy of a tensor that is not contiguous.)",
    ),
    Question(kind_is("out", "1/p"), "The network adds the terms. Does it take their mean?"),
    Question(kind_is("out", "p times"), "How many times is each rank's term added?"),
    Question(
        lambda d: d.names == {"forward traffic"} and any("all_gather" in row.text for row in d),
        "The sum is right, but every rank received p tensors to add them up itself. Which collective adds on the way?",
    ),
    FORWARD_SENDS,
    NO_GRADIENT,
    ZERO_GRADIENT,
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
    BACKWARD_SENDS,
)


def g_lookalikes(x: Sequence[Tensor], upstream: Sequence[Tensor]) -> Lookalikes:
    return {"out": {OWN_X: x}, "dx": {_SUM_UP: total(upstream), _UP_OF_0: [upstream[0]] * len(x)}}


@exercise("3.2", "g: add forward, copy backward")
def reduce_from_region(operator: Any) -> Verdict:
    check_operator("3.2", operator, G, G_QUESTIONS, g_lookalikes)
    return Verdict("One all-reduce, forward. The tensor that autograd saved is still what it was.")
