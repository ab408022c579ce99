"""The check of exercise 3.3, the operator scatter: cut forward, gather backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tplab.course.chapters.ch03.operators import SCATTER, check_operator, total
from tplab.course.chapters.ch03.questions import (
    BACKWARD_SENDS,
    COPIES,
    FORWARD_SENDS,
    NO_GRADIENT,
    ROUNDED,
    STACKED,
    SUM_PARTS,
    WROTE,
    ZERO_GRADIENT,
    ZERO_OUT,
)
from tplab.course.checks import (
    LATE_QUESTION,
    Claim,
    Lookalikes,
    Observed,
    Question,
    Verdict,
    exercise,
    kind_is,
    run_ranks,
    verify,
)
from tplab.runtime import device

_PART_OF_0 = "part 0 of x, whatever the rank"
_EVERY_PTH = "every p-th column of x"
_PADDED = "this rank's part of the gradient, and zeros elsewhere"
_WHOLE_X = "the whole x"
UNEVEN = "a size that can't be divided is refused"

SCATTER_QUESTIONS = (
    Question(
        UNEVEN,
        "9 columns on 2 ranks: one rank would hold more than the other. What does the other half of the network make "
        "of that? (shard refuses such sizes for you.)",
    ),
    LATE_QUESTION,
    ROUNDED,
    WROTE,
    ZERO_OUT,
    Question(kind_is("out", _PART_OF_0), "Which part of x is this rank's own?"),
    Question(kind_is("out", _EVERY_PTH, "value"), "A shard is a block of neighbours. Which columns does rank r hold?"),
    Question(kind_is("out", _WHOLE_X), "What is left for this rank to cut away?"),
    Question(
        lambda d: "out" in d.names and not d.malformed,
        "Which dimension does scatter cut, how long is a part, and where does the part of rank r start?",
    ),
    FORWARD_SENDS,
    NO_GRADIENT,
    ZERO_GRADIENT,
    Question(
        lambda d: d.kind("dx") in (_PADDED, "partly zero"),
        "The rest of the gradient is not zero: other ranks hold it. How does it get here?",
    ),
    Question(kind_is("dx", COPIES), "Every part came from this rank. Which call brings the other ranks' parts?"),
    Question(kind_is("dx", SUM_PARTS), "The parts are gradients of different columns of x. Should they be added?"),
    Question(
        lambda d: d.kind("dx") in (STACKED, "order") or "order" in d.kinds(),
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
    BACKWARD_SENDS,
)


def scatter_lookalikes(x: Sequence[Tensor], upstream: Sequence[Tensor]) -> Lookalikes:
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
            COPIES: [torch.cat([part] * p, -1) for part in upstream],
            SUM_PARTS: total(upstream),
            STACKED: [torch.cat(list(upstream)).reshape(x[0].shape)] * p,
        },
    }


@exercise("3.3", "scatter: cut forward, gather backward")
def scatter_to_region(operator: Any) -> Verdict:
    check_operator("3.3", operator, SCATTER, SCATTER_QUESTIONS, scatter_lookalikes)
    seen = run_ranks(scatter_unevenly, 2, operator)
    verify("3.3", 2, list(seen), [{}] * 2, questions=SCATTER_QUESTIONS, note="9 columns")
    return Verdict("One all-gather, backward.")


def scatter_unevenly(operator: Any) -> Observed:
    """On a rank: 9 columns over 2 ranks."""
    try:
        part = operator.apply(torch.zeros(4, 9, device=device()))
    except ValueError:
        return {UNEVEN: Claim("")}
    return {UNEVEN: Claim(f"cut all the same, to shape {list(part.shape)}")}
