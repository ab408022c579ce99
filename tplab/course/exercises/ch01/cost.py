"""The check for exercise 1.4: the costs of a ring and a tree, and the message size from which the ring is faster.

The check only evaluates formulas, so it doesn't start any ranks.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tplab.course.checks import Question, Verdict, calling, exercise, kind_is, verify

Seconds = Callable[[float, int, float, float], float]
Crossover = Callable[[int, float, float], float]

_NO_STEPS = "the cost of a single step"
_WHOLE = "the cost with messages of n bytes in each step"
_HALF = "half of the correct cost"
_ALPHA_ONCE = "the cost with alpha paid only once"
_P_STEPS = "the cost of 2p steps"
_CEIL = "the cost with log2(p) rounded down"
_EXACT = "the cost with log2(p) levels, which isn't a whole number"
_CHUNKS = "the cost with messages of n/p bytes"
_LEVEL_MORE = "the cost with one level too many"
_BEND = "the size at which latency and transfer take the same time, alpha / beta"
_INVERSE = "the inverse of the correct size"
_NEGATIVE = "the correct size with the wrong sign"

_ALONE = (
    "Your code fails only for p = 1. With a single rank, nothing is sent at all, so all three functions "
    "should return 0. Which expression in your formula can't be computed for p = 1?"
)

_COST_QUESTIONS = (
    Question(
        lambda d: d.malformed,
        "The result should be a number. What does your last line return?",
    ),
    Question(
        lambda d: d.p == 1,
        "With a single rank, nothing is sent at all, so the time should be 0 for p = 1. How many steps does your "
        "formula give for p = 1?",
    ),
    Question(
        kind_is("ring", _WHOLE), "In a ring, each message contains just one of the p chunks. How many bytes is that?"
    ),
    Question(
        kind_is("tree", _CHUNKS),
        "In a tree, every message contains the full tensor. Why does your formula divide the message size by p?",
    ),
    Question(
        lambda d: _ALPHA_ONCE in d.kinds(),
        "Every step is a separate message, and every message costs alpha. How many steps are there?",
    ),
    Question(
        lambda d: _HALF in d.kinds(),
        "You counted only half of the steps. In a ring, the chunks travel around the circle twice. In a tree, the "
        "tensors move up to rank 0, and then the sum moves back down. Which half is missing from your formula?",
    ),
    Question(
        lambda d: _NO_STEPS in d.kinds(),
        "Your result is the time for a single step. How many sequential steps are there?",
    ),
    Question(
        kind_is("ring", _P_STEPS),
        "After p - 1 steps, each chunk already contains every rank's values. Which extra step did you count?",
    ),
    Question(
        kind_is("tree", _LEVEL_MORE),
        "Your tree has one level too many. How many times can you halve 8 ranks before only one is left? How many "
        "levels does your formula give for p = 8?",
    ),
    Question(
        lambda d: bool({_CEIL, _EXACT} & d.kinds()),
        "The number of levels is log2(p), rounded up to a whole number. So for p = 5, the tree has the same number "
        "of levels as for p = 8. How many levels does your formula give for p = 5?",
    ),
    Question(
        lambda d: True,
        "Count the sequential steps and the bytes in each message. A message of m bytes takes alpha + beta·m seconds. "
        "What's the total time over all the steps?",
    ),
)


_CROSSOVER_QUESTIONS = (
    Question(lambda d: d.malformed, "The result should be a number of bytes. What does your last line return?"),
    Question(
        lambda d: d.p <= 3,
        "With up to three ranks, the ring and the tree take the same number of steps, and the ring's messages are "
        "smaller. At what message size does the ring start to win?",
    ),
    Question(
        kind_is("bytes", _BEND),
        "At the size you returned, a *single* message spends as much time on latency as on transfer. At the "
        "crossover, the full ring all-reduce takes the same time as the full tree all-reduce. What do you get if you "
        "set the two formulas equal?",
    ),
    Question(
        kind_is("bytes", _NEGATIVE),
        "A message size can't be negative. Which algorithm takes more steps, and which algorithm has larger "
        "messages? After you set the two times equal, check every sign.",
    ),
    Question(
        kind_is("bytes", _INVERSE),
        "You returned the inverse of the correct size. Does the crossover move to larger messages when alpha grows "
        "or when beta grows?",
    ),
    Question(
        lambda d: "zeros" in d.kinds(),
        "With this many ranks, the ring takes more steps than the tree, so the tree is faster for very small "
        "messages. How many steps does each algorithm take?",
    ),
    Question(
        lambda d: True,
        "Set `ring_seconds` equal to `tree_seconds` and solve for n. Then pass your n to both functions. Do the two "
        "functions predict the same time?",
    ),
)


@exercise("1.4", "Ring or tree?")
def costs(ring_seconds: Seconds, tree_seconds: Seconds, ring_wins_from: Crossover) -> Verdict:
    for p in (8, 5, 3, 2, 64, 1):
        _check_costs(ring_seconds, tree_seconds, p)
    for p in (8, 5, 4, 64, 512, 3, 2, 1):
        _check_crossover(ring_wins_from, p)
    return Verdict("Small messages are all about latency, and large messages are all about bandwidth.")


def _check_crossover(ring_wins_from: Crossover, p: int) -> None:
    """Compare the learner's answer with the message size at which both costs are equal, which we find by bisection."""
    depth = (p - 1).bit_length()
    for alpha, beta in ((2e-5, 1e-10), (3e-6, 2e-11), (0.5, 2.0)):

        def ring_is_slower(n: float, alpha: float = alpha, beta: float = beta) -> bool:
            ring, tree = (p - 1) * (alpha + beta * n / p), depth * (alpha + beta * n)
            return ring > tree * (1 + 1e-15)

        low, high = 0.0, 1e15
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if ring_is_slower(middle) else (low, middle)
        right = high if ring_is_slower(0.0) else 0.0
        with calling(f"ring_wins_from({p}, alpha={alpha:g}, beta={beta:g})", _ALONE if p == 1 else None):
            found = ring_wins_from(p, alpha, beta)
        ways = {_BEND: alpha / beta, _INVERSE: 1 / right, _NEGATIVE: -right} if right else {}
        verify(
            "1.4",
            p,
            [{"bytes": _number(found, 1.0)}],
            [{"bytes": _number(right, 1.0)}],
            questions=_CROSSOVER_QUESTIONS,
            lookalikes={"bytes": {label: [_number(value, 1.0)] for label, value in ways.items()}},
            tol=1e-6,
            note=f"ring_wins_from with alpha = {alpha:g} and beta = {beta:g}",
            alone=True,
        )


