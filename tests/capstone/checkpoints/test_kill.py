"""A rank of a training run is killed at random moments: nothing is lost but the steps since the last checkpoint."""

import pytest

from benchmarks import kills

GRIDS = {
    "tp": {"tp": 2},
    "llama, stages, zero": {"pp": 2, "dp": 2, "zero": 3, "micro_batch_size": 2, **kills.LLAMA},
}


@pytest.mark.parametrize("grid", GRIDS)
def test_after_a_kill_the_run_goes_on_bit_for_bit(grid, tmp_path):
    outcome = kills.try_kills(tmp_path, kills=2, seed=5, steps=8, save_every=2, **GRIDS[grid])
    assert outcome.failures == []
    assert len(outcome.places) == 2
    assert outcome.equal
    assert max(outcome.lost) <= 2 + 2  # between two saves, and while one is under way
