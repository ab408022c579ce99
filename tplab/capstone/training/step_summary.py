"""One all-reduce, which gives every rank a step's results from all ranks.

    rank 0    [ loss of its replica | norm | stop request?  | time, bytes, memory of rank 0 |                     ]
    rank 1    [                     |      |                |                               | .. of rank 1        ]
    sum       [ mean loss           | norm | asked to stop? | of rank 0                     | of rank 1           ]

So all ranks know the same loss and make the same decisions, such as stopping after the same step.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.capstone.training.meter import Figures
from tplab.capstone.training.ranks import Ranks
from tplab.collectives.by_hand import rank_and_size


class StepSummary(NamedTuple):
    """The results of a step, which are the same on every rank. `figures` has one entry per rank."""

    loss: float
    norm: float
    stop: bool
    figures: list[Figures]


def summarize(ranks: Ranks, loss: Tensor, norm: Tensor, stop: bool, figures: Figures) -> StepSummary:
    """Return the summary of a step, given this rank's loss and figures. All ranks call this, and wait for the GPU."""
    of_ranks = torch.zeros(ranks.size, len(figures), dtype=torch.float64)
    of_ranks[ranks.rank] = of_ranks.new_tensor([-1.0 if value is None else value for value in figures])
    sums = torch.cat([of_ranks.new_tensor([0.0, 0.0, stop]), of_ranks.flatten()]).to(ranks.device)
    if ranks.place.tp == 0:  # all stages but the last one have a loss of 0
        sums[0] = loss / rank_and_size(ranks.group("dp"))[1]
    if ranks.rank == 0:
        sums[1] = norm
    if ranks.size > 1:
        dist.all_reduce(sums)
    (mean, norm_of_all, stops), rows = sums[:3].tolist(), sums[3:].view(ranks.size, -1).tolist()
    of_all = [Figures(None if share < 0 else share, *map(int, rest)) for share, *rest in rows]
    return StepSummary(mean, norm_of_all, stops > 0, of_all)