def _check_costs(ring_seconds: Seconds, tree_seconds: Seconds, p: int) -> None:
    depth = (p - 1).bit_length()
    for n, alpha, beta in ((3.0e6, 2e-5, 1e-10), (64.0, 3e-6, 2e-11), (5e8, 1e-5, 4e-11)):
        chunk, whole = alpha + beta * n / p, alpha + beta * n
        ring, tree = 2 * (p - 1) * chunk, 2 * depth * whole
        with calling(f"ring_seconds or tree_seconds({n:g}, {p}, {alpha:g}, {beta:g})", _ALONE if p == 1 else None):
            found = {"ring": ring_seconds(n, p, alpha, beta), "tree": tree_seconds(n, p, alpha, beta)}
        ring_ways = {
            _WHOLE: 2 * (p - 1) * whole,
            _HALF: ring / 2,
            _NO_STEPS: chunk,
            _ALPHA_ONCE: alpha + 2 * (p - 1) * beta * n / p,
            _P_STEPS: 2 * p * chunk,
        }
        tree_ways = {
            _CHUNKS: 2 * depth * chunk,
            _HALF: tree / 2,
            _NO_STEPS: whole,
            _ALPHA_ONCE: alpha + 2 * depth * beta * n,
            _CEIL: 2 * (p.bit_length() - 1) * whole,
            _EXACT: 2 * math.log2(p) * whole,
            _LEVEL_MORE: 2 * (depth + 1) * whole,
        }
        verify(
            "1.4",
            p,
            [{name: _number(value, 1e6) for name, value in found.items()}],
            [{"ring": _number(ring, 1e6), "tree": _number(tree, 1e6)}],
            questions=_COST_QUESTIONS,
            lookalikes={
                "ring": {label: [_number(value, 1e6)] for label, value in ring_ways.items()},
                "tree": {label: [_number(value, 1e6)] for label, value in tree_ways.items()},
            }
            if p > 1
            else {},
            tol=1e-6,
            note=f"microseconds for n = {n:g} bytes",
            alone=True,
        )


def _number(value: object, unit: float) -> object:
    """Return value times unit as a float64 tensor. If the value isn't a number, return it unchanged."""
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return torch.as_tensor(value, dtype=torch.float64).detach().reshape(()) * unit
    return value
