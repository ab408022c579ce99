"""The stage for a token's path: one lane per rank, one below the other, with vectors, rows, bars and operators.

A lane has a place for each row of its rank's table, so that a row and its logit are at the same height. The token that
the picture follows is gold. A vector has its rank's color if it's different on every rank, and it's gray if it's the
same on every rank. Whatever belongs to the backward pass is red.
"""

from collections.abc import Sequence

from tplab.viz.blocks import arrow, centered, rectangle, text_width
from tplab.viz.colors import FAINT, GOLD, INK, NOBODY, RED, WIDTH, Picture, canvas, rank_color, rank_fill, tint

CELL = 0.4  # inches, like everything here: the width of an element
ROW = 0.21
MARGIN = 0.12
_HEAD, _FOOT, _GAP = 0.96, 0.42, 0.42  # above the first lane, below the last, and between two lanes


class Lanes:
    """An empty stage for p ranks.

    with style():
        stage = Lanes(p=2, rows=5, title="...", caption="...", counter="messages: 1")
        stage.vector(1.2, rank=0, values=[0.1, 0.2], row=1)
        stage.picture.description = "..."
    """

    def __init__(self, *, p: int, rows: int, title: str, caption: str, counter: str) -> None:
        self.p, self.rows = p, rows
        height = _HEAD + p * rows * ROW + (p - 1) * _GAP + _FOOT
        self.picture: Picture
        self.picture, self.axes = canvas(WIDTH, height, title, title)
        self.axes.text(WIDTH - MARGIN, 0.2, counter, fontsize=9, ha="right", va="center", color=FAINT)
        self.axes.text(MARGIN, height - 0.16, caption, fontsize=9.5, va="center")
        for rank in range(p):
            top = self.top(rank)
            fill, edge = (tint(rank_color(rank), strength) for strength in (0.06, 0.5))
            rectangle(self.axes, MARGIN / 2, top - 0.3, WIDTH - MARGIN, rows * ROW + 0.38, fill, edge, zorder=0)
            self.write(MARGIN, top - 0.16, f"rank {rank}", bold=True)

    def top(self, rank: int) -> float:
        """Return where the first row of a lane begins."""
        return _HEAD + 0.06 + rank * (self.rows * ROW + _GAP)

    def middle(self, rank: int) -> float:
        return self.top(rank) + self.rows * ROW / 2

    def write(
        self, x: float, y: float, text: str, *, color: str = FAINT, size: float = 8, bold: bool = False,
        ha: str = "left",
    ) -> None:  # fmt: skip
        weight = "bold" if bold else "normal"
        self.axes.text(x, y, text, fontsize=size, color=color, fontweight=weight, ha=ha, va="center")

    def words(self, words: Sequence[str], ids: Sequence[int], gold: int) -> None:
        """Write a sentence above the lanes, with the ids, and with a gold box around one of the words."""
        x = MARGIN
        for place, (word, number) in enumerate(zip(words, ids, strict=True)):
            box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": GOLD if place == gold else NOBODY}
            text = f"{word} {number}"
            self.axes.text(x + 0.05, 0.48, text, fontsize=8.5, va="center", bbox=box | {"linewidth": 1.4})
            x += 0.24 + text_width(text, 8.5)

    def vector(
        self, x: float, rank: int, values: Sequence[float], *, row: float, mine: int | None = None, gold: bool = False,
        faint: bool = False, red: bool = False, name: str = "",
    ) -> None:  # fmt: skip
        """Draw a vector in a lane, at the height of a row.

        mine: the rank to which its values belong, or None if they're the same on every rank
        name: what stands above it
        """
        y, width = self.top(rank) + row * ROW, CELL * len(values)
        color = FAINT if mine is None else rank_color(mine)
        rectangle(self.axes, x, y, width, ROW * 0.92, rank_fill(mine), color, 0.6)
        if gold or red:
            edge = GOLD if gold else RED
            rectangle(self.axes, x, y, width, ROW * 0.92, "none", edge, 1.8, zorder=3)
        for column, value in enumerate(values):
            at, ink = (x + (column + 0.5) * CELL, y + 0.46 * ROW), FAINT if faint else RED if red else INK
            centered(self.axes, *at, number(value), 8, color=ink, va="center_baseline")
        if name:
            self.write(x + width / 2, y - 0.1, name, ha="center", color=RED if red else FAINT)

    def bars(
        self, x: float, rank: int, values: Sequence[float], names: Sequence[str], *, width: float, largest: float,
        gold: int | None = None, numbers: bool = True,
    ) -> None:  # fmt: skip
        """Draw a horizontal bar for each row of a lane, to the right of x if it's positive, and name it.

        x:       where zero is
        largest: the absolute value that has this width
        numbers: whether the values stand next to the names
        """
        for row, (value, name) in enumerate(zip(values, names, strict=True)):
            y = self.top(rank) + row * ROW
            if abs(value) == float("inf"):
                self.write(x, y + ROW / 2, "−∞", ha="center")
                continue
            length = width * value / largest
            fill, edge = tint(rank_color(rank), 0.6), GOLD if row == gold else "none"
            rectangle(self.axes, x, y + 0.03, length, ROW - 0.06, fill, edge, 1.6, zorder=2)
            at, side = (x - 0.05, "right") if value >= 0 else (x + 0.05, "left")  # opposite the bar
            self.write(at, y + ROW / 2, f"{name} {number(value)}" if numbers else name, size=7, color=INK, ha=side)

    def operator(self, x: float, name: str, *, active: bool, red: bool = False) -> None:
        """Draw an operator across all lanes: filled if it sends something, and open if it sends nothing."""
        top, bottom = self.top(0) - 0.2, self.top(self.p - 1) + self.rows * ROW
        color = RED if red else INK
        rectangle(self.axes, x, top, 0.13, bottom - top, color if active else "white", color, 1, zorder=3)
        self.write(x + 0.065, top - 0.1, name, ha="center", bold=True, color=color, size=9)

    def arrow(self, start: tuple[float, float], stop: tuple[float, float], *, color: str = FAINT) -> None:
        arrow(self.axes, start, stop, color=color, width=1.3)


def number(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"
    return ("0" if text == "-0" else text).replace("-", "−")
