"""`make bench`: all ways compute the same, a wrong one is refused, and the tables compare within a round.

No test looks at a time that was measured.
"""

import pytest
from torch.nn import functional as F

from benchmarks import launch as launches
from benchmarks import layers
from benchmarks.layers import ALONE, OURS, Times
from tplab import launch
from tplab.runtime import RankError


def measure_small() -> dict[str, Times]:
    return layers.measure(layers.SMALL_TOKENS, layers.SMALL_HIDDEN, rounds=2)


def without_f(mlp):
    """An MLP that doesn't sum the gradient of x."""
    wrong = layers.with_tplab(mlp)
    wrong.up.forward = lambda x: F.linear(x, wrong.up.weight, wrong.up.bias)
    return wrong


def measure_a_wrong_way() -> None:
    layers.WAYS["without f"] = without_f
    measure_small()


def test_all_ways_compute_the_same_and_have_a_turn_in_each_round():
    for times in launch(measure_small, 2, backend="gloo"):
        assert list(times) == [OURS, "torch DTensor", ALONE]
        assert {len(values) for one in times.values() for values in (one.cpu, one.wall)} == {2}


def test_a_way_with_another_gradient_is_refused():
    with pytest.raises(RankError, match="without f, x: "):
        launch(measure_a_wrong_way, 2, backend="gloo")


def test_the_table_adds_up_ranks_and_compares_within_a_round():
    ours = Times([1.0, 2.0, 3.0], [1.0, 5.0, 1.0]), Times([0.5, 0.5, 0.5], [2.0, 2.0, 2.0])
    other = Times([3.0, 2.5, 7.0], [4.0, 4.0, 4.0]), Times([0.0] * 3, [0.0] * 3)
    ranks = [{OURS: mine, "theirs": theirs} for mine, theirs in zip(ours, other, strict=True)]
    rows = [line.split(" | ")[1:] for line in layers.report(ranks).splitlines()[2:]]
    # ours: 1500, 2500, 3500 ms on both ranks together; theirs 3000, 2500, 7000: 2, 1 and 2 times ours
    assert [row[:2] for row in rows] == [
        ["1500, **2500** (2000-3000)", "**1.00** (1.00-1.00)"],
        ["2500, **3000** (2750-5000)", "**2.00** (1.50-2.00)"],
    ]
    # of the slower rank: 2000, 5000, 2000 ms; theirs 4000 each
    assert rows[1][2:] == ["4000, **4000** (4000-4000)", "**2.00** (1.40-2.00) |"]


def test_launches_take_turns(monkeypatch):
    launched = []
    ways = {name: lambda p, name=name: launched.append((name, p)) for name in launches.WAYS}
    monkeypatch.setattr(launches, "WAYS", ways)
    times = launches.measure([2, 4], 3)
    assert {len(seconds) for one in times.values() for seconds in one.values()} == {3}
    assert sorted(launched) == sorted((name, p) for name in ways for p in (2, 4) for _ in range(1 + 3))
    assert len(launches.report(times).splitlines()) == 2 + 4
