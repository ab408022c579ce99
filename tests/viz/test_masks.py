"""Pictures of dropout masks: every kept place is filled where it stands, in the colour of its rank."""

import pytest
import torch
from matplotlib.collections import PatchCollection

from tests.viz.pictures import texts
from tplab import viz
from tplab.viz.colors import rank_color, tint


def mask(seed: int, rows: int = 4, columns: int = 16) -> torch.Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.7


def drawn(p: int) -> viz.Picture:
    rows = {"replicated, the residual stream": [mask(0)] * p, "sharded": [mask(1 + rank) for rank in range(p)]}
    return viz.masks(rows)


PICTURES = {
    **{f"p = {p}": lambda p=p: drawn(p) for p in (1, 8)},
    "one row": lambda: viz.masks({"one": [mask(0, 2, 3), mask(1, 2, 3)]}),
}


def test_kept_places_are_filled_where_they_stand_in_the_colour_of_their_rank() -> None:
    shown = [mask(0), mask(1), mask(2).double() / 0.7, mask(3)]
    picture = viz.masks({"above": shown[:2], "below": shown[2:]})
    (axes,) = picture.axes
    grids = [item for item in axes.collections if isinstance(item, PatchCollection)]
    for number, (grid, frame) in enumerate(zip(grids, axes.patches, strict=True)):
        corners = [path.get_extents() for path in grid.get_paths()]
        cell = corners[0].width
        places = {(round((box.y0 - frame.get_y()) / cell), round((box.x0 - frame.get_x()) / cell)) for box in corners}
        assert places == {tuple(place) for place in shown[number].nonzero().tolist()}
        assert tuple(grid.get_facecolor()[0][:3]) == pytest.approx(tint(rank_color(number % 2), 0.85))
    assert texts(picture) == ["above", "rank 0", "rank 1", "below", "rank 0", "rank 1"]
