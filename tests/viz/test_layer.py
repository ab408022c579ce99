"""The picture of a transformer layer: what is whole, what is shared out, and what its four operators sent."""

from types import SimpleNamespace

import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import Circle

from tests.viz.pictures import boxes, places, texts
from tplab import viz
from tplab.viz.colors import NOBODY, rank_fill

SMALL, LARGE = (SimpleNamespace(kind="all_reduce", bytes=size) for size in (1024, 2048))
OTHER = SimpleNamespace(kind="reduce_scatter", bytes=4096)


def picture(p, **options):
    calls = [SMALL, LARGE] if p > 1 else []
    return viz.layer(calls, [OTHER, SMALL] if p > 1 else [], ranks=p, **options)


PICTURES = {f"p = {p}": lambda p=p: picture(p) for p in (1, 2, 8)}


def circles(drawn):
    """The middles of the circles and what is written in each."""
    written = {at: text for text, every in places(drawn).items() for at in every}
    middles = [patch.center for patch in drawn.axes[0].patches if isinstance(patch, Circle)]
    return [(middle, written.get(middle)) for middle in middles]


def arrows(drawn):
    """(start, stop) of every arrow with a head at its stop."""
    found = [text for text in drawn.axes[0].texts if text.get_text() == "" and getattr(text, "arrow_patch", None)]
    assert all(text.arrowprops["arrowstyle"] == "-|>" for text in found)
    return [(text.get_position(), text.xy) for text in found]


@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_row_goes_from_the_norm_through_f_the_blocks_and_g_to_the_bias_and_the_sum(p) -> None:
    drawn = picture(p)
    grey, at = boxes(drawn, to_rgb(NOBODY)), places(drawn)
    assert len(grey) == 4, "norms and biases belong to everybody"
    for row, (name, calls) in enumerate([("attention", (SMALL, SMALL)), ("MLP", (OTHER, LARGE))]):
        norm, bias = grey[2 * row : 2 * row + 2]
        ((f, y), f_letter), ((g, _), g_letter), ((plus, _), sign) = circles(drawn)[3 * row : 3 * row + 3]
        assert (f_letter, g_letter, sign) == ("f", "g", "+")
        shards = [boxes(drawn, rank_fill(rank))[row] for rank in range(p)]
        assert all((box.y0 + box.y1) / 2 == pytest.approx(y) for box in (norm, bias))
        assert (shards[0].y0 + shards[-1].y1) / 2 == pytest.approx(y)
        assert [box.y0 for box in shards[1:]] == pytest.approx([box.y1 for box in shards[:-1]])
        for rank, box in enumerate(shards):
            (place,) = at[name if p == 1 else f"{name}, rank {rank}"]
            assert place == pytest.approx(((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2))

        shard = shards[0]
        line = sorted((start[0], stop[0]) for start, stop in arrows(drawn) if start[1] == stop[1] == y)
        ends = [norm.x0, norm.x1, f - 0.17, f + 0.17, shard.x0, shard.x1, g - 0.17, g + 0.17, bias.x0, bias.x1]
        assert [x for pair in line for x in pair][:-1] == pytest.approx([0.15, *ends, plus - 0.14, plus + 0.14])
        ((residual, high),) = [line.get_xydata()[0] for line in drawn.axes[0].lines
                               if len(line.get_xdata()) == 3 and abs(line.get_ydata()[0] - y) < 0.01]  # fmt: skip
        assert (residual < norm.x0, high) == (True, y)
        ((start, stop),) = [(a, b) for a, b in arrows(drawn) if a[0] == b[0] == plus and y - 1 < b[1] < y]
        assert start[1] < stop[1] == pytest.approx(y - 0.14)

        for x, direction, call in ((f, "← backward", calls[0]), (g, "forward →", calls[1])):
            (sent,) = [text.get_text() for text in drawn.axes[0].texts
                       if text.get_position()[0] == x and y + 0.3 < text.get_position()[1] < y + 1]  # fmt: skip
            size = {1024: "1.02 kB", 2048: "2.05 kB", 4096: "4.1 kB"}[call.bytes]
            assert sent == f"{direction}\n" + (f"{call.kind}, {size}" if p > 1 else "nothing sent")
    ((x, _),), ((z, _),) = at["x"], at["z"]
    assert x < f < z


def test_title_and_legend() -> None:
    assert "mine" in texts(picture(2, title="mine"))
    assert "a transformer layer on 2 ranks" in texts(picture(2))
    assert "a transformer layer on 1 rank" in texts(picture(1))
