"""The pictures of chapter 12: what each rank holds from step to step, and what autograd keeps, part by part."""

from types import SimpleNamespace

import pytest

from tests.viz.pictures import boxes, fills, texts
from tplab import viz
from tplab.viz.colors import rank_fill

GATHER = SimpleNamespace(kind="all_gather", bytes=4096)
SCATTER = SimpleNamespace(kind="reduce_scatter", bytes=2048)


def steps(p):
    return [
        {"name": "norm(x)", "whole": (16, 32), "part": (16 // p, 32), "sent": []},
        {"name": "up reads", "whole": (16, 32), "part": (16, 32), "sent": [GATHER]},
        {"name": "down reads", "whole": (16, 128), "part": (16, 128 // p), "sent": []},
        {"name": "down gives", "whole": (16, 32), "part": (16, 32), "summand": True, "sent": []},
        {"name": "+ bias, + x", "whole": (16, 32), "part": (16 // p, 32), "sent": [SCATTER]},
    ]


BARS = {
    "nothing": {"scores": 4_000_000, "inside": 1_200_000, "between": 500_000},
    "attention": {"scores": 0, "inside": 1_200_000, "between": 500_000},
}
PICTURES = {
    **{f"p = {p}": lambda p=p: viz.layouts(steps(p), ranks=p) for p in (1, 4)},
    "what is kept": lambda: viz.saved_activations(BARS, title="one layer"),
}


def test_a_part_has_its_share_of_the_frame_and_stands_at_its_ranks_place() -> None:
    picture = viz.layouts(steps(4), ranks=4)
    for rank in range(4):
        tokens, whole, columns, summand, last = boxes(picture, rank_fill(rank))
        assert (tokens.width, tokens.height) == pytest.approx((whole.width, whole.height / 4))
        assert (columns.width, columns.height) == pytest.approx((whole.width / 4, whole.height))
        assert tokens.y0 - whole.y0 == pytest.approx(rank * whole.height / 4)
        assert (summand.height, last.height) == pytest.approx((whole.height, tokens.height))
        assert columns.x0 - (whole.x0 + (summand.x0 - whole.x0) / 2) == pytest.approx(rank * columns.width)
    shown = texts(picture)
    assert {"all_gather\n4.1 kB", "reduce_scatter\n2.05 kB", "[16, 32]"} <= set(shown)
    assert shown.count("summand") == 4


def test_each_bar_ends_where_its_bytes_end_and_parts_have_one_look_each() -> None:
    picture = viz.saved_activations(BARS)
    assert texts(picture) == ["5.7 MB", "1.7 MB"]
    ends = [patch.get_bbox().x1 for patch in picture.axes[0].patches]
    assert [max(ends[:3]), max(ends[3:6])] == pytest.approx([5.7, 1.7])
    assert fills(picture)[:3] == fills(picture)[3:]
    assert len(set(fills(picture))) == 3
    assert texts(viz.saved_activations({"small": {"one": 700}, "large": {"one": 2_000}})) == ["0.7 kB", "2 kB"]
    assert viz.saved_activations(BARS, scale=10_000_000).axes[0].get_xlim()[1] == pytest.approx(11.6)
