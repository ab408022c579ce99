"""The attention heads on each rank, with a row of Q heads, and the K and V heads that they use below it.

rank 0        rank 1
q0   q1       q2   q3
k0            k0            four Q heads share one K head, so both ranks have a copy of it
v0            v0
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from tplab.viz.blocks import block, centered, label, rectangle
from tplab.viz.colors import FAINT, INK, WIDTH, Picture, canvas, style

_ROW = 0.5  # inches from one row of heads to the next
_HEIGHT = 0.4
_GAP = 0.14  # between two ranks
_LEFT = 0.5


def heads(ranks: Sequence[Mapping[str, Sequence[int]]], *, title: str) -> Picture:
    """Draw each rank's heads by number, one row per kind: {"q": [0, 1], "k": [0], "v": [0]}.

    A head that is on more than one rank has a dashed frame.
    """
    rows = list(ranks[0])
    owners = Counter((row, head) for held in ranks for row in rows for head in held[row])
    shared = any(count > 1 for count in owners.values())
    each = (WIDTH - _LEFT - 0.15 - _GAP * (len(ranks) - 1)) / len(ranks)
    top = 0.72
    height = top + _ROW * len(rows) + (0.26 if shared else 0.04)
    with style():
        picture, axes = canvas(WIDTH, height, title, title)
        for line, row in enumerate(rows):
            axes.text(_LEFT - 0.14, top + line * _ROW + _HEIGHT / 2, row, fontsize=10.5, ha="right", va="center")
        for rank, held in enumerate(ranks):
            x = _LEFT + rank * (each + _GAP)
            centered(axes, x + each / 2, top - 0.17, f"rank {rank}", 9.5)
            for line, row in enumerate(rows):
                wide = each / max(len(held[row]), 1)
                y = top + line * _ROW
                for place, number in enumerate(held[row]):
                    left = x + place * wide
                    block(axes, left, y, wide, _HEIGHT, rank)
                    if owners[row, number] > 1:
                        inside = left + 0.045, y + 0.045, wide - 0.09, _HEIGHT - 0.09
                        rectangle(axes, *inside, "none", INK, 1.1, linestyle="--")
                    label(axes, left + wide / 2, y + _HEIGHT / 2, f"{row}{number}", 9, bold=True)
        if shared:
            note = "dashed: a copy; the same head is on more than one rank"
            axes.text(_LEFT, height - 0.16, note, fontsize=8.5, color=FAINT, va="center")
    names = [", ".join(f"{row}{number}" for row in rows for number in held[row]) for held in ranks]
    told = "; ".join(f"rank {rank} has {its}" for rank, its in enumerate(names))
    picture.description = f"The heads on each rank: {told}."
    return picture
