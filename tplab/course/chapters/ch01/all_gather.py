"""The check of exercise 1.3: a ring all-gather."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tplab.course.chapters.ch01.rings import (
    CHANGED,
    FAR,
    NOT_WAITED,
    ROUNDED,
    SILENT,
    TORCH_DID_IT,
    ZEROS,
    Ring,
    check_ring,
    only_traffic,
)
from tplab.course.checks import Lookalikes, Question, Verdict, exercise, kind_is

_COPIES = "p copies of this rank's own part"
_ARRIVAL = "the parts in the order in which they came, this rank's own first"
_ARRIVAL_LAST = "the parts in the order in which they came, this rank's own last"
_FLAT = "the parts one after another, without a dimension of their own"
_SUM = "the sum of the parts"
_NEIGHBOUR = "this rank's own part and its left neighbour's, the latter in all other places"

_QUESTIONS = (
    NOT_WAITED,
    TORCH_DID_IT,
    CHANGED,
    ROUNDED,
    SILENT,
    ZEROS,
    Question(
        kind_is("out", _ARRIVAL, _ARRIVAL_LAST, "order"),
        "All parts are there, in another order. Row i belongs to rank i, on every rank. What comes in at step s was "
        "made by which rank, and where does it go?",
    ),
    Question(
        kind_is("out", _COPIES),
        "One part stands in all p places. What do you receive into, and are the p tensors of your list p different "
        "ones?",
    ),
    Question(
        kind_is("out", _NEIGHBOUR),
        "Only the left neighbour's part came, again and again. After the first step, what do you send: your own part "
        "once more, or what has just come in?",
    ),
    Question(kind_is("out", _SUM), "An all-gather only brings the parts together. Should they be added?"),
    Question(
        kind_is("out", _FLAT),
        "The numbers are right. The result is [p, ..]: a new dimension in front counts the ranks. Which of torch.cat "
        "and torch.stack makes one?",
    ),
    Question(
        lambda d: d.kind("out") == "partly zero",
        "Some rows never came. How many parts are missing at the start, and how many come in at each step?",
    ),
    Question(
        lambda d: only_traffic(d) and d.p == 2,
        "The numbers are right, but more was sent than one part in each of p - 1 steps. Which parts does your right "
        "neighbour lack, and how large is one?",
    ),
    FAR,
    Question(
        lambda d: "out" in d.names and not d.malformed and d.kind("out") != "shape",
        "Write the table for p = 3: which rank's part does each rank send at each step, and which comes in? After the "
        "last step every rank must have all of them, row i from rank i.",
    ),
)


def gathered(xs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank has the parts of all, one below another."""
    return [torch.stack(list(xs))] * len(xs)


def _lookalikes(xs: Sequence[Tensor]) -> Lookalikes:
    p, whole = len(xs), torch.stack(list(xs))
    ways = {
        _COPIES: [torch.stack([x] * p) for x in xs],
        _FLAT: [torch.cat(list(xs))] * p,
        _SUM: [whole.sum(0)] * p,
        _NEIGHBOUR: [torch.stack([x if i == rank else xs[rank - 1] for i in range(p)]) for rank, x in enumerate(xs)],
        _ARRIVAL: [torch.stack([xs[rank - step] for step in range(p)]) for rank in range(p)],
        _ARRIVAL_LAST: [torch.stack([xs[rank - 1 - step] for step in range(p)]) for rank in range(p)],
    }
    return {"out": ways if p > 2 else {label: way for label, way in ways.items() if label != _NEIGHBOUR}}


@exercise("1.3", "an all-gather in a ring")
def ring_all_gather(function: Ring) -> Verdict:
    check_ring(
        "1.3",
        function,
        shapes=lambda p: ((5,), (2, 3)),
        expected=gathered,
        messages=lambda x, p: (p - 1, x.numel()),
        lookalikes=_lookalikes,
        questions=_QUESTIONS,
    )
    return Verdict("p - 1 messages of one part: (p-1)/p of the whole.")
