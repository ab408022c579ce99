"""The check for exercise 1.3: a ring all-gather, and an all-reduce made of it and a reduce-scatter."""

import torch

from tplab.course.chapters.ch01.all_gather import check_all_gather
from tplab.course.chapters.ch01.rings import COMMON, Input, Ring, Tensors, check_ring, only_traffic, ring_traffic
from tplab.course.checks import Differences, Expected, Place, Question, Verdict, exercise, kind_is

_OWN = "this rank's own x"
_FLAT = "the right values in one long row"
_ROWS = "the right values as p rows"
_COLUMNS = "the right values, read by columns instead of rows"
_PART = "this rank's part of the sum, p times"


def _whole_tensors(differences: Differences) -> bool:
    """Return whether the values are right, but some message is larger than necessary, as if it were all of x."""
    return only_traffic(differences) and any(_largest(row.text) > _largest(row.text, seen=False) for row in differences)


def _largest(text: str, seen: bool = True) -> int:
    """Return the number of elements in the largest message of "expected ...; saw ..."."""
    words = text.partition("; saw ")[2 if seen else 0].split()
    sizes = [int(before) for before, word in zip(words, words[1:], strict=False) if word == "elements"]
    return max(sizes, default=0)


_QUESTIONS = (
    *COMMON,
    Question(
        kind_is("out", _OWN),
        "Every rank returns what it started with. Which of your two functions returns the sum, and what did you do "
        "with "
        "its result?",
    ),
    Question(
        kind_is("out", _FLAT, _ROWS, "shape"),
        "The result should have the shape of x. Your reduce-scatter needs the shape [p, ..], so you change it on the "
        "way. "
        "Which call changes it back in the end?",
    ),
    Question(
        kind_is("out", _PART),
        "You only have this rank's part of the sum. Which of your two functions brings the other parts?",
    ),
    Question(kind_is("out", "1/p"), "You returned the mean. Does an all-reduce give the mean or the sum?"),
    Question(
        kind_is("out", "p times"), "Each term is in the sum p times. Do you add up something that's already a sum?"
    ),
    Question(
        kind_is("out", _COLUMNS, "order", "transposed"),
        "The values are right, but they're in the wrong places. How do you split x into p parts, and do you join "
        "them in the "
        "same order?",
    ),
    Question(
        _whole_tensors,
        "The result is right, but you sent messages as large as x. In a ring, each of the 2(p-1) messages is only a "
        "p-th of "
        "x. For p = 8, how much does a rank send then, and how much do you send?",
    ),
    Question(
        only_traffic,
        "The result is right, but you sent more messages than you need. A reduce-scatter takes p - 1 messages, and "
        "so does "
        "an all-gather. Which ones are yours?",
    ),
    Question(
        lambda d: "out" in d.names and not d.malformed,
        "Take it apart. What does ring_reduce_scatter return on each rank for your [p, ..], and what does "
        "ring_all_gather "
        "make of that?",
    ),
)


def expect(case: Input, xs: Tensors, place: Place) -> Expected:
    """Expect the sum in the shape of x, on every rank."""
    p, rank, total = place.size, place.index, torch.stack(xs).sum(0)
    parts = total.reshape(p, -1)
    mistakes = {
        _OWN: xs[rank],
        _FLAT: total.reshape(-1),
        _ROWS: parts,
        _COLUMNS: total.reshape(-1, p).T.reshape(total.shape),
        _PART: torch.stack([parts[rank]] * p).reshape(total.shape),
    }
    right = {"out": total, "traffic": ring_traffic(place, 2 * (p - 1), total.numel() // p)}
    return Expected(right, {"out": mistakes} if p > 1 else {})


@exercise("1.3", "an all-gather and an all-reduce in a ring")
def all_gather_and_all_reduce(all_gather: Ring, all_reduce: Ring) -> Verdict:
    check_all_gather(all_gather)
    shapes = lambda p: ((4 * p, 3), (3, p, 2), (5 * p,))  # noqa: E731 (as short as an argument)
    check_ring("1.3", all_reduce, shapes, expect, _QUESTIONS, without=(), name="ring_all_reduce")
    return Verdict("For an all-reduce, each rank sent 2(p-1) messages, and each message contained 1/p of x.")
