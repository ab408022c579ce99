"""`benchmarks.layers`: every way computes the same, a wrong one is refused, and the table says what was measured.

No test looks at a time that was measured.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from benchmarks import attentions, implementations, lm_heads, losses, mlps, step
from benchmarks.layers import Outcome, measure, peak_bytes, sent_in_a_ring, table
from tplab import launch
from tplab.runtime import Collective, RankError, Record

PEERS = {"Megatron-Core": "megatron", "fairscale": "fairscale"}  # they may be missing


def run(module, p, **changes):
    chosen = module.WAYS | changes
    results = launch(measure, p, args=(partial(module.problem, **module.SMALL), chosen, 2), backend="gloo")
    outcomes = [found for _, found in results]
    for name, outcome in outcomes[0].items():
        if outcome.absent:
            assert PEERS[name] in outcome.absent
        else:
            assert len(outcome.cpu) == len(outcome.wall) == 2
    return [{name: outcome for name, outcome in found.items() if not outcome.absent} for found in outcomes]


@pytest.mark.parametrize(("module", "p"), [(mlps, 4), (attentions, 2)], ids=["mlp", "attention"])
def test_layers_agree_and_send_two_all_reduces_of_x(module, p):
    x_bytes = 4 * module.SMALL["tokens"] * module.SMALL["hidden"]
    for outcomes in run(module, p):
        alone = outcomes.pop("one process, as many threads")
        assert (alone.collectives, alone.sent) == (0, 0)
        assert {"tplab", "hand-written minimum", "torch DTensor"} <= set(outcomes)
        for name, outcome in outcomes.items():
            assert (outcome.collectives, outcome.sent) == (2, 2 * 2 * (p - 1) * x_bytes // p), name
            assert outcome.peak > x_bytes, name  # the gradient of x, at least


@pytest.mark.parametrize("module", [lm_heads, losses], ids=["head", "loss"])
def test_losses_agree_and_ours_send_least(module):
    tokens, vocabulary, p = module.SMALL["tokens"], module.SMALL["vocabulary"], 2
    dx = 4 * tokens * module.SMALL["hidden"] if module is lm_heads else 0  # the LM head's backward adds them up
    for outcomes in run(module, p):
        sent = {name: outcome.sent - dx for name, outcome in outcomes.items()}
        assert sent.pop("one process, as many threads") == -dx
        assert sent.pop("naive: gather the logits") == 4 * tokens * vocabulary // p
        for name in [name for name in sent if name.startswith("tplab")]:
            assert sent.pop(name) == 4 * (2 * tokens + 1), name
        assert set(sent.values()) == {4 * 3 * tokens}
        peaks = {name: outcome.peak for name, outcome in outcomes.items()}
        assert peaks["tplab, overwrite_logits"] < peaks["hand-written minimum"] < peaks["naive: gather the logits"]


def without_f(problem):
    mine = implementations.parameters(problem, mlps.CUT)

    def forward(x):
        y = F.gelu(F.linear(x, mine["up"], mine["up_bias"]))
        return implementations.SumUp.apply(F.linear(y, mine["down"])) + mine["down_bias"]

    return implementations.Way(forward, mine, mlps.CUT)


def parameter_forgotten(problem):
    right = mlps.by_hand(problem)
    return replace(right, forward=lambda x: right.forward(x.detach()))


@pytest.mark.parametrize(
    ("wrong", "said"), [(without_f, "a wrong way, x: "), (parameter_forgotten, "no gradient reached")]
)
def test_a_way_that_computes_something_else_is_refused(wrong, said):
    with pytest.raises(RankError, match=said):
        run(mlps, 2, **{"a wrong way": wrong})


def test_the_table_adds_up_ranks_and_compares_within_a_round():
    first = [Outcome([1.0, 2.0, 3.0], [1.0, 5.0, 1.0], 80, 2, 3_000_000), Outcome([0.5, 0.5, 0.5], [2.0, 2.0, 2.0])]
    other = [Outcome([3.0, 2.5, 7.0], [4.0, 4.0, 4.0], 1600, 3, 5_250_000), Outcome([0.0] * 3, [0.0] * 3)]
    missing = Outcome(absent="No module named 'missing'")
    results = [{"ours": mine, "theirs": theirs, "none": missing} for mine, theirs in zip(first, other, strict=True)]
    rows = table("a layer", results).splitlines()
    assert rows[0].startswith("| a layer | CPU ms")
    # ours: 1500, 2500, 3500 ms on both ranks together; theirs 3000, 2500, 7000: 2, 1 and 2 times ours
    assert rows[2:] == [
        "| ours | 1500, **2500** (2000-3000) | **1.00** (1.00-1.00) | 2000, 2000 | 2 | 80 | 3.00 |",
        "| theirs | 2500, **3000** (2750-5000) | **2.00** (1.50-2.00) | 4000, 4000 | 3 | 1,600 | 5.25 |",
        "| none | not installed | | | | | |",
    ]


def test_bytes_sent_are_those_of_a_ring():
    def entered(kind, size, ranks):
        return Collective(0, kind, tuple(range(ranks)), 1, (size,), "uint8", size, None, None, "", 0.0, 0.0)

    assert sent_in_a_ring(Record([entered("all_reduce", 600, 3)])) == 800
    assert sent_in_a_ring(Record([entered("all_gather", 600, 3), entered("reduce_scatter", 60, 2)])) == 430
    with pytest.raises(KeyError, match="broadcast"):
        sent_in_a_ring(Record([entered("broadcast", 600, 3)]))


def test_the_peak_counts_what_lives_at_once():
    def step():
        first = torch.zeros(1_000_000)
        del first
        second = torch.zeros(500_000)
        return second + torch.ones(500_000)  # three of 2 MB

    assert 6_000_000 <= peak_bytes(step) < 6_010_000


def tiny_steps(ways, **changes):
    settings = replace(step.PRESETS["laptop"], warmup_steps=0, **step.SMALL | changes)
    results = launch(step.measure, 2, args=(step.Problem.of(settings), ways, 2, 1), backend="gloo", timeout=None)
    return settings, [tuple(found) for found in results]


def test_every_trainer_has_the_losses_of_plain_pytorch():
    settings, results = tiny_steps(step.WAYS)
    for seconds, missing in results:
        assert set(seconds) | set(missing) == set(step.WAYS)
        assert set(missing) <= {"Megatron-Core, tp = 2", "nanoGPT, 1 thread", "nanoGPT, 2 threads"}
        assert all(len(times) == 2 for times in seconds.values())
    assert step.table(settings, results).count("\n") == len(step.WAYS) + 1


def with_another_learning_rate(problem):
    return step.plain_alone(replace(problem, settings=replace(problem.settings, learning_rate=1e-3)), 1)


def test_a_trainer_with_other_losses_is_refused():
    with pytest.raises(RankError, match="another learning rate: "):
        tiny_steps({"another learning rate": with_another_learning_rate})


def test_the_table_of_steps_takes_the_slowest_rank_and_compares_within_a_round():
    settings = replace(step.PRESETS["laptop"], **step.SMALL)  # 256 tokens per step
    results = [
        ({"ours": [1.0, 2.0], "theirs": [3.0, 3.0]}, {"other": "it is away"}),
        ({"ours": [2.0, 1.0], "theirs": [1.0, 8.0]}, {}),
    ]
    rows = step.table(settings, results).splitlines()
    # ours: 2 s in both rounds; theirs 3 and 8 s, so 2/3 and 1/4 of our speed
    assert rows[2:] == [
        "| ours | 2000, 2000 | 128 | **1.00** (1.00-1.00) |",
        "| theirs | 3000, 5500 | 47 | **0.46** (0.35-0.56) |",
        "| other | missing: it is away | | |",
    ]
