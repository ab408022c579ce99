"""One all-reduce a step, after which every rank knows how the step went on all of them.

    rank 0    [ loss of its replica | norm | asked to stop? | time, bytes, memory of rank 0 |                     ]
    rank 1    [                     |      | asked to stop? |                               | .. of rank 1        ]
    sum       [ mean loss           | norm | by anyone?     | of rank 0                     | of rank 1           ]

So the ranks do the same next: log the same loss, or stop after the same step. A run wants the mean loss of the
replicas anyway; the rest travels in the same message.

A GPU computes while this rank goes on, and what it will have found is not known yet. So there what a step gave is read
one step later. Whoever has to know at once (before a checkpoint) asks for everything, and waits.
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
    """How a step went; the same on every rank. `figures` has one for each rank."""

    step: int
    loss: float
    norm: float
    stop: bool
    figures: list[Figures]


class StepSummaries:
    """Every rank makes one, posts each step, and takes as often as the others do."""

    def __init__(self, ranks: Ranks, replicas: int) -> None:
        self.ranks, self.replicas = ranks, replicas
        self._posted: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def post(self, step: int, loss: Tensor, norm: Tensor, stop: bool, figures: Figures) -> None:
        """What this rank knows of a step: its replica's loss, the norm, whether it was asked to stop, what it cost."""
        width, ranks = len(figures), self.ranks
        mine = torch.zeros(_FIGURES + width * ranks.size, dtype=torch.float64)
        mine[_STOP] = float(stop)
        start = _FIGURES + width * ranks.rank
        known = [-1.0 if value is None else value for value in figures]
        mine[start : start + width] = torch.tensor(known, dtype=torch.float64)
        if ranks.device.type == "cuda":
            mine = mine.pin_memory()  # else the copy would wait until the GPU is done with the step
        sums = mine.to(ranks.device, non_blocking=True)
        if ranks.tp_rank == 0:
            sums[_LOSS] = loss / self.replicas
        if ranks.rank == 0:
            sums[_NORM] = norm
        if ranks.size > 1:
            dist.all_reduce(sums)
        self._posted.append((step, *self._on_its_way(sums)))

    def take(self, *, everything: bool) -> Iterator[StepSummary]:
        """The steps of which one can know by now, oldest first; with `everything` all that were posted.

        Each comes as soon as the GPU is done with it, so that whoever looks at the clock then sees how long it took.
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
        figures = [Figures(None if part[0] < 0 else part[0], int(part[1]), int(part[2])) for part in parts]
        return StepSummary(step, sums[_LOSS], sums[_NORM], sums[_STOP] > 0, figures)
