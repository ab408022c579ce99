"""How a step went is the same on every rank: the mean of the replicas' losses, what each rank measured, and a wish."""

from dataclasses import replace

import torch
import torch.distributed as dist

from tests.capstone.small import SMALL
from tplab import launch, record
from tplab.capstone.training.meter import Figures
from tplab.capstone.training.ranks import Ranks, join
from tplab.capstone.training.step_summary import StepSummaries, StepSummary
from tplab.data.grid import Place

ALONE = Ranks(0, 1, Place(0, 0, 0), None, torch.device("cpu"))


def figures_of(rank: int) -> Figures:
    """With more bytes than float32 can tell exactly."""
    return Figures(rank / 10, 10 * rank, 100_000_000_001 * rank)


def _told() -> tuple[list[StepSummary], int]:
    """Two replicas of two ranks. Rank 3 is asked to stop; nobody but the first of a replica is asked for its loss."""
    ranks = join(replace(SMALL, tp=2, dp=2, batch_size=16))
    rank = dist.get_rank()
    tally = StepSummaries(ranks)
    loss = {0: 2.0, 2: 5.0}.get(rank, 1000.0)
    with record() as section:
        tally.post(7, torch.tensor(loss), torch.tensor(0.25), rank == 3, figures_of(rank))
    return list(tally.take(everything=True)), len(section)


def test_all_ranks_are_told_the_same_in_one_message():
    figures = [figures_of(rank) for rank in range(4)]
    for told, messages in launch(_told, 4):
        assert told == [StepSummary(7, 3.5, 0.25, True, figures)]
        assert messages == 1


def posted(*steps: int) -> StepSummaries:
    """The summaries of a single rank. The loss of step k is k."""
    tally = StepSummaries(ALONE)
    for step in steps:
        tally.post(step, torch.tensor(float(step)), torch.tensor(1.0), False, Figures(None, 3, 4))
    return tally


def test_nobody_asked_and_a_share_that_is_not_known():
    tally = posted(2)
    assert list(tally.take(everything=False)) == [StepSummary(2, 2.0, 1.0, False, [Figures(None, 3, 4)])]
    assert list(tally.take(everything=True)) == []


def test_on_a_gpu_the_newest_step_is_told_when_it_is_asked_for():
    tally = posted(1, 2, 3)
    tally.ranks = replace(ALONE, device=torch.device("cuda", 0))
    assert [told.step for told in tally.take(everything=False)] == [1, 2]
    assert list(tally.take(everything=False)) == []
    assert [told.step for told in tally.take(everything=True)] == [3]
