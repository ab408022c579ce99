"""The picture of a program: every box with its chapter, arrows between neighbours, hatches where ranks talk."""

from matplotlib.patches import FancyArrow, Rectangle

from tests.viz.pictures import texts
from tplab import viz

ROWS = {
    "data": [("text", "on this machine"), ("own windows", "15.2")],
    "forward": [("embedding", "7"), ("attention", "6"), ("MLP", "5"), ("loss", "8")],
    "step": [("AdamW", "15.1, 15.3")],
}


def draw(**options):
    return viz.program(ROWS, talking={"embedding", "loss"}, title="a program", **options)


PICTURES = {"a program": draw}


def test_every_box_stands_there_with_what_is_below_it():
    shown = texts(draw())
    for row, boxes in ROWS.items():
        assert row in shown
        for name, below in boxes:
            assert name in shown
            assert below in shown
    assert "talks to other ranks" in shown


def test_neighbours_are_joined_by_arrows():
    arrows = [patch for patch in draw().axes[0].patches if isinstance(patch, FancyArrow)]
    assert len(arrows) == 1 + 3


def test_what_talks_is_hatched():
    hatched = [p for p in draw().axes[0].patches if isinstance(p, Rectangle) and p.get_hatch()]
    assert len(hatched) == 2 + 1  # and the one that explains it
    assert "talks to other ranks" not in texts(viz.program(ROWS))
