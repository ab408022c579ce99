"""The loss on held-out text, computed on the same batches in every evaluation."""

import torch

from tplab.capstone.data.prepare import Batches, TokenFiles
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.ranks import Ranks
from tplab.capstone.training.step import Step


class Evaluation:
    """Evaluates the model on `evaluation_batches` batches of held-out text, which are split over the replicas."""

    def __init__(self, tokens: TokenFiles, settings: Settings, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        self.batches = Batches(tokens.validation, settings.seq_length, settings.batch_size, seed=0)

    def loss(self, step: Step, count: int | None = None) -> float:
        """Return the mean loss in nats per token, the same on every rank. All ranks have to call this.

        count    the number of batches; None: `evaluation_batches`
        """
        count = count or self.settings.evaluation_batches
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for number in range(count):
            own = self.batches.own(number, self.ranks.place.dp, self.settings.dp)  # [B/dp, s] each
            total += step.loss(*(tensor.to(self.ranks.device) for tensor in own)) / count
        return self.ranks.mean(total)
