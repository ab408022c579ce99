"""The check for exercise 1.5: a line fitted to measured points, and the costs of ring and tree. Starts no ranks."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tplab.course.checks import (
    Differences,
    Question,
    Snapshot,
    Verdict,
    current,
    exercise,
    fail,
    fresh_generator,
    kind_is,
    verify,
)

Points = Sequence[tuple[int, float]]
Fit = Callable[[Points], tuple[float, float]]
Seconds = Callable[[float, int, float, float], float]

SIZES = [2**k for k in range(2, 27, 2)]  # 4 B to 64 MiB

_PLAIN = "what plain least squares gives, with absolute errors"
_SWAPPED = "the other of the two"
_BANDWIDTH = "the bandwidth, 1 / beta"
_ENDS = "what the line through the smallest and the largest message gives"
_SMALLEST = "the shortest of the times"
_ROOT = "what errors weighted by 1/sqrt(t) give: the sum of (..)²/t"
_NO_STEPS = "the cost of a single step"
_WHOLE = "the cost with whole messages of n bytes in each step"
_HALF = "half of the right one: one way only"
_ALPHA_ONCE = "the cost with alpha paid only once"
_P_STEPS = "the cost of 2p steps"
_CEIL = "the cost with log2(p) rounded down"
_EXACT = "the cost with log2(p) steps that are no whole number"
_PARTS = "the cost with messages of n/p bytes"
_LEVEL_MORE = "the cost with one level too many"


def both(kind: str) -> Callable[[Differences], bool]:
    """Return a predicate that tests whether both numbers come from the same wrong line."""
    return lambda d: d.kind("alpha in µs") == d.kind("beta in ps/byte") == kind


_FIT_QUESTIONS = (
    Question(
        lambda d: d.malformed,
        "Two numbers are wanted, alpha and beta, in this order. What does your last line return?",
    ),
    Question(
        lambda d: "nan" in d.kinds(),
        "What is divided by what? No time and no size in the points is zero.",
    ),
    Question(kind_is("alpha in µs", _SWAPPED), "Which of the two is the time of an empty message? It comes first."),
    Question(
        kind_is("beta in ps/byte", _BANDWIDTH), "beta is seconds for each byte. The bandwidth is bytes for each second."
    ),
    Question(
        both(_PLAIN),
        "This line minimises the absolute errors. The largest message takes many times as long as the smallest: "
        "whose error decides? By what do you divide the equation of a point, so that errors count relative to its "
        "time?",
    ),
    Question(
        both(_ROOT),
        "The relative error itself is squared: ((alpha + beta n - t) / t)². By which power of t did you divide each "
        "equation?",
    ),
    Question(
        kind_is("alpha in µs", _ENDS, _SMALLEST),
        "This uses one or two of the points, and their noise with them. What did the other points say?",
    ),
    Question(
        lambda d: True,
        "Divide both sides of alpha + beta n = t by t: every point gives one linear equation in alpha and beta, with "
        "1 on the right. torch.linalg.lstsq solves such a system; in float64, since sizes and times span many "
        "decades.",
    ),
)

_COST_QUESTIONS = (
    Question(
        lambda d: d.malformed,
        "A number of seconds is wanted. What does your last line return?",
    ),
    Question(lambda d: d.p == 1, "With one rank nothing is sent. How many steps does your formula count?"),
    Question(kind_is("ring", _WHOLE), "In a ring each message is one part. How many bytes has a p-th of n?"),
    Question(kind_is("tree", _PARTS), "Along a tree every message is the whole tensor. Is it cut anywhere?"),
    Question(
        lambda d: _ALPHA_ONCE in d.kinds(),
        "Every step is a message of its own, and every message costs alpha. How many steps are there?",
    ),
    Question(lambda d: _HALF in d.kinds(), "That is one way: up the tree, or once round the ring. And the way back?"),
    Question(lambda d: _NO_STEPS in d.kinds(), "That is one step. How many follow one another?"),
    Question(
        kind_is("ring", _P_STEPS),
        "A part has p - 1 steps to go until every rank has added its own. Which is one too many?",
    ),
    Question(
        kind_is("tree", _LEVEL_MORE),
        "That is one level too many. How often can you halve 8 ranks until one is left, and what does your formula say "
        "for p = 8?",
    ),
    Question(
        lambda d: bool({_CEIL, _EXACT} & d.kinds()),
        "For p = 5 the tree needs as many levels as for 8: the number of times that you can halve the ranks, rounded "
        "up.",
    ),
    Question(
        lambda d: True,
        "Count the steps that follow one another, and the bytes of the message in each. A message of m bytes takes "
        "alpha + beta·m.",
    ),
)


_CALLERS_LIST = (
    "The caller may still need the points in their order. Which line sorts or changes the list itself? sorted(points) "
    "makes a new one."
)


@exercise("1.5", "the cost of a message, of a ring and of a tree")
def costs(fit_line: Fit, ring_seconds: Seconds, tree_seconds: Seconds) -> Verdict:
    for _ in range(4):
        _check_fit(fit_line)
    _check_fit(fit_line, below_zero=True)
    current().passed.clear()  # a line has no p; from here on "right at p" is about the costs
    for p in (8, 5, 3, 2, 64, 1):
        _check_costs(ring_seconds, tree_seconds, p)
    return Verdict("Relative errors: small messages say what alpha is, large ones what beta is.")


def _check_fit(fit_line: Fit, below_zero: bool = False) -> None:
    """Fit a line to noisy points. Where `below_zero`, the best line has a negative alpha, as noise can make it."""
    generator = fresh_generator()
    draw = torch.rand(2 + len(SIZES), generator=generator, dtype=torch.float64)
    alpha, beta = 5e-6 * 20 ** float(draw[0]), 2e-11 * 20 ** float(draw[1])  # 5 to 100 us, 2.5 to 50 GB/s
    noise = (0.85 + 0.3 * draw[2:]).tolist()
    points = [(size, (alpha + beta * size) * factor) for size, factor in zip(SIZES, noise, strict=True)]
    if below_zero:
        points = [(size, beta * size * (1 + place / len(SIZES))) for place, size in enumerate(SIZES)]
    given = points[::-1]
    before = Snapshot(points=given)
    right = weighted(points, 1.0)
    found = fit_line(given)
    if before.changed():
        fail("1.5", "fit_line changes the list of points that it is given.", _CALLERS_LIST)
    pair = isinstance(found, (tuple, list, Tensor)) and len(found) == 2
    one, two = (_number(found[0], 1e6), _number(found[1], 1e12)) if pair else (found, found)
    ends = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    (plain, root) = (weighted(points, power) for power in (0.0, 0.5))
    verify(
        "1.5",
        1,
        [{"alpha in µs": one, "beta in ps/byte": two}],
        [{"alpha in µs": _number(right[0], 1e6), "beta in ps/byte": _number(right[1], 1e12)}],
        questions=_FIT_QUESTIONS,
        lookalikes={
            "alpha in µs": {
                _PLAIN: [_number(plain[0], 1e6)],
                _SWAPPED: [_number(right[1], 1e6)],
                _SMALLEST: [_number(min(seconds for _, seconds in points), 1e6)],
                _ENDS: [_number(points[0][1] - ends * points[0][0], 1e6)],
                _ROOT: [_number(root[0], 1e6)],
            },
            "beta in ps/byte": {
                _BANDWIDTH: [_number(1 / right[1], 1e12)],
                _PLAIN: [_number(plain[1], 1e12)],
                _ENDS: [_number(ends, 1e12)],
                _ROOT: [_number(root[1], 1e12)],
            },
        },
        tol=1e-5,  # so that no other line is mistaken for one of these by chance
        note="fit_line" + " with points whose best line starts below zero" * below_zero,
        alone=True,
    )


def weighted(points: Points, power: float) -> tuple[float, float]:
    """Find alpha and beta that minimize the sum of ((alpha + beta n - t) / t^power)², by Cramer's rule in float64."""
    weights = [seconds ** (-2 * power) for _, seconds in points]

    def total(*factors: Sequence[float]) -> float:
        return math.fsum(math.prod(values) for values in zip(weights, *factors, strict=True))

    n, t = [float(size) for size, _ in points], [seconds for _, seconds in points]
    s, sn, snn, st, snt = total(), total(n), total(n, n), total(t), total(n, t)
    determinant = s * snn - sn * sn
    return (st * snn - sn * snt) / determinant, (s * snt - sn * st) / determinant


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
            "1.5",
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
