"""How a step went is the same on every rank: the mean of the replicas' losses, what each rank measured, and a wish."""

from dataclasses import replace

import torch
import torch.distributed as dist

from tests.capstone.small import SMALL
from tplab import launch, record
from tplab.capstone.training.meter import Figures
from tplab.capstone.training.ranks import join
from tplab.capstone.training.step_summary import StepSummary, summarize


def figures_of(rank: int) -> Figures:
    """With more bytes than float32 can tell exactly. Rank 1 doesn't know its share."""
    return Figures(None if rank == 1 else rank / 10, 10 * rank, 100_000_000_001 * rank)


def _told() -> tuple[StepSummary, int]:
    """Two replicas of two ranks. Rank 3 is asked to stop; nobody but the first of a replica is asked for its loss."""
    ranks, rank = join(replace(SMALL, tp=2, dp=2, batch_size=16)), dist.get_rank()
    loss = {0: 2.0, 2: 5.0}.get(rank, 1000.0)
    with record() as section:
        told = summarize(ranks, torch.tensor(loss), torch.tensor(0.25), rank == 3, figures_of(rank))
    return told, len(section)


def test_all_ranks_are_told_the_same_in_one_message():
    figures = [figures_of(rank) for rank in range(4)]
    for told, messages in launch(_told, 4):
        assert told == StepSummary(3.5, 0.25, True, figures)
        assert messages == 1
