"""The check for exercise 1.2: a ring reduce-scatter."""

from collections.abc import Callable

import torch

from tplab.course.chapters.ch01.rings import COMMON, FAR, Input, Ring, Tensors, check_ring, only_traffic, ring_traffic
from tplab.course.checks import Differences, Expected, Place, Question, Verdict, exercise, kind_is

_WHOLE = "all rows of the sum"
_NEXT = "the row of the sum that belongs to the right neighbour"
_LAST = "the row of the sum that belongs to the left neighbour"
_MISSING = "a sum that lacks the term of one rank"
_ALONE = "the term of one rank, with nothing added to it"
_TWICE = "a sum that has the term of one rank twice"
_WHO = {0: "its own", 1: "its left neighbour's"}

_TABLE = (
    "Write the table for p = 3: at each step, which row does each rank send, which row comes in, and which of its own "
    "rows has to be added to that one? After the last step rank r must hold row r. (And is the tensor that you receive "
    "into another one than the one you send?)"
)


def _begins(label: str) -> Callable[[Differences], bool]:
    return lambda d: d.kind("out").startswith(label)


_QUESTIONS = (
    *COMMON,
    Question(
        kind_is("out", _WHOLE),
        "Every rank holds all rows of the sum; it should own one. What is the difference between a reduce-scatter and "
        "an all-reduce?",
    ),
    Question(
        kind_is("out", _NEXT, _LAST, "other rank"),
        "The sums are complete, but they end at the wrong rank. A row moves one rank to the right in each of p - 1 "
        "steps. Where must row r start, so that it ends at rank r?",
    ),
    Question(
        _begins(_ALONE),
        "No sum was made. What arrives from the left has the terms of the ranks before: what do you add to it, before "
        "you send it on?",
    ),
    Question(
        _begins(_MISSING),
        "One rank's term is missing. What comes in from the left has the terms of the ranks before: what do you add to "
        "it, before you send it on, and after the last step? And how many steps are there?",
    ),
    Question(
        _begins(_TWICE),
        "One rank's term is in the sum twice. Which row goes out first, and which one do you add to what comes in?",
    ),
    Question(
        lambda d: d.kind("out") in ("p times", "multiple"),
        "Each term is in the sum more than once. How many steps does it take until every rank has added its own?",
    ),
    Question(kind_is("out", "1/p"), "A reduce-scatter gives the sum. Is this the mean?"),
    Question(
        lambda d: only_traffic(d) and d.p == 2,
        "The numbers are right, but more was sent than one row in each of p - 1 steps. How large is each message, and "
        "how many are there? Which rows does the right neighbour need from you?",
    ),
    FAR,
    Question(lambda d: "out" in d.names and not d.malformed and d.kind("out") != "shape", _TABLE),
)


def expect(case: Input, xs: Tensors, place: Place) -> Expected:
    """Expect row r of the sum on rank r."""
    p, rank, total = place.size, place.index, torch.stack(xs).sum(0)
    mistakes = {_WHOLE: total, _NEXT: total[(rank + 1) % p], _LAST: total[rank - 1]}
    for off in range(p):  # the rank whose term is missing, doubled or alone is `off` ranks to the left
        term = xs[rank - off][rank]
        who = f" ({_WHO.get(off, f'the one {off} to the left')})"
        mistakes |= {_MISSING + who: total[rank] - term, _TWICE + who: total[rank] + term, _ALONE + who: term}
    right = {"out": total[rank], "traffic": ring_traffic(place, p - 1, total[rank].numel())}
    return Expected(right, {"out": mistakes} if p > 1 else {})


@exercise("1.2", "a reduce-scatter in a ring")
def ring_reduce_scatter(function: Ring) -> Verdict:
    check_ring("1.2", function, lambda p: ((p, 5), (p, 2, 3)), expect, _QUESTIONS)
    return Verdict("p - 1 messages of one row: (p-1)/p of x.")
