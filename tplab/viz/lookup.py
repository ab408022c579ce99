"""A look-up in a table that is sharded by rows, with what each rank finds, where it puts zeros, and the sum."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from torch import Tensor

from tplab.viz.blocks import block, centered, rectangle, shape_text, text_width
from tplab.viz.colors import FAINT, INK, NOBODY, Picture, canvas, on_white, style

_ROW = 0.26  # inches: the height of a row
_GAP = 0.34  # between two ranks, with room for a sign
_MARGIN = 0.14


def lookup(
    ids: Sequence[int], parts: Sequence[Mapping[str, Any]], *, vocab_size: int, tokens: Sequence[str]
) -> Picture:
    """Draw a masked look-up of `ids`, with each rank's rows on top, its masked vectors below, and the sum on the right.

    parts:      each rank's results: "start", the id of its first row; "table" [rows, h], its rows;
                "foreign" [s], True where another rank has the row; "vectors" [s, h], before the sum; "out"
                [s, h], after the sum
    vocab_size: rows with this id or a higher one are drawn as padding
    tokens:     the names of the ids, shown next to them
    """
    tables = [part["table"] for part in parts]
    cell = max(0.3, 0.12 + max(text_width(_text(value), 9) for t in tables for value in t.flatten().tolist()))
    side = 0.08 + max(text_width(f"row {len(tables[0]) - 1}", 8), text_width(f"id {vocab_size - 1}", 8))
    names = [f"id {i}  {token}" for i, token in zip(ids, tokens, strict=True)]
    left = 0.12 + max(text_width(name, 9.5) for name in names)
    grid = cell * tables[0].shape[1]
    owners = _owners([part["foreign"] for part in parts])
    top = 0.66
    below = top + _ROW * len(tables[0]) + 0.56
    total = max(grid, text_width("on every rank", 8))
    width = _MARGIN + left + len(parts) * (side + grid + _GAP) + total + _MARGIN
    caption = f"look-up of ids {list(ids)} on {len(parts)} ranks"
    with style():
        picture, axes = canvas(width, below + _ROW * len(ids) + 0.32, caption)
        for place, name in enumerate(names):
            axes.text(_MARGIN, below + (place + 0.5) * _ROW, name, fontsize=9.5, va="center")
        x = _MARGIN + left
        for rank, (part, table) in enumerate(zip(parts, tables, strict=True)):
            _draw_table(axes, x + side, top, cell, rank, part["start"], table, vocab_size)
            mine = [rank if owner == rank else None for owner in owners]
            rows = [i - part["start"] if owner == rank else None for i, owner in zip(ids, owners, strict=True)]
            _draw_vectors(axes, x + side, below, cell, part["vectors"], mine, rows)
            sign = "+" if rank < len(parts) - 1 else "="
            centered(axes, x + side + grid + _GAP / 2, below + len(ids) * _ROW / 2, sign, 14)
            x += side + grid + _GAP
        middle, out = x + total / 2, parts[0]["out"]
        centered(axes, middle, below - 0.32, "g: the sum", 9, bold=True)
        centered(axes, middle, below - 0.13, "on every rank", 8, color=FAINT)
        _draw_vectors(axes, middle - grid / 2, below, cell, out, owners, [None] * len(ids))
        foot = below + len(ids) * _ROW + 0.14
        centered(axes, middle, foot, shape_text(out.shape), 8, color=FAINT)
    each = ", ".join(f"id {i} on rank {owner}" for i, owner in zip(ids, owners, strict=True))
    picture.description = f"Each rank looks up the ids whose rows it stores, and has zeros for the others: {each}."
    return picture


def _draw_table(
    axes: Axes, x: float, y: float, cell: float, rank: int, start: int, table: Tensor, vocab_size: int
) -> None:
    middle = x + cell * table.shape[1] / 2
    centered(axes, middle, y - 0.34, f"rank {rank}", 9.5, bold=True)
    centered(axes, middle, y - 0.14, shape_text(table.shape), 8, color=FAINT)
    for row, values in enumerate(table.tolist()):
        padding = start + row >= vocab_size
        name = "pad" if padding else f"id {start + row}"
        at = y + row * _ROW
        axes.text(x - 0.05, at + _ROW / 2, name, fontsize=8, color=FAINT if padding else INK, ha="right", va="center")
        _draw_row(axes, x, at, cell, None if padding else rank, values, faint=padding)


def _draw_vectors(
    axes: Axes,
    x: float,
    y: float,
    cell: float,
    vectors: Tensor,
    ranks: Sequence[int | None],
    rows: Sequence[int | None],
) -> None:
    """Draw one vector per position, in the color of the rank that found it, with its row in that rank's table."""
    for place, (values, rank, row) in enumerate(zip(vectors.tolist(), ranks, rows, strict=True)):
        at = y + place * _ROW
        if row is not None:
            axes.text(x - 0.05, at + _ROW / 2, f"row {row}", fontsize=8, ha="right", va="center")
        _draw_row(axes, x, at, cell, rank, values, faint=rank is None)


def _draw_row(
    axes: Axes, x: float, y: float, cell: float, rank: int | None, values: Sequence[float], *, faint: bool
) -> None:
    width, height = cell * len(values), _ROW * 0.92
    if rank is None:
        rectangle(axes, x, y, width, height, NOBODY, FAINT, 0.6)
    else:
        block(axes, x, y, width, height, rank, (1, len(values)))
    for column, value in enumerate(values):
        at = x + (column + 0.5) * cell, y + 0.46 * _ROW
        color = FAINT if faint else INK
        centered(axes, *at, _text(value), 9, color=color, va="center_baseline", bbox=on_white(0.55))


def _owners(foreign: Sequence[Tensor]) -> list[int]:
    """Return the rank that has the row, for each position. Raises ValueError if no rank has it."""
    return [list(seen).index(False) for seen in zip(*(mask.tolist() for mask in foreign), strict=True)]


def _text(value: float) -> str:
    return f"{value:g}".replace("-", "−")
