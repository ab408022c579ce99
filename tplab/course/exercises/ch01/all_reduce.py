"""The check for exercise 1.3: a ring all-gather, and an all-reduce that combines it with a reduce-scatter."""

import torch

from tplab.course.checks import Differences, Expected, Place, Question, Verdict, exercise, kind_is
from tplab.course.exercises.ch01.all_gather import check_all_gather
from tplab.course.exercises.ch01.rings import COMMON, Input, Ring, Tensors, check_ring, only_traffic, ring_traffic

_OWN = "this rank's own x"
_FLAT = "the right values, flattened to one dimension"
_ROWS = "the right values as p chunks"
_COLUMNS = "the right values, read by columns instead of rows"
_CHUNK = "this rank's chunk of the sum, p times"


def _whole_tensors(differences: Differences) -> bool:
    """Return whether the values are right, but some message is larger than necessary, for example all of x."""
    return only_traffic(differences) and any(_largest(row.text) > _largest(row.text, seen=False) for row in differences)


def _largest(text: str, seen: bool = True) -> int:
    """Return the size, in elements, of the largest message that a report such as "expected ...; saw ..." mentions.

    seen: whether to look at the messages that the check saw, or otherwise at those that it expected
    """
    words = text.partition("; saw ")[2 if seen else 0].split()
    sizes = [int(before) for before, word in zip(words, words[1:], strict=False) if word == "elements"]
    return max(sizes, default=0)


_QUESTIONS = (
    *COMMON,
    Question(
        kind_is("out", _OWN),
        "Every rank returns the tensor it started with. Which of your two functions returns the sum, and what did "
        "you do with its result?",
    ),
    Question(
        kind_is("out", _FLAT, _ROWS, "shape"),
        "The result should have the same shape as `x`. Your reduce-scatter needs an input of shape [p, ..], so you "
        "have to reshape `x` first. Which call restores the original shape at the end?",
    ),
    Question(
        kind_is("out", _CHUNK),
        "Your result repeats this rank's chunk of the sum p times. Which of your two functions gathers the other "
        "ranks' chunks?",
    ),
    Question(kind_is("out", "1/p"), "You returned the mean. Does an all-reduce compute the mean or the sum?"),
    Question(
        kind_is("out", "p times"),
        "Your sum counts every rank's values p times. Are you adding up tensors that already contain the full sum?",
    ),
    Question(
        kind_is("out", _COLUMNS, "order", "transposed"),
        "The values are right, but they're in the wrong places. Which elements of `x` go into each chunk when you "
        "split `x`? At the end, do you put each element back in its original position?",
    ),
    Question(
        _whole_tensors,
        "The result is right, but some of your messages are too large. In a ring, each of the 2(p-1) messages "
        "contains only 1/p of `x`. For p = 8, how many elements should each rank send in total? How many elements "
        "does your function send?",
    ),
    Question(
        only_traffic,
        "The result is right, but these aren't the messages of a ring. Each rank should send p - 1 messages for the "
        "reduce-scatter and p - 1 messages for the all-gather, all of them to the same neighbor. Which of your "
        "messages are different?",
    ),
    Question(
        lambda d: "out" in d.names and not d.malformed,
        "Check the two halves separately. What does `ring_reduce_scatter` return on each rank for your tensor of "
        "shape [p, ..]? What does `ring_all_gather` return for the output of `ring_reduce_scatter`?",
    ),
)


def expect(case: Input, xs: Tensors, place: Place) -> Expected:
    """Expect every rank to return the sum, in the same shape as x."""
    p, rank, total = place.size, place.index, torch.stack(xs).sum(0)
    chunks = total.reshape(p, -1)
    mistakes = {
        _OWN: xs[rank],
        _FLAT: total.reshape(-1),
        _ROWS: chunks,
        _COLUMNS: total.reshape(-1, p).T.reshape(total.shape),
        _CHUNK: torch.stack([chunks[rank]] * p).reshape(total.shape),
    }
    right = {"out": total, "traffic": ring_traffic(place, 2 * (p - 1), total.numel() // p)}
    return Expected(right, {"out": mistakes} if p > 1 else {})


@exercise("1.3", "All-gather and all-reduce in a ring")
def all_gather_and_all_reduce(all_gather: Ring, all_reduce: Ring) -> Verdict:
    check_all_gather(all_gather)
    shapes = lambda p: ((4 * p, 3), (3, p, 2), (5 * p,))  # noqa: E731 (as short as an argument)
    check_ring("1.3", all_reduce, shapes, expect, _QUESTIONS, without=(), name="ring_all_reduce")
    return Verdict("In your all-reduce, each rank sent 2(p-1) messages, and each message contained 1/p of x.")
