"""`make bench`: all ways compute the same, a wrong one is refused, and the tables compare within a round.

No test looks at a time that was measured.
"""

import pytest
from torch.nn import functional as F

from benchmarks import peers
from benchmarks.peers import ALONE
from tplab import launch
from tplab.runtime import RankError


def time_small() -> dict[str, list[tuple[float, float]]]:
    return peers.time_mlps(*peers.SMALL_SIZES, rounds=2)


def without_f(mlp):
    """An MLP that doesn't sum the gradient of x."""
    wrong = peers.with_tplab(mlp)
    wrong.up.forward = lambda x: F.linear(x, wrong.up.weight, wrong.up.bias)
    return wrong


def time_a_wrong_way() -> None:
    peers.MLPS["without f"] = without_f
    time_small()


def test_all_ways_compute_the_same_and_have_a_turn_in_each_round():
    for times in launch(time_small, 2, backend="gloo"):
        assert list(times) == ["tplab", "torch DTensor", ALONE]
        assert {len(each) for each in times.values()} == {2}


def test_a_way_with_another_gradient_is_refused():
    with pytest.raises(RankError, match="without f, x: "):
        launch(time_a_wrong_way, 2, backend="gloo")


def test_the_table_adds_up_ranks_and_compares_within_a_round():
    ours = [(1.0, 1.0), (2.0, 5.0), (3.0, 1.0)], [(0.5, 2.0), (0.5, 2.0), (0.5, 2.0)]
    other = [(3.0, 4.0), (2.5, 4.0), (7.0, 4.0)], [(0.0, 0.0)] * 3
    ranks = [{"ours": mine, "theirs": theirs} for mine, theirs in zip(ours, other, strict=True)]
    lines = peers.report(["an MLP"], *peers.of_all_ranks(ranks)).splitlines()
    rows = [line.split(" | ")[1:] for line in lines[2:]]
    # ours: 1500, 2500, 3500 ms on both ranks together; theirs 3000, 2500, 7000: 2, 1 and 2 times ours
    assert [row[:2] for row in rows] == [
        ["1500, **2500** (2000-3000)", "**1.00** (1.00-1.00)"],
        ["2500, **3000** (2750-5000)", "**2.00** (1.50-2.00)"],
    ]
    # of the slower rank: 2000, 5000, 2000 ms; theirs 4000 each
    assert rows[1][2:] == ["4000, **4000** (4000-4000)", "**2.00** (1.40-2.00) |"]
