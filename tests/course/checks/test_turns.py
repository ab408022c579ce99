"""Ranks that take turns in one process: always in the same order, and never stuck without anybody noticing."""

import pytest
import torch.distributed as dist

from tplab.course.exercises.ch15.turns import Group, Stuck, take_turns


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [2, 0, 1]])
def test_a_rank_runs_until_its_barrier_and_then_the_next_one_does(order):
    said = []

    def work():
        said.append(("before", dist.get_rank(), dist.get_world_size()))
        dist.barrier()
        said.append(("after", dist.get_rank(), dist.get_world_size()))

    assert take_turns(work, order) == [None] * len(order)
    assert said == [(when, rank, len(order)) for when in ("before", "after") for rank in order]


def test_a_barrier_that_one_rank_never_enters_is_noticed():
    outcomes = take_turns(lambda: dist.barrier() if dist.get_rank() == 1 else None, [0, 1])
    assert outcomes[0] is None
    assert isinstance(outcomes[1], Stuck)


def test_what_a_rank_raises_is_its_outcome_and_the_others_are_stuck():
    def work():
        if dist.get_rank() == 0:
            raise ValueError("no")
        dist.barrier()

    outcomes = take_turns(work, [0, 1])
    assert [type(outcome) for outcome in outcomes] == [ValueError, Stuck]


def test_ranks_of_a_group_have_other_numbers_in_the_world_which_has_more_ranks():
    group = Group(2, first=2)
    seen = []
    take_turns(lambda: seen.append((dist.get_rank(group), dist.get_rank(), group.rank(), group.size())), [0, 1], group)
    assert seen == [(0, 2, 0, 2), (1, 3, 1, 2)]
    assert all(isinstance(outcome, Stuck) for outcome in take_turns(lambda: dist.barrier(), [0, 1], group))


def test_other_collectives_are_refused_and_afterwards_everything_is_as_before():
    before = dist.barrier, dist.all_reduce
    (outcome,) = take_turns(lambda: dist.all_reduce(None), [0])
    assert "are all you need" in str(outcome)
    assert (dist.barrier, dist.all_reduce) == before
