"""The check for exercise 1.3: a ring all-gather."""

import torch

from tplab.course.chapters.ch01.rings import (
    COMMON,
    FAR,
    Input,
    Ring,
    Tensors,
    check_ring,
    only_traffic,
    ring_traffic,
)
from tplab.course.checks import Expected, Place, Question, Verdict, exercise, kind_is

_COPIES = "p copies of this rank's own part"
_ARRIVAL = "the parts in the order in which they came, this rank's own first"
_ARRIVAL_LAST = "the parts in the order in which they came, this rank's own last"
_FLAT = "the parts one after another, without a dimension of their own"
_SUM = "the sum of the parts"
_NEIGHBOUR = "this rank's own part and its left neighbour's, the latter in all other places"

_QUESTIONS = (
    *COMMON,
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


def expect(case: Input, xs: Tensors, place: Place) -> Expected:
    """Expect the parts of all ranks, stacked, on every rank."""
    p, rank, gathered = place.size, place.index, torch.stack(xs)
    mistakes = {
        _COPIES: torch.stack([xs[rank]] * p),
        _FLAT: torch.cat(xs),
        _SUM: gathered.sum(0),
        _NEIGHBOUR: torch.stack([xs[rank] if i == rank else xs[rank - 1] for i in range(p)]),
        _ARRIVAL: torch.stack([xs[rank - step] for step in range(p)]),
        _ARRIVAL_LAST: torch.stack([xs[rank - 1 - step] for step in range(p)]),
    }
    if p == 2:
        del mistakes[_NEIGHBOUR]  # with two ranks, this is right
    right = {"out": gathered, "traffic": ring_traffic(place, p - 1, xs[rank].numel())}
    return Expected(right, {"out": mistakes} if p > 1 else {})


@exercise("1.3", "an all-gather in a ring")
def ring_all_gather(function: Ring) -> Verdict:
    check_ring("1.3", function, lambda p: ((5,), (2, 3)), expect, _QUESTIONS)
    return Verdict("p - 1 messages of one part: (p-1)/p of the whole.")
