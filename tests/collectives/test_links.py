"""`tplab.collectives.links`: the fit is tested on points of a known line, so that no measured time decides."""

import math
import random
from itertools import pairwise

import pytest
import torch.distributed as dist

from tests.tensor.on_ranks import refusals
from tplab import launch
from tplab.collectives.links import PUBLISHED, SIZES, Link, fit, measure_all_reduces, measure_link

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


def test_noise_of_ten_percent_leaves_both_within_ten_percent():
    for seed in range(20):
        link = fit(points(0.1, seed))
        assert link.alpha == pytest.approx(ALPHA, rel=0.1)
        assert link.beta == pytest.approx(BETA, rel=0.1)


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
        ([], "at least two sizes"),
        ([(8, 1e-6), (8, 2e-6)], r"at least two sizes, got \[8\]"),
        ([(8, 1e-6), (16, 0.0)], "must be positive, got 0"),
        ([(8, 2e-6), (16, 1e-6)], "don't take longer"),
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


def test_published_links_have_the_vendors_bandwidths_and_a_source():
    quoted = {  # GB/s in one direction, rounded as the vendors do
        "NVLink 5": 1800 / 2,
        "NVLink 4": 900 / 2,
        "NVLink 3": 600 / 2,
        "PCIe 5.0 x16": 63.0,
        "InfiniBand NDR": 400 / 8,
        "PCIe 4.0 x16": 31.5,
        "InfiniBand HDR": 200 / 8,
    }
    assert {name: round(link.bandwidth / 1e9, 1) for name, link in PUBLISHED.items()} == quoted
    assert all(link.alpha > 0 and link.source for link in PUBLISHED.values())
    assert all(one.bandwidth > other.bandwidth for one, other in pairwise(PUBLISHED.values()))


def _measured(sizes):
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return measure_link(sizes, rounds=3), refusals(lambda: measure_link(group=alone))


def test_a_link_is_measured_and_every_rank_has_the_points_and_one_rank_has_no_link():
    """What is measured is a property of the machine; here only that something was, and that it is the same for all."""
    sizes = (4, 1024, 65536)
    ran = launch(_measured, 3, args=(sizes,))
    measured = ran[0][0]
    assert [size for size, _ in measured] == list(sizes)
    assert all(0 < seconds < math.inf for _, seconds in measured)
    assert all(points == measured and "two ends" in refused for points, (refused,) in ran)
    sent = [c.bytes for c in ran.record.of_rank(0) if c.kind == "send"]
    assert sent == [size for size in sizes for _ in range(4)] * 3


def test_rings_and_trees_are_timed_and_every_rank_has_the_times():
    sizes = (48, 4800)
    measured = launch(measure_all_reduces, 3, args=(sizes,), kwargs={"rounds": 2})
    assert all(0 < seconds < math.inf for times in measured[0].values() for seconds in times)
    assert {way: len(times) for way, times in measured[0].items()} == {"ring": 2, "tree": 2}
    assert all(other == measured[0] for other in measured)
    by_tree = [c.bytes for c in measured.record.of_rank(2) if c.kind == "send" and c.bytes in sizes]
    assert by_tree == [48, 4800] * 2  # the last rank of a tree sends its full tensor once per all-reduce
