"""The picture of a mesh: every rank once for each axis, a colour and a letter for each group."""

import pytest
from matplotlib.colors import to_rgb

from tests.viz.pictures import fills, texts
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
    assert [text for text in shown if text.startswith("node")] == [f"node {n}" for n in range(-(-grid.size // 8))]
    if grid == Grid(2, 2, 2):
        wanted = [to_rgb(rank_fill(group)) for group in range(4)]
        assert sorted(fills(draw(grid))) == sorted(wanted * 6)  # three axes with four groups of two
