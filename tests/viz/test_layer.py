"""The picture of a transformer layer: what is whole, what is shared out, and what its four operators sent."""

from types import SimpleNamespace

import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import Circle, Rectangle

from tests.viz.pictures import places, texts
from tplab import viz
from tplab.viz.colors import NOBODY, rank_fill

SMALL, LARGE = (SimpleNamespace(kind="all_reduce", bytes=size) for size in (1024, 2048))
OTHER = SimpleNamespace(kind="reduce_scatter", bytes=4096)


def picture(p, **options):
    calls = [SMALL, LARGE] if p > 1 else []
    return viz.layer(calls, [OTHER, SMALL] if p > 1 else [], ranks=p, **options)


PICTURES = {
    f"p = {p}, post={post}": lambda p=p, post=post: picture(p, post=post)
    for p in (1, 2, 4, 8)
    for post in (False, True)
}


def test_each_operator_says_what_it_sent_and_in_which_direction() -> None:
    shown = [text for text in texts(picture(2)) if "\n" in text and "bias" not in text]
    assert shown == [
        "← backward\nall_reduce, 1.02 kB",  # the attention's f, the last of the backward pass
        "forward →\nall_reduce, 1.02 kB",
        "← backward\nreduce_scatter, 4.1 kB",  # the MLP's f, the first of the backward pass
        "forward →\nall_reduce, 2.05 kB",
    ]


def boxes(drawn, color):
    """The filled rectangles of a colour."""
    filled = [patch for patch in drawn.axes[0].patches if isinstance(patch, Rectangle) and patch.get_facecolor()[3]]
    return [patch.get_bbox() for patch in filled if patch.get_facecolor()[:3] == color]


def circles(drawn):
    """The middles of the circles and what is written in each."""
    written = {at: text for text, every in places(drawn).items() for at in every}
    middles = [patch.center for patch in drawn.axes[0].patches if isinstance(patch, Circle)]
    return [(middle, written.get(middle)) for middle in middles]


def arrows(drawn):
    """(start, stop) of every arrow with a head at its stop."""
    found = []
    for text in drawn.axes[0].texts:
        if text.get_text() == "" and getattr(text, "arrow_patch", None):
            assert text.arrowprops["arrowstyle"] == "-|>"
            assert text.arrow_patch.shrinkA == text.arrow_patch.shrinkB == 0
            assert text.arrow_patch.get_linewidth() > 0.5
            found.append((text.get_position(), text.xy))
    return found


ROWS = 2


