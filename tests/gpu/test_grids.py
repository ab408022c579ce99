"""Data, pipeline and tensor parallelism at once on eight GPUs: the losses and norms of a single GPU."""

import pytest

from tests.cluster.grids import CASES_8, MAX_NORM, one_process, trained
from tests.gpu.implementations import over_nccl
from tests.gpu.test_layers import check_is_open

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

Curve = tuple[list[float], list[float]]


def on_one() -> Curve:
    losses, norms, _ = one_process(MAX_NORM)
    return losses, norms


def on_eight() -> list[Curve]:
    return [trained(grid, micro_batches, **options)[:2] for grid, micro_batches, options in CASES_8]


def test_all_three_dimensions_on_eight_gpus_train_like_a_single_one() -> None:
    check_is_open(over_nccl(8))
    losses, norms = over_nccl(1).run(on_one)[0]
    assert losses[-1] < losses[0]
    for rank in over_nccl(8).run(on_eight):
        for found_losses, found_norms in rank:
            assert found_losses == pytest.approx(losses, abs=1e-10)
            assert found_norms == pytest.approx(norms, abs=1e-10)
