"""`make bench`: all ways compute the same, a wrong one is refused, and the tables compare within a round.

No test looks at a time that was measured.
"""

import pytest
from torch.nn import functional as F

from benchmarks import peers
from benchmarks.peers import ALONE
from benchmarks.turns import timed
from tests import saying
from tplab import launch
from tplab.runtime import RankError


def time_small() -> dict[str, list[float]]:
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
    with pytest.raises(RankError, match=saying("without f", "dx")):
        launch(time_a_wrong_way, 2, backend="gloo")


def test_every_way_has_a_turn_in_each_round_in_another_order():
    had: list[str] = []
    times = timed({name: lambda name=name: had.append(name) for name in "abc"}, 8, clock=lambda: float(len(had)))
    assert times == {name: [1.0] * 8 for name in "abc"}
    rounds = ["".join(had[start : start + 3]) for start in range(0, 24, 3)]
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len(set(rounds)) > 2


def test_the_table_compares_within_a_round():
    rows = peers.report("an MLP", {"ours": [1.5, 2.5, 3.5], "theirs": [3.0, 2.5, 7.0]}).splitlines()[2:]
    assert rows == [  # theirs takes 2, 1 and 2 times as long
        "| ours | 1500, **2500** (2000-3000) | **1.00** (1.00-1.00) |",
        "| theirs | 2500, **3000** (2750-5000) | **2.00** (1.50-2.00) |",
    ]
