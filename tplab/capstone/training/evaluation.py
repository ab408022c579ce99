"""The loss on held-out text, computed on the same batches in every evaluation."""

import torch
import torch.distributed as dist

from tplab.capstone.data.prepare import Batches, TokenFiles
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.ranks import Ranks
from tplab.capstone.training.step import Step


class Evaluation:
    """Evaluates the model on `evaluation_batches` batches of held-out text, which are split over the replicas."""

    def __init__(self, tokens: TokenFiles, settings: Settings, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        self.batches = Batches(tokens.validation, settings.seq_length, settings.batch_size, seed=0)

    def one_loss(self, step: Step) -> float:
        """Return the mean loss of one micro-batch per replica, to see whether it is finite. All ranks call this."""
        own = self.batches.own(0, self.ranks.dp_rank, self.settings.dp)  # [B/dp, s] each
        ids, targets = (tensor[: self.settings.micro_batch_size].to(self.ranks.device) for tensor in own)
        total = step.loss(ids, targets)
        if self.settings.dp > 1:
            dist.all_reduce(total, group=self.ranks.dp)
        return float(total) / self.settings.dp

    def loss(self, step: Step) -> float:
        """Return the mean loss in nats per token, the same on every rank. All ranks have to call this."""
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        each = self.settings.micro_batches
        parts = self.settings.evaluation_batches * each
        for number in range(self.settings.evaluation_batches):
            own = self.batches.own(number, self.ranks.dp_rank, self.settings.dp)  # [B/dp, s] each
            ids, targets = (tensor.to(self.ranks.device) for tensor in own)
            for x, y in zip(ids.chunk(each), targets.chunk(each), strict=True):
                total += step.loss(x, y) / parts
        if self.settings.dp > 1:
            dist.all_reduce(total, group=self.ranks.dp)
        return float(total) / self.settings.dp
