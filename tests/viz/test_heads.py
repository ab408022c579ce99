"""The picture of heads on ranks: every head by its number in its rank's colour, copies dashed, inside the frame."""

import pytest

from tests.viz.pictures import assert_texts_inside, places, texts
from tplab import viz
from tplab.viz.colors import rank_fill

GROUPED = [{"q": [2 * rank, 2 * rank + 1], "k": [rank // 2], "v": [rank // 2]} for rank in range(4)]
WHOLE = [{"q": [0, 1], "k": [0, 1], "v": [0, 1]}, {"q": [2, 3], "k": [2, 3], "v": [2, 3]}]
ONE_EACH = [{"q": [rank], "k": [0], "v": [0]} for rank in range(8)]
PICTURES = {
    name: lambda held=held: viz.heads(held, title="which head lives where")
    for name, held in {"grouped": GROUPED, "whole": WHOLE, "one each": ONE_EACH}.items()
}


def rectangles(picture, dashed):
    drawn = [patch for axes in picture.axes for patch in axes.patches if not patch.get_hatch()]
    if dashed:
        return [patch for patch in drawn if patch.get_linestyle() == "--"]
    return [patch for patch in drawn if patch.get_facecolor()[3]]


def test_every_head_stands_in_its_row_on_its_rank_in_that_ranks_colour() -> None:
    picture = viz.heads(GROUPED)
    shown = texts(picture)
    heads = [f"{row}{head}" for held in GROUPED for row in held for head in held[row]]
    assert [text for text in shown if text[0] in "qkv" and len(text) == 2] == heads
    assert {f"rank {rank}" for rank in range(4)} <= set(shown)
    filled = [patch.get_facecolor() for patch in rectangles(picture, dashed=False)]
    assert filled == [(*rank_fill(rank), 1.0) for rank in range(4) for _ in range(4)]


def spans(picture, dashed=False):
    """(left, right, middle) of every drawn rectangle."""
    boxes = [patch.get_bbox() for patch in rectangles(picture, dashed)]
    return [(box.x0, box.x1, (box.y0 + box.y1) / 2) for box in boxes]


def test_ranks_go_from_left_to_right_rows_from_above_and_every_text_stands_where_it_belongs() -> None:
    picture = viz.heads(GROUPED)
    boxes, at = spans(picture), places(picture)
    first = boxes[0]
    assert [box[0] for box in boxes[::4]] == sorted(box[0] for box in boxes[::4])
    assert first[2] < boxes[2][2] < boxes[3][2]  # q above k above v: y grows downwards
    assert [at[row][0][1] for row in "qkv"] == pytest.approx([boxes[place][2] for place in (0, 2, 3)])
    assert all(at[row][0][0] < first[0] for row in "qkv")
    for rank in range(4):
        left, right = boxes[4 * rank][0], boxes[4 * rank + 1][1]
        assert at[f"rank {rank}"] == [pytest.approx(((left + right) / 2, at["rank 0"][0][1]))]
    assert at["rank 0"][0][1] < first[2]
    names = [f"{row}{head}" for held in GROUPED for row in held for head in held[row]]
    for name, (left, right, middle) in zip(names, boxes, strict=True):
        assert any(place == pytest.approx(((left + right) / 2, middle)) for place in at[name])


def test_a_dashed_frame_lies_inside_its_copy() -> None:
    picture = viz.heads([{"q": [rank], "k": [0, 1]} for rank in range(2)])  # two copies side by side on each rank
    copies = [box for place, box in enumerate(spans(picture)) if place % 3]
    frames = spans(picture, dashed=True)
    for (left, right, middle), frame in zip(copies, frames, strict=True):
        assert left < frame[0] < left + 0.1
        assert right - 0.1 < frame[1] < right
        assert frame[2] == pytest.approx(middle)


def test_the_title_is_that_which_is_given_or_says_how_many_ranks_there_are() -> None:
    assert "mine" in texts(viz.heads(WHOLE, title="mine"))
    assert "heads on 2 ranks" in texts(viz.heads(WHOLE))


def test_a_long_title_and_the_note_fit_and_a_rank_may_hold_no_head() -> None:
    assert_texts_inside(viz.heads(GROUPED, title="a long title, " * 12))
    picture = viz.heads([{"q": [0], "k": [0]}, {"q": [1], "k": []}])
    assert [text for text in texts(picture) if text[0] in "qk" and len(text) == 2] == ["q0", "k0", "q1"]
    shared = viz.heads(GROUPED)
    ((_, y),) = next(at for text, at in places(shared).items() if "copy" in text)
    assert y > max(patch.get_bbox().y1 for patch in rectangles(shared, dashed=False)) + 0.05
    assert y < shared.get_figheight() - 0.1


def test_the_heads_of_a_row_share_the_width_so_that_k_lies_below_its_queries() -> None:
    boxes = rectangles(viz.heads(GROUPED[:1]), dashed=False)
    q0, q1, k0, v0 = ((box.get_x(), box.get_x() + box.get_width()) for box in boxes)
    assert k0 == pytest.approx((q0[0], q1[1]))
    assert v0 == pytest.approx(k0)
    assert q0[1] == pytest.approx(q1[0])


def test_copies_are_dashed_and_explained_and_nothing_else_is() -> None:
    assert len(rectangles(viz.heads(GROUPED), dashed=True)) == 8
    assert any("copy" in text for text in texts(viz.heads(GROUPED)))
    assert rectangles(viz.heads(WHOLE), dashed=True) == []
    assert not any("copy" in text for text in texts(viz.heads(WHOLE)))
