"""A training step on a GPU whose gradient isn't finite: a fused optimizer leaves it out, and the CPU doesn't wait."""

import pytest
import torch
from torch import nn

from tests.gpu.implementations import over_nccl
from tests.gpu.test_layers import check_is_open
from tplab import device
from tplab.cluster.training_step import TrainingStep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def skipped() -> tuple[bool, bool, bool, float]:
    model = nn.Linear(3, 2, device=device())
    training = TrainingStep(model, torch.optim.AdamW, check=False, max_norm=1.0, lr=0.1, fused=True)

    def step(scale: float) -> float:
        with training.micro_batch():
            (model(torch.ones(4, 3, device=device())).sum() * scale).backward()
        return float(training.update())

    step(1.0)
    before = model.weight.detach().clone()
    norm = step(torch.nan)
    same = torch.equal(model.weight, before)
    (state, _) = training.optimizer.state.values()  # type: ignore[union-attr]
    steps = float(state["step"])
    step(1.0)
    return same, norm != norm, not torch.equal(model.weight, before), steps


def test_a_fused_optimizer_leaves_out_a_step_whose_norm_is_not_finite() -> None:
    check_is_open(over_nccl(1))
    assert over_nccl(1).run(skipped) == [(True, True, True, 1.0)]
