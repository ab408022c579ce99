"""The grid of ranks: arithmetic by the book of torch's own mesh, and the process groups that it makes."""

import itertools
import math
import re

import pytest
import torch
import torch.distributed as dist

from tests import saying
from tests.tensor.on_ranks import refusals
from tplab import launch
from tplab.data.grid import DIMENSIONS, Grid, mesh

SIZES = [(2, 2, 2), (3, 2, 4), (4, 3, 1)]


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_are_numbered_like_the_entries_of_an_array(sizes):
    grid, numbers = Grid(*sizes), torch.arange(math.prod(sizes)).view(sizes)
    assert grid.size == numbers.numel()
    for place in itertools.product(*map(range, sizes)):
        assert grid.rank(*place) == numbers[place]
        assert grid.place(int(numbers[place])) == place
    for axis, name in enumerate(DIMENSIONS):
        wanted = numbers.movedim(axis, -1).reshape(-1, sizes[axis]).tolist()
        assert sorted(grid.groups(name)) == sorted(wanted)
        for group in wanted:
            assert all(grid.group(rank, name) == group for rank in group)


def test_a_rank_outside_of_the_grid_is_refused():
    with pytest.raises(ValueError, match=saying("rank 8", "8 ranks", "dp=2 · pp=2 · tp=2", "0", "7")):
        Grid(2, 2, 2).place(8)


def _groups_of_a_mesh():
    found = {}
    for sizes in [(1, 2, 2), (2, 1, 2), (4, 1, 1)]:
        m = mesh(*sizes)
        groups = [dist.get_process_group_ranks(m.get_group(name)) for name in DIMENSIONS]
        place = [m.get_local_rank(name) for name in DIMENSIONS]
        total = torch.tensor([10.0 ** dist.get_rank()])
        dist.all_reduce(total, group=m.get_group("tp"))
        found[sizes] = groups, place, total.item()
    return found, refusals(lambda: mesh(2, 2, 2))


def test_a_mesh_has_the_groups_of_its_grid():
    results = launch(_groups_of_a_mesh, 4, timeout=120)
    assert len(results) == 4
    for rank, (found, (refused,)) in enumerate(results):
        assert re.search(saying("dp=2 · pp=2 · tp=2 = 8 ranks", "4"), refused)
        for sizes, (groups, place, total) in found.items():
            grid = Grid(*sizes)
            assert groups == [grid.group(rank, name) for name in DIMENSIONS]
            assert tuple(place) == grid.place(rank)
            assert total == sum(10.0**other for other in grid.group(rank, "tp"))
