"""The check of exercise 13.1: GPipe as lists of actions."""

from collections.abc import Callable
from typing import Any

from tplab.course.chapters.ch13.lists import ENDS, ONCE, expected, items, observed
from tplab.course.checks import Claim, Question, Verdict, calling, exercise, verify

SIZES = ((2, 3), (1, 2), (4, 8), (3, 1), (4, 2), (8, 5))  # (p, m)
FIRST = "all forwards come before the first backward"

_QUESTIONS = (
    Question(
        lambda d: ONCE in d.names,
        "Every rank takes every micro-batch forward once and backward once: 2m actions. Which micro-batches does your "
        "loop go over, and on which rank does it do something else?",
    ),
    Question(
        lambda d: ENDS in d.names,
        "Go round the circle: each of these actions waits for the next one. What does an F need, and of whom? And a "
        "B? In which order must rank 1 take the micro-batches, if rank 0 sends them in order?",
    ),
    Question(
        lambda d: FIRST in d.names,
        "In GPipe no rank goes backward before it has taken all m micro-batches forward. Where does a B stand before "
        "an F?",
    ),
    Question(
        lambda d: "units of time" in d.names,
        "It runs, but ranks wait longer than they have to. In which order does each rank get its micro-batches from "
        "the neighbour, forward and backward, and in which order does its list take them?",
    ),
)


@exercise("13.1", "GPipe as lists of actions")
def gpipe_lists(gpipe: Callable[..., Any]) -> Verdict:
    for p, m in SIZES:
        call = f"gpipe({p}, {m})"
        with calling(call):
            rows = gpipe(p, m)
        lists = items("13.1", call, rows, p)
        seen = observed(lists, m, p)
        for rank, row in enumerate(lists):
            kinds = "".join(kind for kind, _ in row)
            seen[rank][FIRST] = Claim("" if "BF" not in kinds else f"an F behind a B in {kinds}")
        verify("13.1", p, seen, expected(p, m, [m] * p), questions=_QUESTIONS, note=f"m = {m}")
    return Verdict("Every rank has the same list, and holds m micro-batches when it turns round.")
