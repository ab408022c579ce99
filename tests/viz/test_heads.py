"""The picture of heads on ranks: every head by its number in its rank's colour, copies dashed."""

import pytest

from tests.viz.pictures import places, texts
from tplab import viz
from tplab.viz.colors import rank_fill

GROUPED = [{"q": [2 * rank, 2 * rank + 1], "k": [rank // 2], "v": [rank // 2]} for rank in range(4)]
WHOLE = [{"q": [0, 1], "k": [0, 1], "v": [0, 1]}, {"q": [2, 3], "k": [2, 3], "v": [2, 3]}]
PICTURES = {
    "grouped": lambda: viz.heads(GROUPED, title="which head lives where"),
    "one each": lambda: viz.heads([{"q": [rank], "k": [0], "v": [0]} for rank in range(8)]),
}


def spans(picture, dashed=False):
    """(left, right, middle, colour) of every head, or of every dashed frame."""
    drawn = [patch for patch in picture.axes[0].patches if not patch.get_hatch()]
    drawn = [patch for patch in drawn if (patch.get_linestyle() == "--" if dashed else patch.get_facecolor()[3])]
    found = [(patch.get_bbox(), patch.get_facecolor()[:3]) for patch in drawn]
    return [(box.x0, box.x1, (box.y0 + box.y1) / 2, color) for box, color in found]


def test_every_head_stands_in_its_row_on_its_rank_in_that_ranks_colour() -> None:
    picture = viz.heads(GROUPED)
    at, heads = places(picture), spans(picture)
    names = [f"{row}{head}" for held in GROUPED for row in held for head in held[row]]
    assert [text for text in texts(picture) if text[0] in "qkv" and len(text) == 2] == names
    for number, (name, (left, right, middle, color)) in enumerate(zip(names, heads, strict=True)):
        assert color == rank_fill(number // 4)
        assert any(place == pytest.approx(((left + right) / 2, middle)) for place in at[name])


def test_copies_are_dashed_and_explained_and_nothing_else_is() -> None:
    picture = viz.heads([{"q": [rank], "k": [0, 1]} for rank in range(2)])  # two copies side by side on each rank
    copies = [head for place, head in enumerate(spans(picture)) if place % 3]
    assert [frame[2] for frame in spans(picture, dashed=True)] == pytest.approx([head[2] for head in copies])
    assert any("copy" in text for text in texts(picture))
    whole = viz.heads(WHOLE)
    assert spans(whole, dashed=True) == []
    assert not any("copy" in text for text in texts(whole))
