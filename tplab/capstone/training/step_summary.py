"""One all-reduce per step, which gives every rank the step's results from all ranks.

    rank 0    [ loss of its replica | norm | stop request?  | time, bytes, memory of rank 0 |                     ]
    rank 1    [                     |      | stop request?  |                               | .. of rank 1        ]
    sum       [ mean loss           | norm | on any rank?   | of rank 0                     | of rank 1           ]

So all ranks know the same loss and make the same decisions, such as stopping after the same step.

A GPU is still computing when its rank moves on, so the results of a step are read one step later. A caller that needs
them immediately (before a checkpoint, for example) passes everything=True and waits.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.capstone.training.meter import Figures
from tplab.capstone.training.ranks import Ranks
from tplab.collectives.by_hand import rank_and_size


class StepSummary(NamedTuple):
    """The results of a step, which are the same on every rank. `figures` has one entry per rank."""

    step: int
    loss: float
    norm: float
    stop: bool
    figures: list[Figures]


class StepSummaries:
    """A queue of step summaries. Every rank creates one, and posts and takes summaries as often as the other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._posted: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def post(self, step: int, loss: Tensor, norm: Tensor, stop: bool, figures: Figures) -> None:
        """Post this rank's part of a summary: its replica's loss, the norm, whether to stop, and the rank's figures."""
        ranks, arrived = self.ranks, None
        of_ranks = torch.zeros(ranks.size, len(figures), dtype=torch.float64)
        of_ranks[ranks.rank] = of_ranks.new_tensor([-1.0 if value is None else value for value in figures])
        sums = torch.cat([of_ranks.new_tensor([0.0, 0.0, stop]), of_ranks.flatten()])
        if ranks.device.type == "cuda":
            sums = sums.pin_memory().to(ranks.device, non_blocking=True)  # so the copy doesn't wait for the step
        if ranks.place.tp == 0:  # all stages but the last one have a loss of 0
            sums[0] = loss / rank_and_size(ranks.group("dp"))[1]
        if ranks.rank == 0:
            sums[1] = norm
        if ranks.size > 1:
            dist.all_reduce(sums)
        if ranks.device.type == "cuda":
            here, arrived = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True), torch.cuda.Event()
            sums = here.copy_(sums, non_blocking=True)
            arrived.record()
        self._posted.append((step, sums, arrived))

    def take(self, *, everything: bool) -> Iterator[StepSummary]:
        """Yield the summaries that are known by now, oldest first. With `everything`, yield all that were posted.

        Each one is yielded as soon as the GPU has finished the step, so the caller can measure how long the step took.
        """
        left = 0 if everything or self.ranks.device.type != "cuda" else 1
        while len(self._posted) > left:
            step, sums, arrived = self._posted.popleft()
            if arrived is not None:
                arrived.synchronize()
            (loss, norm, stops), of_ranks = sums[:3].tolist(), sums[3:].view(self.ranks.size, -1).tolist()
            figures = [Figures(None if share < 0 else share, *map(int, rest)) for share, *rest in of_ranks]
            yield StepSummary(step, loss, norm, stops > 0, figures)
