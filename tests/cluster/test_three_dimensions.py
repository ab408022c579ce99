"""A GPT trained on a grid of ranks has the loss curve, the norms and the weights of one process.

The reference is ParallelGPT on one process, which other tests hold to Hugging Face's, with torch's own clipping. All
three dimensions at once are on eight GPUs in tests/gpu/test_grids.py, and on eight ranks in tests/capstone/training.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.cluster.grids import (
    BATCH,
    CLIPPED,
    CONFIG,
    SEQUENCE_PARALLEL,
    batch,
    one_process,
    trained,
)
from tests.reference import assert_close
from tplab import launch
from tplab.cluster.three_dimensions import Training3D
from tplab.data.grid import Grid
from tplab.pipeline.schedules import gpipe, zero_bubble

CASES_4 = [
    (Grid(2, 1, 2), 2, {"zero": 1, **CLIPPED}),
    (Grid(2, 2, 1), 2, {"max_norm": None}),
    *((Grid(2, 1, 2), 2, {"zero": stage, **CLIPPED, **SEQUENCE_PARALLEL}) for stage in range(4)),
    *((Grid(2, 2, 1), 2, {"zero": stage, **CLIPPED}) for stage in (1, 2, 3)),
    *((Grid(2, 2, 1), m, {"zero": stage, "schedule": zero_bubble, **CLIPPED}) for stage, m in [(2, 4), (3, 4)]),
    (Grid(2, 2, 1), 1, CLIPPED),  # with one micro-batch
    (Grid(1, 2, 2), 4, {"schedule": gpipe, **CLIPPED, **SEQUENCE_PARALLEL}),
    (Grid(1, 2, 2), 4, {"schedule": zero_bubble, **CLIPPED}),
]


def _seeds():
    config = dataclasses.replace(CONFIG, dropout=0.3)
    training = Training3D(config, Grid(2, 2, 1), torch.optim.SGD, micro_batches=2, micro_batch_size=BATCH // 4, lr=0.1)
    seen = []
    draw = training.stage.forward

    def forward(x):
        seen.append([training.stage.rng._seeds[name] for name in ("replicated", "sharded")])
        return draw(x)

    training.stage.forward = forward
    torch.manual_seed(dist.get_rank())
    state = torch.get_rng_state()
    for number in range(2):
        training.step(*batch(number))
    assert torch.equal(torch.get_rng_state(), state)  # the caller's own random numbers are left alone
    return [seed for both in seen for seed in both]


def _on_4():
    return [trained(grid, m, **options) for grid, m, options in CASES_4], _seeds()


@pytest.fixture(scope="module")
def four():
    return launch(_on_4, 4, timeout=200)


def test_two_dimensions_on_four_ranks_train_like_one_process(four):
    for number, (grid, _, options) in enumerate(CASES_4):
        losses, norms, whole = one_process(options["max_norm"])
        assert losses[-1] < losses[0]
        seen = set()
        for rank, result in enumerate(four):
            found, found_norms, weights = result[0][number]
            assert found == pytest.approx(losses, abs=1e-10)
            assert found_norms == pytest.approx(norms, abs=1e-10)
            for name, (weight, sharding) in weights.items():
                expected = whole[name]
                if sharding is not None:
                    expected = sharding.shard(expected, grid.place(rank).tp, grid.tp)
                assert_close(weight, expected, 1e-10)
                seen.add(name)
        assert seen == whole.keys()


def test_every_micro_batch_on_every_stage_has_random_states_of_its_own(four):
    seeds = [seed for _, on_rank in four for seed in on_rank]
    assert len(seeds) == len(set(seeds)) == 4 * 2 * 2 * 2  # ranks, micro-batches, steps, states
