"""The check for exercise 1.2: a ring reduce-scatter."""

from collections.abc import Callable

import torch

from tplab.course.checks import Differences, Expected, Place, Question, Verdict, exercise, kind_is
from tplab.course.exercises.ch01.rings import COMMON, FAR, Input, Ring, Tensors, check_ring, only_traffic, ring_traffic

_WHOLE = "all chunks of the sum"
_NEXT = "the chunk of the sum that belongs to the right-hand neighbor"
_LAST = "the chunk of the sum that belongs to the left-hand neighbor"
_MISSING = "a sum without one rank's values"
_ALONE = "a single rank's values, with nothing added to them"
_TWICE = "a sum that counts one rank's values twice"
_WHO = {0: "its own", 1: "its left-hand neighbor's"}

_TABLE = (
    "Make a table for p = 3, with one line per step. Which chunk of `x` does each rank send in each step? Which chunk "
    "does each rank receive? Each rank has to add its own values to the chunk it receives. After the last step, rank r "
    "must hold chunk r. Also make sure that you never receive into a tensor that's still being sent."
)


def _begins(label: str) -> Callable[[Differences], bool]:
    return lambda d: d.kind("out").startswith(label)


_QUESTIONS = (
    *COMMON,
    Question(
        kind_is("out", _WHOLE),
        "Every rank has all chunks of the sum, but each rank should have only one chunk. What's the difference between "
        "a reduce-scatter and an all-reduce?",
    ),
    Question(
        kind_is("out", _NEXT, _LAST, "other rank"),
        "The sums are complete, but they end up on the wrong ranks. A chunk moves one rank to the right in each of the "
        "p - 1 steps. On which rank does chunk r have to start if it should end up on rank r?",
    ),
    Question(
        _begins(_ALONE),
        "Your result contains values from just one rank. What do you have to add to the tensor you receive from your "
        "left-hand neighbor before you pass that tensor on?",
    ),
    Question(
        _begins(_MISSING),
        "The sum is missing one rank's values. Do you add your own values to every chunk you receive, including the "
        "last chunk? How many steps does your loop take?",
    ),
    Question(
        _begins(_TWICE),
        "The sum counts one rank's values twice. Which chunk do you send first? Which of your own chunks do you add to "
        "the chunk you receive?",
    ),
    Question(
        lambda d: d.kind("out") in ("p times", "multiple"),
        "The sum counts some ranks' values more than once. How many steps does it take until every rank has added "
        "its values once?",
    ),
    Question(kind_is("out", "1/p"), "You returned the mean. Does a reduce-scatter compute the mean or the sum?"),
    Question(
        lambda d: only_traffic(d) and d.p == 2,
        "The result is right, but each rank should send only p - 1 messages, with a single chunk in each message. How "
        "many messages do you send? How large is each message? Which chunks does your right-hand neighbor need from "
        "you?",
    ),
    FAR,
    Question(lambda d: "out" in d.names and not d.malformed and d.kind("out") != "shape", _TABLE),
)


def expect(case: Input, xs: Tensors, place: Place) -> Expected:
    """Expect rank r to return chunk r of the sum."""
    p, rank, total = place.size, place.index, torch.stack(xs).sum(0)
    mistakes = {_WHOLE: total, _NEXT: total[(rank + 1) % p], _LAST: total[rank - 1]}
    for off in range(p):  # the rank whose term is missing, counted twice or returned alone is `off` ranks to the left
        term = xs[rank - off][rank]
        who = f" ({_WHO.get(off, f'the one {off} to the left')})"
        mistakes |= {_MISSING + who: total[rank] - term, _TWICE + who: total[rank] + term, _ALONE + who: term}
    right = {"out": total[rank], "traffic": ring_traffic(place, p - 1, total[rank].numel())}
    return Expected(right, {"out": mistakes} if p > 1 else {})


@exercise("1.2", "Reduce-scatter in a ring")
def ring_reduce_scatter(function: Ring) -> Verdict:
    check_ring("1.2", function, lambda p: ((p, 5), (p, 2, 3)), expect, _QUESTIONS)
    return Verdict("Each rank sent p - 1 messages of one chunk each. Together, these chunks are (p-1)/p of x.")
