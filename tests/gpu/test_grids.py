"""Data, pipeline and tensor parallelism at once on eight GPUs: the losses and norms of a single GPU."""

import pytest
import torch

from tests.cluster.test_three_dimensions import BATCH, CASES_8, CONFIG, DTYPE, MAX_NORM, OPTIONS, SEED, STEPS, batch
from tests.gpu.implementations import over_nccl
from tests.gpu.test_layers import check_is_open
from tplab import device
from tplab.cluster.three_dimensions import Training3D
from tplab.gpt.model import ParallelGPT
from tplab.tensor.rng import seed_all

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

Curve = tuple[list[float], list[float]]


def on_one() -> Curve:
    """A plain loop over the unsharded model, with torch's own clipping."""
    seed_all(SEED)
    model = ParallelGPT(CONFIG, dtype=DTYPE, device=device())
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*(part.to(device()) for part in batch(step)))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def on_eight() -> list[Curve]:
    found = []
    for grid, m, options in CASES_8:
        training = Training3D(
            CONFIG, grid, torch.optim.AdamW, micro_batches=m, micro_batch_size=BATCH // (grid.dp * m), seed=SEED,
            dtype=DTYPE, **OPTIONS, **options,
        )  # fmt: skip
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(training.step(*batch(step)))
            assert training.norm is not None
            norms.append(float(training.norm))
        found.append((losses, norms))
    return found


def test_all_three_dimensions_on_eight_gpus_train_like_a_single_one() -> None:
    check_is_open(over_nccl(8))
    losses, norms = over_nccl(1).run(on_one)[0]
    assert losses[-1] < losses[0]
    for rank in over_nccl(8).run(on_eight):
        for found_losses, found_norms in rank:
            assert found_losses == pytest.approx(losses, abs=1e-10)
            assert found_norms == pytest.approx(norms, abs=1e-10)
