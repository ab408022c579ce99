"""One training step on this rank: forward, backward, all-reduces of gradients, clipping, optimizer step.

    micro-batch 1..m-1   forward, backward             tp inside the layers; gradients accumulate here
    micro-batch m        forward, backward             full buckets of gradients are sent in the background  dp
    update               the remaining sums, the norm, clipping, AdamW (`tplab.cluster.training_step`)       dp, tp

All sequences have the same length, so averaging the mean losses of micro-batches and replicas gives the overall mean.

The dropout of each micro-batch has a separate seed, computed from the step and the position of the micro-batch in the
full batch. A resumed run therefore drops the same elements as an uninterrupted one, without saving a random state, and
it doesn't matter which replica computes the micro-batch. A different tp does change which elements are dropped, because
each tp rank draws them for its shard from a separate random state.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import backward, training_step
from tplab.capstone.training.optimizer import adamw_options, learning_rate
from tplab.capstone.training.ranks import Ranks
from tplab.tensor.rng import RNGTracker, seed_all

SEEDS_APART = 10_000  # see `tplab.tensor.rng.seed_all`


class Step:
    """A training step, which updates a model in place. Every rank creates one with the same settings."""

    def __init__(self, model: nn.Module, settings: Settings, ranks: Ranks) -> None:
        self.model, self.settings, self.ranks = model, settings, ranks
        self.training = training_step(
            model, AdamW, ranks.mesh, max_norm=settings.max_norm or None, check=False, **adamw_options(model, settings)
        )
        self.optimizer: Any = self.training.optimizer
        self.takes_rng = "rng" in inspect.signature(model.forward).parameters

    def run(self, step: int, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Run step number `step` (from 1) on this replica's ids and targets, [B/dp, s] each. A target is the next id.

        Returns the mean loss in nats per token, as float64, and the norm of the full gradient before clipping. Both are
        scalars on the device, so this rank doesn't wait for the GPU. If the norm isn't finite, nothing was updated.
        """
        m = self.settings.micro_batches
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for number, (x, y) in enumerate(zip(ids.chunk(m), targets.chunk(m), strict=True)):
            with self.training.micro_batch(last=number == m - 1):
                loss = self._forward(x, y, self._dropout(step, number)) / m
                backward(self.model, loss)
            total += loss.detach()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.settings)
        return total, self.training.update()

    @torch.no_grad()
    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of sequences [b, s] in nats per token, a float64 scalar, without training on them."""
        was_training = self.model.training
        self.model.eval()
        try:
            return self._forward(ids, targets, None).double()
        finally:
            self.model.train(was_training)

    def _forward(self, ids: Tensor, targets: Tensor, rng: RNGTracker | None) -> Tensor:
        drawn = {"rng": rng} if rng is not None and self.takes_rng else {}
        with lower_precision(self.settings, self.ranks):
            return self.model(ids, targets, **drawn)

    def _dropout(self, step: int, number: int) -> RNGTracker | None:
        if not self.settings.dropout:
            return None
        all_of_them = self.settings.dp * self.settings.micro_batches
        place = self.ranks.dp_rank * self.settings.micro_batches + number
        return seed_all(self.settings.seed + SEEDS_APART * (1 + (step - 1) * all_of_them + place), self.ranks.tp)


def lower_precision(settings: Settings, ranks: Ranks) -> AbstractContextManager:
    """Context manager that runs matmuls in bfloat16 if the settings say so."""
    if settings.precision != "bfloat16":
        return nullcontext()
    return torch.autocast(ranks.device.type, torch.bfloat16)
