"""The path of a token, part one: from its ID to the logits of the next word, on every rank, one picture per step.

A rank's lane has a place for each row of its table, so that a row and its logit are at the same height. The token that
the picture follows is gold. A vector has its rank's color if it's different on every rank, and it's gray if it's the
same on every rank. Whatever belongs to the backward pass is red.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from tplab.viz.blocks import arrow, centered, rectangle, text_width
from tplab.viz.colors import FAINT, GOLD, INK, NOBODY, RED, WIDTH, Picture, canvas, rank_color, rank_fill, style, tint
from tplab.viz.controls import Frames

_CELL = 0.4  # inches, like everything here: the width of an element
_ROW = 0.21
_MARGIN = 0.12
_HEAD, _FOOT, _GAP = 0.96, 0.42, 0.42  # above the first lane, below the last, and between two lanes

# The left ends of everything in a lane
TABLE, FOUND, G, X, BODY, Y, F, ZERO = 0.95, 2.25, 3.26, 3.55, 4.5, 4.82, 5.78, 6.72
BAR = 0.5  # the width of the longest bar
STEPS = 9


def token_way(way: Any) -> Frames:
    """Return pictures that follow a token through the model, for `viz.play`.

    way: the token's path, as returned by `tplab.tensor.record_token`
    """
    return Frames(STEPS, partial(_draw, way))


def _captions(way: Any) -> list[str]:
    word, token, target = way.words[way.token], way.token, way.words[way.target]
    owner = next(rank for rank, seen in enumerate(way.ranks) if not seen.foreign)
    mine, forward, backward = way.ranks[owner], way.forward[1], way.backward[1]
    return [
        f'Every rank has all the IDs. Let\'s follow "{word}", whose ID is {token}.',
        f"Only rank {owner} has row {token}. For all other ranks, the ID is foreign.",
        f"Rank {owner} looks up row {token} − {mine.start} = {mine.row}. All others look up row 0, a wrong vector!",
        f"So every rank except rank {owner} replaces its vector by zeros.",
        f"g adds the vectors of all ranks. It's the only message so far, with {forward} bytes for the whole sentence.",
        "The rest of the model does the same on every rank, and turns x into y.",
        "f sends nothing. Each rank multiplies y by its own rows, the same ones as before.",
        f'No rank has all {len(way.words)} logits. The next word is "{target}". To be continued in chapter 08!',
        f"Backward, f adds the gradients of y ({backward} bytes). Both gradients of row {token} are on rank {owner}.",
    ]


def _draw(way: Any, step: int) -> Picture:
    p, rows = len(way.ranks), len(way.ranks[0].table)
    sent = (step >= 4) + (step >= 8)
    with style():
        stage = _Lanes(
            p=p, rows=rows, title=f"the path of a token on {p} ranks", caption=_captions(way)[step],
            counter=f"messages so far: {sent}",
        )  # fmt: skip
        stage.words([way.words[i] for i in way.ids], way.ids, way.place)
        for rank in range(p):
            _forward(stage, way, rank, step)
            if step == STEPS - 1:
                _backward(stage, way, rank)
        if step >= 4:
            stage.operator(G, "g", active=step == 4)
        if step >= 6:
            stage.operator(F, "f", active=step == 8, red=step == 8)
    stage.picture.description = _captions(way)[step]
    return stage.picture


def _forward(stage: "_Lanes", way: Any, rank: int, step: int) -> None:
    seen, top, middle = way.ranks[rank], stage.top(rank), stage.rows / 2 - 0.5
    for row, values in enumerate(seen.table.tolist()):
        number = seen.start + row
        padding, mine = number >= len(way.words), number == way.token
        name = "padding" if padding else f"{way.words[number]} {number}"
        at = top + (row + 0.46) * _ROW
        stage.write(TABLE - 0.06, at, name, ha="right", color=INK if mine else FAINT, bold=mine)
        looked_up = step >= 2 and row == seen.row
        stage.vector(
            TABLE, rank, values, row=row, mine=None if padding else rank, gold=mine and step >= 1, faint=padding,
            red=looked_up and seen.foreign and step == 2,
        )  # fmt: skip
    if step == 1 and seen.foreign:
        stage.write(FOUND, stage.middle(rank), "not mine", size=9)
    if step == 1 and not seen.foreign:
        y = top + (seen.row + 0.5) * _ROW
        arrow(stage.axes, (FOUND + 0.3, y), (TABLE + 2 * _CELL, y), color=GOLD, width=1.3)
    if 2 <= step < STEPS - 1:
        values, wrong = (seen.found if step == 2 else seen.term).tolist(), seen.foreign and step == 2
        name = f"row {seen.row}" if step == 2 else "zeros" if seen.foreign else "its term"
        stage.vector(
            FOUND, rank, values, row=middle, mine=None if seen.foreign and step > 2 else rank, name=name, red=wrong,
            gold=not seen.foreign, faint=seen.foreign and step > 2,
        )  # fmt: skip
        if step == 2:
            start = (TABLE + 2 * _CELL + 0.02, top + (seen.row + 0.46) * _ROW)
            stop = FOUND - 0.02, top + (middle + 0.46) * _ROW
            arrow(stage.axes, start, stop, color=RED if wrong else GOLD, width=1.3)
    if step >= 4:
        stage.vector(X, rank, seen.x.tolist(), row=middle, name="x", gold=step == 4)
    if step >= 5:
        rectangle(stage.axes, BODY, top, 0.16, stage.rows * _ROW, NOBODY, FAINT)
        centered(stage.axes, BODY + 0.08, stage.middle(rank), "the rest", 7, rotation=90)
        if step < STEPS - 1:
            stage.vector(Y, rank, seen.y.tolist(), row=middle, name="y", gold=step == 5)
    if step >= 6:
        names = [way.words[i] if i < len(way.words) else "" for i in range(seen.start, seen.start + stage.rows)]
        finite = [abs(v) for each in way.ranks for v in each.logits.tolist() if abs(v) != float("inf")]
        target = way.target - seen.start if step >= 7 else None
        stage.bars(
            ZERO, rank, seen.logits.tolist(), names, width=BAR, largest=max(finite), gold=target,
            numbers=step < STEPS - 1,
        )  # fmt: skip


def _backward(stage: "_Lanes", way: Any, rank: int) -> None:
    """Draw the gradients of y, and the two gradients of the token's row on the rank that holds it."""
    seen, middle = way.ranks[rank], stage.rows / 2 - 0.5
    stage.vector(Y, rank, seen.dy.tolist(), row=middle, red=True, name="dy")
    below = stage.top(rank) + (middle + 1.4) * _ROW
    stage.write(Y + _CELL, below, f"own: {_pair(seen.dy_own)}", color=RED, ha="center", size=7)
    if not seen.foreign:
        row = way.token - seen.start
        at, x = stage.top(rank) + (row + 0.46) * _ROW, TABLE + 2 * _CELL
        for name, gradient, offset in (("look-up", seen.d_lookup, -0.1), ("logits", seen.d_output, 0.1)):
            arrow(stage.axes, (FOUND - 0.14, at + offset), (x, at + offset / 3), color=RED, width=1.3)
            stage.write(FOUND - 0.12, at + offset, f"{name}: {_pair(gradient[row])}", color=RED, size=7)