@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_row_goes_from_the_norm_through_f_the_blocks_and_g_to_the_bias_and_the_sum(p) -> None:
    drawn = picture(p)
    grey, at = boxes(drawn, to_rgb(NOBODY)), places(drawn)
    norms, biases = grey[0::2], grey[1::2]
    for row in range(ROWS):
        f, g, plus = circles(drawn)[3 * row : 3 * row + 3]
        y = f[0][1]
        assert [f[1], g[1], plus[1]] == ["f", "g", "+"]
        assert g[0][1] == plus[0][1] == y
        shards = [boxes(drawn, rank_fill(rank))[row] for rank in range(p)]
        assert norms[row].x1 < f[0][0] < shards[0].x0 < shards[0].x1 < g[0][0] < biases[row].x0
        assert biases[row].x1 < plus[0][0]
        for box, name in ((norms[row], "norm"), (biases[row], "+ bias,\ndropout")):
            assert at[name][row] == pytest.approx(((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2))
            assert at[name][row][1] == pytest.approx(y)
        assert (shards[0].y0 + shards[-1].y1) / 2 == pytest.approx(y)
        assert [box.y0 for box in shards[1:]] == pytest.approx([box.y1 for box in shards[:-1]])
        name = ("attention", "MLP")[row]
        for rank, box in enumerate(shards):
            (place,) = at[name if p == 1 else f"{name}, rank {rank}"]
            assert place == pytest.approx(((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2))


def test_arrows_lead_from_the_left_to_the_right_and_leave_out_what_stands_between() -> None:
    drawn = picture(2)
    grey = boxes(drawn, to_rgb(NOBODY))
    for row in range(ROWS):
        (f, y), (g, _), (plus, _) = (middle for middle, _ in circles(drawn)[3 * row : 3 * row + 3])
        norm, bias, shard = grey[2 * row], grey[2 * row + 1], boxes(drawn, rank_fill(0))[row]
        line = sorted((start[0], stop[0]) for start, stop in arrows(drawn) if start[1] == stop[1] == y)
        ends = [norm.x0, norm.x1, f - 0.17, f + 0.17, shard.x0, shard.x1, g - 0.17, g + 0.17, bias.x0, bias.x1]
        ends = [0.15, *ends, plus - 0.14, plus + 0.14]
        assert [x for pair in line for x in pair][:-1] == pytest.approx(ends)
        assert line[-1][1] > plus + 0.5
        down = [(start, stop) for start, stop in arrows(drawn) if start[0] == stop[0] == plus and y - 1 < stop[1] < y]
        ((start, stop),) = down
        assert start[1] < stop[1] == pytest.approx(y - 0.14)


def test_what_was_sent_stands_below_its_operator_with_a_line_to_it() -> None:
    drawn = picture(2)
    sent = [text for text in drawn.axes[0].texts if text.get_text().startswith(("forward", "← backward"))]
    operators = [middle for middle, letter in circles(drawn) if letter in ("f", "g")]
    dotted = [line for line in drawn.axes[0].lines if line.get_linestyle() == ":"]
    assert len(sent) == len(operators) == len(dotted) == 4
    for (x, y), text, line in zip(operators, sent, dotted, strict=True):
        assert text.get_position()[0] == x
        assert text.get_position()[1] > y + 0.3
        assert list(line.get_xdata()) == [x, x]
        assert y < line.get_ydata()[0] < line.get_ydata()[1] < text.get_position()[1]


def test_x_enters_on_the_left_above_and_z_leaves_on_the_right_below() -> None:
    at, (first, second) = places(picture(2)), [middle for middle, letter in circles(picture(2)) if letter == "f"]
    ((x, above),), ((z, below),) = at["x"], at["z"]
    assert x < first[0] < z
    assert first[1] - 0.3 < above < first[1]
    assert second[1] - 0.3 < below < second[1]
    assert len(at["residual"]) == 2


def test_title_and_legend() -> None:
    assert "mine" in texts(picture(2, title="mine"))
    assert "a transformer layer on 2 ranks" in texts(picture(2))
    assert "a transformer layer on 1 rank" in texts(picture(1))
    (legend,) = [text for text in texts(picture(2)) if text.startswith("grey:")]
    assert legend.index("the same on every rank") < legend.index("in colour") < legend.index("its own heads")


def test_with_one_rank_nothing_is_sent() -> None:
    assert places(picture(1)).keys() >= {"attention", "MLP"}
    assert not any(", rank " in text for text in texts(picture(1)))
    assert sum("nothing sent" in text for text in texts(picture(1))) == 4


def test_blocks_are_shared_out_and_norms_and_biases_belong_to_everybody() -> None:
    drawn = picture(4)
    filled = [patch.get_facecolor()[:3] for patch in drawn.axes[0].patches if patch.get_facecolor()[3]]
    assert all(filled.count(rank_fill(rank)) == 2 for rank in range(4))
    assert filled.count(to_rgb(NOBODY)) == 4
    names = [text for text in texts(drawn) if ", rank " in text]
    assert names == [f"{name}, rank {rank}" for name in ("attention", "MLP") for rank in range(4)]


def test_the_residual_leaves_before_the_norm_or_behind_it() -> None:
    def leaves(post):
        lines = [line for line in picture(2, post=post).axes[0].lines if len(line.get_xdata()) == 3]
        return [line.get_xdata()[0] for line in lines]

    drawn = picture(2)
    for line in (line for line in drawn.axes[0].lines if len(line.get_xdata()) == 3):
        ((x, y),) = [m for m, sign in circles(drawn) if sign == "+" and abs(m[1] - line.get_ydata()[0]) < 0.01]
        assert line.get_xdata()[-1] == x
        assert list(line.get_ydata())[1:] == pytest.approx([y - 0.72] * 2)
    f = min(middle[0] for middle, letter in circles(drawn) if letter == "f")
    assert all(x < f - 0.17 for x in leaves(post=True))
    norm = [patch.get_x() for patch in picture(2).axes[0].patches if patch.get_facecolor()[:3] == to_rgb(NOBODY)][0]
    assert all(x < norm for x in leaves(post=False))
    assert all(norm < x for x in leaves(post=True))
    assert len(leaves(post=True)) == 2
