"""One step of training on this rank: forward, backward, the sums over ranks, clipping, the optimizer.

    micro-batch 1..m-1   forward, backward             tp inside the layers; gradients add up here
    micro-batch m        forward, backward             full buckets of gradients leave meanwhile           dp
    finish               the rest of the gradients has come                                                dp
    sequence parallel    gradients of what each rank used for its own tokens are added up                  tp
    clip                 one norm for the whole model, each parameter counted once                         tp
    AdamW                each rank its own parameters

Every sequence has as many tokens, so the mean over micro-batches and replicas of mean losses is the mean of all.

Dropout of a micro-batch is drawn from a seed of its own, made of the step and of its place in the whole batch. So a run
that is taken up again drops what the run that was never stopped would have dropped, and nobody has to save a random
state; nor does it matter which replica computes the micro-batch. With another tp other places are dropped: where a
tensor is sharded, each tp rank draws those of its shard from a state of its own.
"""

import inspect
import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import backward, clip_gradients, finish_gradients
from tplab.capstone.training.optimizer import learning_rate
from tplab.capstone.training.ranks import Ranks
from tplab.data.data_parallel import DataParallel
from tplab.tensor.rng import RNGTracker, seed_all

SEEDS_APART = 10_000  # see `tplab.tensor.rng.seed_all`


class Step:
    """Trains a model in place. Every rank makes it, with the same settings, and runs the same steps."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, settings: Settings, ranks: Ranks) -> None:
        self.model, self.optimizer, self.settings, self.ranks = model, optimizer, settings, ranks
        self.data = DataParallel(model, group=ranks.dp) if settings.dp > 1 else None
        self.takes_rng = "rng" in inspect.signature(model.forward).parameters

    def run(self, step: int, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Step number `step` (from 1) on this replica's sequences: ids, targets [B/dp, s]; a target is the next id.

        Returns their mean loss, in nats a token, as float64, and the length of the whole gradient before it was
        clipped. Both are scalars on the device, so that a GPU is not waited for.
        """
        m = self.settings.micro_batches
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for number, (x, y) in enumerate(zip(ids.chunk(m), targets.chunk(m), strict=True)):
            with self._gradients_stay() if number < m - 1 else nullcontext():
                loss = self._forward(x, y, self._dropout(step, number)) / m
                backward(self.model, loss)
            total += loss.detach()
        if self.data is not None:
            self.data.finish()
        finish_gradients(self.model)
        norm = clip_gradients(self.model, self.settings.max_norm or math.inf, self.ranks.mesh)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.settings)
        self.optimizer.step()
        return total, norm

    @torch.no_grad()
    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of sequences [b, s] that are not learned from: a scalar in float64, in nats a token."""
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

    def _gradients_stay(self) -> AbstractContextManager:
        return nullcontext() if self.data is None else self.data.no_sync()


def lower_precision(settings: Settings, ranks: Ranks) -> AbstractContextManager:
    """Products in bfloat16 inside it, if the settings say so."""
    if settings.precision != "bfloat16":
        return nullcontext()
    return torch.autocast(ranks.device.type, torch.bfloat16)
