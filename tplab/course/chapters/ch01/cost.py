"""The check for exercise 1.4: the costs of ring and tree, and from which size on the ring wins. Starts no ranks."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tplab.course.checks import Question, Verdict, calling, exercise, kind_is, verify

Seconds = Callable[[float, int, float, float], float]
Crossover = Callable[[int, float, float], float]

_NO_STEPS = "the cost of a single step"
_WHOLE = "the cost with messages of n bytes in each step"
_HALF = "half of the right one"
_ALPHA_ONCE = "the cost with alpha paid only once"
_P_STEPS = "the cost of 2p steps"
_CEIL = "the cost with log2(p) rounded down"
_EXACT = "the cost with log2(p) steps, which isn't a whole number"
_PARTS = "the cost with messages of n/p bytes"
_LEVEL_MORE = "the cost with one level too many"
_BEND = "the size at which latency and bandwidth cost the same, alpha / beta"
_INVERSE = "the inverse of the right size"
_NEGATIVE = "the right size with the wrong sign"

_COST_QUESTIONS = (
    Question(
        lambda d: d.malformed,
        "The result should be a number. What does your last line return?",
    ),
    Question(lambda d: d.p == 1, "With a single rank, nothing is sent at all. How many steps does your formula count?"),
    Question(
        kind_is("ring", _WHOLE), "In a ring, each message contains just one of the p parts. How many bytes is that?"
    ),
    Question(kind_is("tree", _PARTS), "Along a tree, every message is the full tensor. Why do you divide it?"),
    Question(
        lambda d: _ALPHA_ONCE in d.kinds(),
        "Every step is a separate message, and every message costs alpha. How many steps are there?",
    ),
    Question(
        lambda d: _HALF in d.kinds(),
        "You only counted one way, up the tree or once around the ring. What about the way back?",
    ),
    Question(lambda d: _NO_STEPS in d.kinds(), "This is the time of a single step. How many steps follow one another?"),
    Question(
        kind_is("ring", _P_STEPS),
        "A part needs p - 1 steps until every rank has added its own. Which step did you count in addition?",
    ),
    Question(
        kind_is("tree", _LEVEL_MORE),
        "You have one level too many. How often can you halve 8 ranks until one is left, and what does your formula "
        "say for "
        "p = 8?",
    ),
    Question(
        lambda d: bool({_CEIL, _EXACT} & d.kinds()),
        "The number of levels is how often you can halve the ranks, rounded up. For p = 5, that's as many as for p = "
        "8. What "
        "does your formula give for 5?",
    ),
    Question(
        lambda d: True,
        "Count the steps that follow one another, and the bytes of the message in each of them. A message of m bytes "
        "takes "
        "alpha + beta·m. How many steps do you count?",
    ),
)


_CROSSOVER_QUESTIONS = (
    Question(lambda d: d.malformed, "The result should be a number of bytes. What does your last line return?"),
    Question(
        lambda d: d.p <= 3,
        "With up to three ranks, ring and tree take the same number of steps, and the ring's messages are smaller. "
        "From "
        "which size on does the ring win then?",
    ),
    Question(
        kind_is("bytes", _BEND),
        "This is where the latency and the bandwidth of a *single* message cost the same. At the crossover, the whole "
        "ring and the whole tree take the same time. What do you get if you set the two formulas equal?",
    ),
    Question(
        kind_is("bytes", _NEGATIVE),
        "A size can't be negative. When you solve for n, which of the two sides has more steps, and which has more "
        "bytes?",
    ),
    Question(kind_is("bytes", _INVERSE), "You have the inverse. Does the crossover grow with alpha or with beta?"),
    Question(
        lambda d: "zeros" in d.kinds(),
        "With this many ranks, the ring takes more steps than the tree, so it can't win for an empty message. How "
        "many steps "
        "does each of them take?",
    ),
    Question(
        lambda d: True,
        "Set ring_seconds equal to tree_seconds and solve for n. Then put your n into both functions. Do they return "
        "the "
        "same time?",
    ),
)


@exercise("1.4", "the cost of a ring and of a tree")
def costs(ring_seconds: Seconds, tree_seconds: Seconds, ring_wins_from: Crossover) -> Verdict:
    for p in (8, 5, 3, 2, 64, 1):
        _check_costs(ring_seconds, tree_seconds, p)
    for p in (8, 5, 4, 64, 512, 3, 2, 1):
        _check_crossover(ring_wins_from, p)
    return Verdict("Small messages are all about latency, large ones are all about bandwidth.")


def _check_crossover(ring_wins_from: Crossover, p: int) -> None:
    """Compare with the size at which the two costs cross, which is found by halving an interval."""
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
        with calling(f"ring_wins_from({p}, alpha={alpha:g}, beta={beta:g})"):
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
        part, whole = alpha + beta * n / p, alpha + beta * n
        ring, tree = 2 * (p - 1) * part, 2 * depth * whole
        found = {"ring": ring_seconds(n, p, alpha, beta), "tree": tree_seconds(n, p, alpha, beta)}
        ring_ways = {
            _WHOLE: 2 * (p - 1) * whole,
            _HALF: ring / 2,
            _NO_STEPS: part,
            _ALPHA_ONCE: alpha + 2 * (p - 1) * beta * n / p,
            _P_STEPS: 2 * p * part,
        }
        tree_ways = {
            _PARTS: 2 * depth * part,
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
    """Return a float64 tensor of value times unit. Anything that isn't a number is returned unchanged."""
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return torch.as_tensor(value, dtype=torch.float64).detach().reshape(()) * unit
    return value
