"""The picture of a program: every box with its chapter, arrows between neighbours, hatches where ranks talk."""

from matplotlib.patches import FancyArrow, Rectangle

from tests.viz.pictures import texts
from tplab import viz

ROWS = {
    "data": [("text", "on this machine"), ("own windows", "15.2")],
    "forward": [("embedding", "7"), ("attention", "6"), ("MLP", "5"), ("loss", "8")],
    "step": [("AdamW", "15.1, 15.3")],
}
PICTURES = {"a program": lambda: viz.program(ROWS, talking={"embedding", "loss"}, title="a program")}


def test_every_box_stands_there_with_what_is_below_it_joined_by_arrows_and_hatched_where_it_talks():
    picture = PICTURES["a program"]()
    names = {text for row, boxes in ROWS.items() for text in (row, *(word for box in boxes for word in box))}
    assert names | {"talks to other ranks"} <= set(texts(picture))
    patches = picture.axes[0].patches
    assert len([patch for patch in patches if isinstance(patch, FancyArrow)]) == 1 + 3
    hatched = [patch for patch in patches if isinstance(patch, Rectangle) and patch.get_hatch()]
    assert len(hatched) == 2 + 1, "and the one that explains it"
    assert "talks to other ranks" not in texts(viz.program(ROWS))
