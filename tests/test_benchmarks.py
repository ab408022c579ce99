"""`make bench`: every way computes the same, a wrong one is refused, and the tables say what was measured.

No test looks at a time that was measured.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from benchmarks import blocks, heads, ways
from benchmarks.layers import LAYERS, Outcome, measure, peak_bytes, report, sent_in_a_ring
from tplab import launch
from tplab.runtime import Collective, RankError, Record

P = 2


def run(name, only=None):
    problem, chosen, small = LAYERS[name]
    return measure(partial(problem, **small), only or chosen, rounds=2)[1]


def three_of_2_mb():
    first = torch.zeros(1_000_000)
    del first
    second = torch.zeros(500_000)
    return second + torch.ones(500_000)


def measure_everything():
    return {name: run(name) for name in LAYERS} | {"peak": peak_bytes(three_of_2_mb)}


@pytest.fixture(scope="module")
def ranks():
    """What each rank measured, without the libraries that are missing."""
    found = list(launch(measure_everything, P, backend="gloo"))
    for outcomes in (seen[name] for seen in found for name in LAYERS):
        for name in [name for name, outcome in outcomes.items() if outcome.absent]:
            assert "megatron" in outcomes.pop(name).absent
    return found


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_layers_agree_and_send_two_all_reduces_of_x(ranks, name):
    x_bytes = 4 * blocks.SMALL["tokens"] * blocks.SMALL["hidden"]
    for outcomes in (dict(seen[name]) for seen in ranks):
        alone = outcomes.pop("one process, as many threads")
        assert (alone.collectives, alone.sent) == (0, 0)
        assert {"tplab", "hand-written minimum", "torch DTensor"} <= set(outcomes)
        for way, outcome in outcomes.items():
            assert (outcome.collectives, outcome.sent) == (2, 2 * 2 * (P - 1) * x_bytes // P), way
            assert outcome.peak > x_bytes, way  # the gradient of x, at least


def test_losses_agree_and_ours_send_and_hold_least(ranks):
    tokens, vocabulary = heads.SMALL["tokens"], heads.SMALL["vocabulary"]
    dx = 4 * tokens * heads.SMALL["hidden"]  # in backward, all ways sum the gradient of x
    for outcomes in (seen["head"] for seen in ranks):
        sent = {name: outcome.sent - dx for name, outcome in outcomes.items()}
        assert sent.pop("one process, as many threads") == -dx
        assert sent.pop("naive: gather the logits") == 4 * tokens * vocabulary // P
        assert {sent.pop(name) for name in ("tplab", "tplab, fused")} == {4 * (2 * tokens + 1)}
        assert set(sent.values()) == {4 * 3 * tokens}
        peaks = {name: outcome.peak for name, outcome in outcomes.items()}
        assert peaks["tplab, fused"] < peaks["hand-written minimum"] < peaks["naive: gather the logits"]


def test_the_peak_counts_what_lives_at_once(ranks):
    assert all(6_000_000 <= seen["peak"] < 6_010_000 for seen in ranks)


def without_f(block):
    mine = ways.parameters(block, block.cut)

    def forward(x):
        y = F.gelu(F.linear(x, mine["first"], mine["first_bias"]))
        return ways.SumUp.apply(F.linear(y, mine["last"])) + mine["last_bias"]

    return ways.Way(forward, mine, block.cut)


def parameter_forgotten(block):
    right = blocks.by_hand(block)
    return replace(right, forward=lambda x: right.forward(x.detach()))


@pytest.mark.parametrize(
    ("wrong", "said"), [(without_f, "a wrong way, x: "), (parameter_forgotten, "no gradient reached")]
)
def test_a_way_that_computes_something_else_is_refused(wrong, said):
    with pytest.raises(RankError, match=said):
        launch(run, P, args=("mlp", {"a wrong way": wrong}), backend="gloo")


def test_the_table_adds_up_ranks_and_compares_within_a_round():
    first = [Outcome([1.0, 2.0, 3.0], [1.0, 5.0, 1.0], 80, 2, 3_000_000), Outcome([0.5, 0.5, 0.5], [2.0, 2.0, 2.0])]
    other = [Outcome([3.0, 2.5, 7.0], [4.0, 4.0, 4.0], 1600, 3, 5_250_000), Outcome([0.0] * 3, [0.0] * 3)]
    missing = Outcome(absent="No module named 'missing'")
    results = [{"ours": mine, "theirs": theirs, "none": missing} for mine, theirs in zip(first, other, strict=True)]
    rows = report("a layer", results).splitlines()
    assert rows[0].startswith("| a layer | CPU ms")
    # ours: 1500, 2500, 3500 ms on both ranks together; theirs 3000, 2500, 7000: 2, 1 and 2 times ours
    assert rows[2:] == [
        "| ours | 1500, **2500** (2000-3000) | **1.00** (1.00-1.00) | 2000, 2000 | 2 | 80 | 3.00 |",
        "| theirs | 2500, **3000** (2750-5000) | **2.00** (1.50-2.00) | 4000, 4000 | 3 | 1,600 | 5.25 |",
        "| none | not installed |  |  |  |  |  |",
    ]


def test_bytes_sent_are_those_of_a_ring():
    def entered(kind, size, ranks):
        return Collective(0, kind, tuple(range(ranks)), 1, (size,), "uint8", size, None, None, "", 0.0, 0.0)

    assert sent_in_a_ring(Record([entered("all_reduce", 600, 3)])) == 800
    assert sent_in_a_ring(Record([entered("all_gather", 600, 3), entered("reduce_scatter", 60, 2)])) == 430
