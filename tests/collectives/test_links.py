"""`tplab.collectives.links`: the fit is tested on points of a known line, so that no measured time decides."""

import math
import random

import pytest

from tests import saying
from tplab import launch, record
from tplab.collectives.links import SIZES, Link, fit, measure_all_reduces, measure_link

ALPHA, BETA = 20e-6, 1 / 3e9


def points(noise: float = 0.0, seed: int = 0, alpha: float = ALPHA) -> list[tuple[int, float]]:
    generator = random.Random(seed)
    return [(size, (alpha + BETA * size) * generator.uniform(1 - noise, 1 + noise)) for size in SIZES]


def test_the_fit_finds_the_line_that_points_lie_on():
    link = fit(points())
    assert link.alpha == pytest.approx(ALPHA, rel=1e-9)
    assert link.beta == pytest.approx(BETA, rel=1e-9)
    assert link.bandwidth == pytest.approx(3e9)
    assert link.seconds(60_000) == pytest.approx(2 * ALPHA)


def test_the_fit_is_the_minimum_of_the_relative_errors():
    noisy = points(0.3, 7)
    link = fit(noisy)

    def loss(alpha: float, beta: float) -> float:
        return sum(((alpha + beta * size - seconds) / seconds) ** 2 for size, seconds in noisy)

    least = loss(link.alpha, link.beta)
    for a, b in ((1.001, 1), (0.999, 1), (1, 1.001), (1, 0.999), (1.001, 0.999)):
        assert loss(link.alpha * a, link.beta * b) > least


def test_alpha_is_never_negative():
    bent = [(1000, 1e-6), (2000, 4e-6), (4000, 16e-6)]
    link = fit(bent)
    assert link.alpha == 0
    assert link.beta == pytest.approx(sum(n / t for n, t in bent) / sum((n / t) ** 2 for n, t in bent))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([(8, 1e-6), (8, 2e-6)], saying("[8]")),
        ([(8, 2e-6), (16, 1e-6)], saying("beta=")),
    ],
)
def test_points_without_a_line_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        fit(wrong)


def test_costs_are_the_formulas_of_the_books():
    link = Link(2e-6, 1e-9)
    assert link.ring_all_reduce(8e6, 8) == pytest.approx(14 * (2e-6 + 1e-9 * 1e6))
    assert link.tree_all_reduce(8e6, 8) == pytest.approx(6 * (2e-6 + 1e-9 * 8e6))
    assert link.tree_all_reduce(8e6, 5) == link.tree_all_reduce(8e6, 8)
    assert link.ring_all_reduce(8e6, 1) == link.tree_all_reduce(8e6, 1) == 0
    assert link.tree_all_reduce(8, 64) < link.ring_all_reduce(8, 64)
    assert link.ring_all_reduce(8e8, 64) < link.tree_all_reduce(8e8, 64)


SMALL_SIZES, SUMS = (4, 1024, 65536), (48, 4800)


def _measured():
    with record() as messages:
        points = measure_link(SMALL_SIZES, rounds=3)
    with record() as sums:
        times = measure_all_reduces(SUMS, rounds=2)
    sent = [[call.bytes for call in section if call.kind == "send"] for section in (messages, sums)]
    return points, times, sent


def test_links_rings_and_trees_are_measured_and_every_rank_has_the_same_numbers():
    """What is measured is a property of the machine; here only that something was, and that it is the same for all."""
    ran = launch(_measured, 3)
    points, times, (sent, _) = ran[0]
    assert sent == [size for size in SMALL_SIZES for _ in range(4)] * 3
    assert [size for size in ran[2][2][1] if size in SUMS] == [48, 4800] * 2  # the last rank of a tree sends all of it
    assert [size for size, _ in points] == list(SMALL_SIZES)
    assert all(0 < seconds < math.inf for _, seconds in points)
    assert {way: len(seconds) for way, seconds in times.items()} == {"ring": 2, "tree": 2}
    assert all(0 < seconds < math.inf for way in times.values() for seconds in way)
    for of_rank in ran:
        assert of_rank[:2] == (points, times)
