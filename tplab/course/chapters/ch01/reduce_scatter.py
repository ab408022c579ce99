"""The check for exercise 1.2: a ring reduce-scatter."""

from collections.abc import Callable

import torch

from tplab.course.chapters.ch01.rings import COMMON, FAR, Input, Ring, Tensors, check_ring, only_traffic, ring_traffic
from tplab.course.checks import Differences, Expected, Place, Question, Verdict, exercise, kind_is

_WHOLE = "all rows of the sum"
_NEXT = "the row of the sum that belongs to the right-hand neighbor"
_LAST = "the row of the sum that belongs to the left-hand neighbor"
_MISSING = "a sum without the term of one rank"
_ALONE = "the term of a single rank, with nothing added to it"
_TWICE = "a sum that counts the term of one rank twice"
_WHO = {0: "its own", 1: "its left-hand neighbor's"}

_TABLE = (
    "Write down a table for p = 3, with a row for each step. Which row of x does each rank send, and which row "
    "arrives there? Each rank has to add its own numbers to the row that arrives. After the last step, rank r "
    "must hold row r. (Also make sure that you don't receive into the tensor that you're sending.)"
)


def _begins(label: str) -> Callable[[Differences], bool]:
    return lambda d: d.kind("out").startswith(label)


_QUESTIONS = (
    *COMMON,
    Question(
        kind_is("out", _WHOLE),
        "Every rank has all rows of the sum, but it should only have one. What's the difference between a "
        "reduce-scatter "
        "and an all-reduce?",
    ),
    Question(
        kind_is("out", _NEXT, _LAST, "other rank"),
        "The sums are complete, but they end up on the wrong ranks. A row moves one rank to the right in each of the "
        "p - 1 "
        "steps. Where does row r have to start, so that it arrives at rank r?",
    ),
    Question(
        _begins(_ALONE),
        "Nothing was added up. What arrives from the left holds the terms of the ranks before you. What do you have "
        "to add "
        "to it before you pass it on?",
    ),
    Question(
        _begins(_MISSING),
        "One rank's term is missing. What do you add to what arrives from the left, before you pass it on and after "
        "the last "
        "step? And how many steps are there?",
    ),
    Question(
        _begins(_TWICE),
        "One rank's term is in the sum twice. Which row do you send first, and which one do you add to what arrives?",
    ),
    Question(
        lambda d: d.kind("out") in ("p times", "multiple"),
        "Each term is in the sum more than once. How many steps does it take until every rank has added its own?",
    ),
    Question(kind_is("out", "1/p"), "You returned the mean. Does a reduce-scatter give the mean or the sum?"),
    Question(
        lambda d: only_traffic(d) and d.p == 2,
        "The result is right, but you sent more than one row in each of p - 1 steps. How large is each message, and "
        "how many "
        "are there? Which rows does your right-hand neighbor need from you?",
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
    return Verdict("Each rank sent p - 1 messages of one row, which is (p-1)/p of x.")