def _pair(values: Any) -> str:
    return ", ".join(f"{value:+.2f}".replace("-", "−") for value in values.tolist())


class _Lanes:
    """The picture of p ranks: one lane per rank, one below the other, with vectors, rows, bars and operators."""

    def __init__(self, *, p: int, rows: int, title: str, caption: str, counter: str) -> None:
        self.p, self.rows = p, rows
        height = _HEAD + p * rows * _ROW + (p - 1) * _GAP + _FOOT
        self.picture: Picture
        self.picture, self.axes = canvas(WIDTH, height, title, title)
        self.axes.text(WIDTH - _MARGIN, 0.2, counter, fontsize=9, ha="right", va="center", color=FAINT)
        self.axes.text(_MARGIN, height - 0.16, caption, fontsize=9.5, va="center")
        for rank in range(p):
            top = self.top(rank)
            fill, edge = (tint(rank_color(rank), strength) for strength in (0.06, 0.5))
            rectangle(self.axes, _MARGIN / 2, top - 0.3, WIDTH - _MARGIN, rows * _ROW + 0.38, fill, edge, zorder=0)
            self.write(_MARGIN, top - 0.16, f"rank {rank}", bold=True)

    def top(self, rank: int) -> float:
        """Return where the first row of a lane begins."""
        return _HEAD + 0.06 + rank * (self.rows * _ROW + _GAP)

    def middle(self, rank: int) -> float:
        return self.top(rank) + self.rows * _ROW / 2

    def write(
        self, x: float, y: float, text: str, *, color: str = FAINT, size: float = 8, bold: bool = False,
        ha: str = "left",
    ) -> None:  # fmt: skip
        weight = "bold" if bold else "normal"
        self.axes.text(x, y, text, fontsize=size, color=color, fontweight=weight, ha=ha, va="center")

    def words(self, words: Sequence[str], ids: Sequence[int], gold: int) -> None:
        """Write a sentence above the lanes, with the ids, and with a gold box around one of the words."""
        x = _MARGIN
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
        y, width = self.top(rank) + row * _ROW, _CELL * len(values)
        color = FAINT if mine is None else rank_color(mine)
        rectangle(self.axes, x, y, width, _ROW * 0.92, rank_fill(mine), color, 0.6)
        if gold or red:
            edge = GOLD if gold else RED
            rectangle(self.axes, x, y, width, _ROW * 0.92, "none", edge, 1.8, zorder=3)
        for column, value in enumerate(values):
            at, ink = (x + (column + 0.5) * _CELL, y + 0.46 * _ROW), FAINT if faint else RED if red else INK
            centered(self.axes, *at, _number(value), 8, color=ink, va="center_baseline")
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
            y = self.top(rank) + row * _ROW
            if abs(value) == float("inf"):
                self.write(x, y + _ROW / 2, "−∞", ha="center")
                continue
            length = width * value / largest
            fill, edge = tint(rank_color(rank), 0.6), GOLD if row == gold else "none"
            rectangle(self.axes, x, y + 0.03, length, _ROW - 0.06, fill, edge, 1.6, zorder=2)
            at, side = (x - 0.05, "right") if value >= 0 else (x + 0.05, "left")  # opposite the bar
            self.write(at, y + _ROW / 2, f"{name} {_number(value)}" if numbers else name, size=7, color=INK, ha=side)

    def operator(self, x: float, name: str, *, active: bool, red: bool = False) -> None:
        """Draw an operator across all lanes: filled if it sends something, and open if it sends nothing."""
        top, bottom = self.top(0) - 0.2, self.top(self.p - 1) + self.rows * _ROW
        color = RED if red else INK
        rectangle(self.axes, x, top, 0.13, bottom - top, color if active else "white", color, 1, zorder=3)
        self.write(x + 0.065, top - 0.1, name, ha="center", bold=True, color=color, size=9)


def _number(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"
    return ("0" if text == "-0" else text).replace("-", "−")
