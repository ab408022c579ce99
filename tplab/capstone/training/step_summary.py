"""One all-reduce per step that tells every rank the results of the step on all ranks.

    rank 0    [ loss of its replica | norm | stop request?  | time, bytes, memory of rank 0 |                     ]
    rank 1    [                     |      | stop request?  |                               | .. of rank 1        ]
    sum       [ mean loss           | norm | on any rank?   | of rank 0                     | of rank 1           ]

So all ranks make the same decisions: they log the same loss, or stop after the same step.

A GPU is still computing when its rank moves on, so the results of a step are read one step later. A caller that needs
them immediately (before a checkpoint, for example) takes everything, and waits.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.capstone.training.meter import Figures
from tplab.capstone.training.ranks import Ranks

_LOSS, _NORM, _STOP, _FIGURES = 0, 1, 2, 3


class StepSummary(NamedTuple):
    """The results of a step, which are the same on every rank. `figures` has one entry per rank."""

    step: int
    loss: float
    norm: float
    stop: bool
    figures: list[Figures]


class StepSummaries:
    """A queue of step summaries. Every rank creates one, and posts and takes summaries as often as the other ranks."""

    def __init__(self, ranks: Ranks, replicas: int) -> None:
        self.ranks, self.replicas = ranks, replicas
        self._posted: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def post(self, step: int, loss: Tensor, norm: Tensor, stop: bool, figures: Figures) -> None:
        """Send this rank's part of the step's summary: its replica's loss, the norm, a request to stop, its figures."""
        width, ranks = len(figures), self.ranks
        mine = torch.zeros(_FIGURES + width * ranks.size, dtype=torch.float64)
        mine[_STOP] = float(stop)
        start = _FIGURES + width * ranks.rank
        known = [-1.0 if value is None else value for value in figures]
        mine[start : start + width] = torch.tensor(known, dtype=torch.float64)
        if ranks.device.type == "cuda":
            mine = mine.pin_memory()  # otherwise the copy would wait for the GPU to finish the step
        sums = mine.to(ranks.device, non_blocking=True)
        if ranks.place.tp == 0:  # stages but the last one have a loss of 0
            sums[_LOSS] = loss / self.replicas
        if ranks.rank == 0:
            sums[_NORM] = norm
        if ranks.size > 1:
            dist.all_reduce(sums)
        self._posted.append((step, *self._on_its_way(sums)))

    def take(self, *, everything: bool) -> Iterator[StepSummary]:
        """Yield the summaries that are known by now, oldest first. With `everything`, yield all that were posted.

        Each is yielded as soon as the GPU has finished its step, so the caller can measure how long the step took.
        """
        on_gpu = self.ranks.device.type == "cuda"
        left = 0 if everything or not on_gpu else 1
        while len(self._posted) > left:
            step, sums, arrived = self._posted.popleft()
            if arrived is not None:
                arrived.synchronize()
            yield self._read(step, sums.tolist())

    def _on_its_way(self, sums: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if self.ranks.device.type != "cuda":
            return sums, None
        here = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        here.copy_(sums, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return here, arrived

    def _read(self, step: int, sums: list[float]) -> StepSummary:
        width = len(Figures._fields)
        parts = [sums[at : at + width] for at in range(_FIGURES, len(sums), width)]
        figures = [Figures(None if part[0] < 0 else part[0], *map(int, part[1:])) for part in parts]
        return StepSummary(step, sums[_LOSS], sums[_NORM], sums[_STOP] > 0, figures)
