"""The picture of a mesh: every rank once for each axis, a colour and a letter for each group, a frame for each node."""

import pytest
from matplotlib.colors import to_rgb

from tests.viz.pictures import texts
from tplab import viz
from tplab.data.grid import Grid
from tplab.viz.colors import rank_fill

MESHES = {"2 2 2": Grid(2, 2, 2), "4 2 4": Grid(4, 2, 4), "1 1 1": Grid(), "1 4 1": Grid(pp=4)}


def draw(grid, **options):
    return viz.mesh({axis: grid.groups(axis) for axis in ("tp", "pp", "dp")}, **options)


PICTURES = {name: lambda grid=grid: draw(grid, title="a title") for name, grid in MESHES.items()}


@pytest.mark.parametrize("grid", MESHES.values(), ids=MESHES)
def test_every_rank_stands_in_every_axis_with_the_letter_of_its_group(grid):
    shown = texts(draw(grid))
    for rank in range(grid.size):
        assert shown.count(str(rank)) == 3
    letters = "abcdefghijklmnopqrstuvwxyz"
    groups = [group for axis in ("tp", "pp", "dp") for group in enumerate(grid.groups(axis))]
    if grid.size <= len(letters):
        expected = sorted(letters[number] for number, group in groups for _ in group)
        assert sorted(text for text in shown if text in letters and text) == expected


def test_ranks_of_a_group_have_one_fill_and_groups_differ():
    fills = [patch.get_facecolor()[:3] for patch in draw(Grid(2, 2, 2)).axes[0].patches if patch.get_facecolor()[3]]
    wanted = [to_rgb(rank_fill(group)) for group in range(4)]
    assert sorted(fills) == sorted(wanted * 6)  # three axes with four groups of two


@pytest.mark.parametrize(("node", "count"), [(8, 1), (4, 2), (3, 3)])
def test_a_frame_stands_around_each_node(node, count):
    named = [text for text in texts(draw(Grid(2, 2, 2), gpus_per_node=node)) if text.startswith("node")]
    assert named == [f"node {number}" for number in range(count)]
