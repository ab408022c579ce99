"""The check for the ring all-gather, which is the first half of exercise 1.3."""

import torch

from tplab.course.checks import Expected, Place, Question, kind_is
from tplab.course.exercises.ch01.rings import (
    COMMON,
    FAR,
    Input,
    Ring,
    Tensors,
    check_ring,
    only_traffic,
    ring_traffic,
)

_COPIES = "p copies of this rank's own chunk"
_ARRIVAL = "the chunks in the order they arrived, after this rank's own chunk"
_ARRIVAL_LAST = "the chunks in the order they arrived, before this rank's own chunk"
_FLAT = "the chunks concatenated, without a new dimension"
_SUM = "the sum of the chunks"
_NEIGHBOUR = "this rank's own chunk, and its left-hand neighbor's chunk everywhere else"

_QUESTIONS = (
    *COMMON,
    Question(
        kind_is("out", _ARRIVAL, _ARRIVAL_LAST, "order"),
        "All the chunks are there, but they're in the wrong order. On every rank, `result[i]` should be the chunk from "
        "rank i. Which rank's chunk arrives in step s? At which index should you store that chunk?",
    ),
    Question(
        kind_is("out", _COPIES),
        "Your result repeats the same chunk p times. Which tensor do you receive each chunk into? Does your list hold "
        "p different tensors?",
    ),
    Question(
        kind_is("out", _NEIGHBOUR),
        "The only chunk you ever receive is your left-hand neighbor's. After the first step, do you send your own "
        "chunk again or the chunk that just arrived?",
    ),
    Question(kind_is("out", _SUM), "You summed the chunks. What should an all-gather do with the chunks instead?"),
    Question(
        kind_is("out", _FLAT),
        "The values are right, but the result should have the shape [p, ..], with a new first dimension of size p. "
        "Which function adds a dimension, `torch.cat` or `torch.stack`?",
    ),
    Question(
        lambda d: d.kind("out") == "partly zero",
        "Some chunks never arrived. How many chunks is each rank missing at the beginning? How many chunks arrive in "
        "each step?",
    ),
    Question(
        lambda d: only_traffic(d) and d.p == 2,
        "The result is right, but each rank should send only p - 1 messages, with a single chunk in each message. "
        "Which chunks is your right-hand neighbor missing? How large is one chunk?",
    ),
    FAR,
    Question(
        lambda d: "out" in d.names and not d.malformed and d.kind("out") != "shape",
        "Make a table for p = 3, with one line per step. Which chunk does each rank send in each step? Which chunk "
        "does each rank receive? After the last step, every rank must have all the chunks in rank order.",
    ),
)


def expect(case: Input, xs: Tensors, place: Place) -> Expected:
    """Expect every rank to return the chunks of all ranks, stacked in rank order."""
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
        del mistakes[_NEIGHBOUR]  # with two ranks, this is the correct result
    right = {"out": gathered, "traffic": ring_traffic(place, p - 1, xs[rank].numel())}
    return Expected(right, {"out": mistakes} if p > 1 else {})


def check_all_gather(function: Ring) -> None:
    check_ring("1.3", function, lambda p: ((5,), (2, 3)), expect, _QUESTIONS, name="ring_all_gather")
