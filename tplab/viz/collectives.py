"""The data of each rank before and after a collective, and what moves around a ring, step by step.

Both pictures color each number by the ranks that it came from, which the number itself encodes. Rank r's values
have a digit only at the decimal place 10^r (3, 30, 300, 3000, ...), so the sum 3303 has terms from ranks 0, 2 and 3.
"""

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes

from tplab.common import units
from tplab.viz.blocks import arrow, centered, rectangle, text_width
from tplab.viz.colors import FAINT, NOBODY, Picture, canvas, on_white, rank_color, rank_fill, rank_hatch, style

_HEIGHT = 0.27  # height of a cell, in inches
_MARGIN = 0.12


def collective(results: Sequence[Any], *, name: str) -> Picture:
    """Draw what every rank had before and after a collective, given the (before, after) that `launch` returns.

    `before` and `after` are each a tensor or a list of tensors, drawn as one column of cells, or None if a rank has
    nothing.
    """
    sides = [[_texts(result[side]) for result in results] for side in (0, 1)]
    p, rows = len(results), max(len(column) for side in sides for column in side) or 1
    texts = [text for side in sides for column in side for text in column]
    cell = max(0.5, 0.16 + text_width(max(texts, key=len, default=""), 9))
    half, between = p * cell + (p - 1) * 0.16, max(0.8, 0.3 + text_width(name, 10))
    top, ranks = 0.06, units.count(p, "rank")
    with style():
        width = 2 * (_MARGIN + half) + between
        picture, axes = canvas(width, top + 0.62 + rows * _HEIGHT + 0.1, f"{name} on {ranks}")
        for side, columns in enumerate(sides):
            left = _MARGIN + side * (half + between)
            axes.text(left, top + 0.1, ("before", "after")[side], fontsize=9, color=FAINT, va="center")
            for rank, column in enumerate(columns):
                x = left + rank * (cell + 0.16)
                centered(axes, x + cell / 2, top + 0.34, f"rank {rank}", 9, bold=True)
                for row, text in enumerate(column):
                    _cell(axes, x, top + 0.5 + row * _HEIGHT, cell, text)
                if not column:
                    _nothing(axes, x, top + 0.5, cell)
        x, y = _MARGIN + half, top + 0.5 + rows * _HEIGHT / 2
        centered(axes, x + between / 2, y - 0.16, name, 9.5, bold=True)
        arrow(axes, (x + 0.12, y), (x + between - 0.12, y))
    each = "; ".join(
        f"rank {r} has {', '.join(a) or 'nothing'} and then {', '.join(b) or 'nothing'}"
        for r, (a, b) in enumerate(zip(*sides, strict=True))
    )
    picture.description = f"What each of {ranks} holds before and after {name}: {each}."
    return picture


def ring(results: Sequence[Sequence[Any]], *, title: str) -> Picture:
    """Draw partial sums that travel around a ring.

    results[r] has rank r's sum, a single number, at the start and after each step. Arrows point to the right neighbor.
    """
    p, steps = len(results), len(results[0])
    numbers = [[str(round(float(value))) for value in held] for held in results]  # [rank][step]
    width = max(0.62, 0.1 + text_width(max((text for held in numbers for text in held), key=len), 8.5))
    left, step_height, gap, top = 0.72, 0.78, 0.34, 0.62
    with style():
        picture, axes = canvas(left + p * (width + gap) + 0.1, top + steps * step_height - 0.4, title, title)
        for rank in range(p):
            x = left + rank * (width + gap) + width / 2
            centered(axes, x, top - 0.14, f"rank {rank}", 9, bold=True)
        for step in range(steps):
            y = top + step * step_height
            axes.text(_MARGIN, y + 0.15, f"step {step}" if step else "start", fontsize=9, va="center")
            for rank, held in enumerate(numbers):
                x = left + rank * (width + gap)
                _cell(axes, x, y, width, held[step], 8.5)
                if step + 1 < steps:
                    _to_the_right(axes, x + width / 2, y + 0.32, width + gap, step_height - 0.4, rank == p - 1, left)
    rows = [f"rank {rank} has {', '.join(held)}" for rank, held in enumerate(numbers)]
    picture.description = f"The start and {steps - 1} steps, with arrows to the right: {'; '.join(rows)}."
    return picture


def _to_the_right(axes: Axes, x: float, y: float, across: float, down: float, last: bool, left: float) -> None:
    """Draw an arrow to the right neighbor. The last rank's arrow leaves the picture and comes back in on the left."""
    if not last:
        arrow(axes, (x, y), (x + across - 0.1, y + down))
        return
    axes.plot([x, x + 0.42 * across], [y, y + 0.42 * down], color=FAINT, linewidth=1, linestyle=(0, (3, 2)))
    start = left - 0.02
    arrow(axes, (start - 0.28, y + 0.45 * down), (start + 0.2, y + down), dashed=True)


def _cell(axes: Axes, x: float, y: float, width: float, text: str, size: float = 9) -> None:
    """Draw a number on the colors of the ranks that it came from, side by side."""
    sources = _sources(text)
    if not sources:
        rectangle(axes, x, y, width, _HEIGHT, NOBODY, "white", 0.9)
    for index, rank in enumerate(sources):
        each = width / len(sources)
        at = x + index * each
        rectangle(axes, at, y, each, _HEIGHT, rank_fill(rank))
        rectangle(axes, at, y, each, _HEIGHT, "none", rank_color(rank) + "66", 0, hatch=rank_hatch(rank))
    rectangle(axes, x, y, width, _HEIGHT, "none", FAINT)
    white = on_white(0.6) if text else None
    centered(axes, x + width / 2, y + _HEIGHT / 2, text, size, va="center_baseline", bbox=white)


def _nothing(axes: Axes, x: float, y: float, width: float) -> None:
    rectangle(axes, x, y, width, _HEIGHT, "none", FAINT, 0.9, linestyle=(0, (2, 2)))
    centered(axes, x + width / 2, y + _HEIGHT / 2, "–", 9, color=FAINT)


def _texts(value: Any) -> list[str]:
    """Return the elements of a tensor, or of a list of tensors, as rounded integers in a single list."""
    if value is None:
        return []
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return [str(round(number)) for tensor in tensors for number in torch.as_tensor(tensor).flatten().tolist()]


def _sources(text: str) -> list[int]:
    """Decode a sum of multiples of 10**rank, and return the ranks whose digit isn't zero."""
    return [place for place, digit in enumerate(reversed(text.lstrip("-"))) if digit != "0"]
