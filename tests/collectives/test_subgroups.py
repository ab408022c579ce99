"""Groups within a group: who is in them, that they add up, and that nobody else takes part."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests import saying
from tests.tensor.on_ranks import assert_refuses
from tplab import launch
from tplab.collectives.subgroups import split
from tplab.runtime import RankError


def sum_in(group: dist.ProcessGroup) -> tuple[list[int], int]:
    x = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(x, group=group)
    return dist.get_process_group_ranks(group), int(x)


WRONG = ([[0, 1, 2], [1, 3]], [[0, 1, 2]], [[0, 1, 2, 3, 4]])  # don't have each of four ranks once


def splits() -> list[tuple[list[int], int]]:
    rank = dist.get_rank()
    assert_refuses(*((partial(split, None, parts), str(parts)) for parts in WRONG))
    found = [sum_in(split(None, [[0, 3], [1], [2]])), sum_in(split(None, [range(4)]))]
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank >= 2:  # the others don't take part
        found.append(sum_in(split(halves[1], [[1], [0]])))
    return found


def test_each_rank_gets_the_group_of_its_part() -> None:
    ends, everyone = ([0, 3], 1001), ([0, 1, 2, 3], 1111)
    assert list(launch(splits, 4)) == [
        [ends, everyone],
        [([1], 10), everyone],
        [([2], 100), everyone, ([2], 100)],
        [ends, everyone, ([3], 1000)],
    ]


def splits_after_one_more_group_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    split(None, [[0], [1]])


def test_ranks_with_different_numbers_of_groups_are_told_so() -> None:
    with pytest.raises(RankError, match=saying("ranks [0, 1]", "[2, 1]")):
        launch(splits_after_one_more_group_on_rank_0, 2)
