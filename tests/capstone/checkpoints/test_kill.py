"""A rank of a training run is killed at random moments: nothing is lost but the steps since the last checkpoint."""

import json

import pytest

from benchmarks import kills

GRIDS = {
    "tp": {"tp": 2},
    "stages": {"pp": 2, "micro_batch_size": 2},
    "llama, stages, zero": {"pp": 2, "dp": 2, "zero": 3, "micro_batch_size": 2, **kills.LLAMA},
}


@pytest.mark.parametrize("grid", GRIDS)
def test_after_a_kill_the_run_goes_on_bit_for_bit(grid, tmp_path):
    outcome = kills.try_kills(tmp_path, kills=3, seed=5, steps=8, save_every=2, **GRIDS[grid])
    assert outcome.failures == []
    assert len(outcome.places) == 3
    assert outcome.equal
    assert max(outcome.lost) <= 2 + 2  # between two saves, and while one is under way


def test_the_figures_are_those_of_the_log(tmp_path):
    rows = [
        {"kind": "start", "step": 1, "resumed_from": None},
        {"kind": "step", "step": 1, "loss": 4.0},
        {"kind": "step", "step": 2, "loss": 3.0},
        {"kind": "step", "step": 3, "loss": 2.5},
        {"kind": "start", "step": 3, "resumed_from": 2},  # killed behind step 3
        {"kind": "start", "step": 3, "resumed_from": 2},  # and again before step 3
        {"kind": "step", "step": 3, "loss": 2.0},
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + '\n{"kind": "st')
    assert kills.losses(tmp_path) == {1: 4.0, 2: 3.0, 3: 2.0}
    assert kills.lost(tmp_path) == [1, 0]
    outcome = kills.Outcome(["saving", "computing", "saving"], [1, 0, 3], ["rank 0 raised"], 2, False)
    text = kills.report(outcome)
    assert "3 kills in 2 runs" in text
    assert "     2  saving\n     1  computing" in text
    assert "3 at most, 1.3 on average" in text
    assert "never stopped: NO" in text
    assert text.endswith("did not go on: 1\nrank 0 raised")
