"""The pictures of chapter 12: what each rank holds from step to step, and what autograd keeps, part by part."""

from types import SimpleNamespace

import pytest

from tests.viz.pictures import fills, texts
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
    **{f"p = {p}": lambda p=p: viz.layouts(steps(p), ranks=p) for p in (1, 2, 4)},
    "what is kept": lambda: viz.saved_activations(BARS),
    "what is kept, with a title": lambda: viz.saved_activations(BARS, title="one layer"),
}


def test_a_part_has_its_share_of_the_frame_and_stands_at_its_ranks_place() -> None:
    drawn = viz.layouts(steps(4), ranks=4).axes[0].patches
    for rank in range(4):
        bands = [b.get_bbox() for b in drawn if b.get_facecolor()[:3] == rank_fill(rank) and b.get_facecolor()[3]]
        tokens, whole, columns, summand, last = bands
        assert tokens.height == pytest.approx(whole.height / 4)
        assert tokens.width == pytest.approx(whole.width)
        assert columns.width == pytest.approx(whole.width / 4)
        assert columns.height == pytest.approx(whole.height)
        assert tokens.y0 - whole.y0 == pytest.approx(rank * whole.height / 4)
        assert (summand.height, last.height) == pytest.approx((whole.height, tokens.height))
        assert columns.x0 - (whole.x0 + (summand.x0 - whole.x0) / 2) == pytest.approx(rank * columns.width)


def test_what_was_sent_stands_below_with_its_bytes_and_summands_are_named() -> None:
    shown = texts(viz.layouts(steps(2), ranks=2))
    assert "all_gather\n4.1 kB" in shown
    assert "reduce_scatter\n2.05 kB" in shown
    assert shown.count("summand") == 2
    assert "[16, 64]" in shown


def test_each_bar_says_its_bytes_in_one_unit_and_parts_have_one_look_each() -> None:
    assert texts(viz.saved_activations(BARS)) == ["5.7 MB", "1.7 MB"]
    assert texts(viz.saved_activations({"small": {"one": 700}, "large": {"one": 2_000}})) == ["0.7 kB", "2 kB"]
    first, second = fills(viz.saved_activations(BARS))[:3], fills(viz.saved_activations(BARS))[3:]
    assert first == second
    assert len(set(first)) == 3


def test_bars_end_where_their_bytes_end_on_a_scale_that_may_be_given() -> None:
    ends = [patch.get_bbox().x1 for patch in viz.saved_activations(BARS).axes[0].patches]
    assert [max(ends[:3]), max(ends[3:6])] == pytest.approx([5.7, 1.7])
    assert viz.saved_activations(BARS, scale=10_000_000).axes[0].get_xlim()[1] == pytest.approx(11.6)
