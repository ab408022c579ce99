"""The check for exercise 1.4: an all-reduce from a reduce-scatter and an all-gather."""

import torch

from tplab.course.chapters.ch01.rings import COMMON, Input, Ring, Tensors, check_ring, only_traffic, ring_traffic
from tplab.course.checks import Differences, Expected, Place, Question, Verdict, exercise, kind_is

_OWN = "this rank's own x"
_FLAT = "the right one as one long row"
_ROWS = "the right one with its first p-th as a dimension of its own"
_COLUMNS = "the right numbers, read by columns where they should be read by rows"
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
        "Every rank returns what it had. Which of your two functions gives the sum, and what did you do with what it "
        "returned?",
    ),
    Question(
        kind_is("out", _FLAT, _ROWS, "shape"),
        "The result has the shape of x. You may change shapes on the way, since a reduce-scatter wants [p, ..]: which "
        "call leads back at the end?",
    ),
    Question(
        kind_is("out", _PART),
        "Only this rank's part of the sum is there. Which of the two functions brings the other parts?",
    ),
    Question(kind_is("out", "1/p"), "An all-reduce gives the sum. Is this the mean?"),
    Question(kind_is("out", "p times"), "Each term is in the sum p times. Is something added that is a sum already?"),
    Question(
        kind_is("out", _COLUMNS, "order", "transposed"),
        "The right numbers in other places. How was x cut into p parts, and are they put together in the same order?",
    ),
    Question(
        _whole_tensors,
        "The numbers are right, but messages of the size of x went out. In a ring every message is a p-th of x: "
        "2(p-1) of them. What does that make for each rank, against (p-1) whole ones, when p is 8?",
    ),
    Question(
        only_traffic,
        "The numbers are right, by more messages than it takes. A reduce-scatter is p - 1 of them, an all-gather p - 1 "
        "more. Which are yours?",
    ),
    Question(
        lambda d: "out" in d.names and not d.malformed,
        "Take it apart: what does ring_reduce_scatter return on each rank for your [p, ..], and what does "
        "ring_all_gather make of these?",
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


@exercise("1.4", "an all-reduce in a ring")
def ring_all_reduce(function: Ring) -> Verdict:
    check_ring("1.4", function, lambda p: ((4 * p, 3), (3, p, 2), (5 * p,)), expect, _QUESTIONS, without=())
    return Verdict("2(p-1) messages of a p-th of x: 2(p-1)/p of x from each rank.")
