"""Small tensors with their values, each in the color of the rank that has it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from tplab.viz.blocks import block, centered, rectangle, shape_text, text_width
from tplab.viz.colors import FAINT, RED, WIDTH, Picture, canvas, on_white, style, tint

_MOST = 10  # rows and columns of a tensor
_CELL_HEIGHT = 0.27
_GAP = 0.38

_MOST_READ = 12  # a description lists the values of matrices with up to this many


@dataclass
class _Entry:
    label: str
    shape: str
    rank: int | None
    cells: list[list[str]]
    headings: Sequence[str] = ()  # above the columns, if there are as many
    correct: list[list[str]] | None = None  # what the cells should be; cells that differ are red

    @property
    def cell_width(self) -> float:
        texts = [*(text for row in self.cells for text in row), *self.headings]
        return max(0.3, 0.13 + text_width(max(texts, key=len), 9))

    @property
    def width(self) -> float:
        return max(self.cell_width * len(self.cells[0]), text_width(self.label, 10), text_width(self.shape, 9))

    @property
    def height(self) -> float:
        return 0.46 + _CELL_HEIGHT * len(self.cells) + (0.2 if self.headings else 0)


def matrices(
    tensors: Mapping[str, Any], *, headings: Sequence[str] = (), compare: Mapping[str, str] | None = None
) -> Picture:
    """Draw vectors and matrices with their values, side by side, in as many lines as needed.

    If the label of a matrix names a rank, as in "rank 1: A", the matrix has that rank's color.

    tensors:  by label, each with 1 to 10 rows and columns
    headings: names for the columns, shown above every matrix with that many columns
    compare:  {"yours": "correct"} draws the cells of "yours" red where they differ from those of "correct"

    Raises ValueError for a tensor that's larger or has more dimensions.
    """
    entries = [_entry(label, value) for label, value in tensors.items()]
    by_label = {entry.label: entry for entry in entries}
    for one, correct in (compare or {}).items():
        by_label[one].correct = by_label[correct].cells
    for entry in entries:
        if len(entry.cells[0]) == len(headings):
            entry.headings = headings
    lines = _lines(entries)
    top = 0.08
    height = top + sum(max(entry.height for entry in line) + 0.2 for line in lines)
    width = max(sum(entry.width + _GAP for entry in line) for line in lines)
    caption = "matrices: " + ", ".join(f"{entry.label} {entry.shape}" for entry in entries)
    with style():
        picture, axes = canvas(width, height, caption)
        y = top
        for line in lines:
            x = 0.12
            for entry in line:
                _draw(axes, x, y, entry)
                x += entry.width + _GAP
            y += max(entry.height for entry in line) + 0.2
    each = "; ".join(f"{entry.label} {entry.shape}{_values(entry.cells)}" for entry in entries)
    picture.description = f"Matrices with their values: {each}."
    return picture


def _lines(entries: Sequence[_Entry]) -> list[list[_Entry]]:
    """Arrange the entries in lines. Entries of the same rank stay together if they fit."""
    lines: list[list[_Entry]] = [[]]
    for index, entry in enumerate(entries):
        together = [entry]
        if entry.rank is not None and (not index or entries[index - 1].rank != entry.rank):
            together = list(takewhile(lambda other, rank=entry.rank: other.rank == rank, entries[index:]))  # type: ignore[misc]
        used = sum(other.width + _GAP for other in lines[-1])
        needed = sum(other.width + _GAP for other in together) - _GAP
        if needed > WIDTH - 0.2:
            needed = entry.width
        if lines[-1] and used + needed > WIDTH - 0.2:
            lines.append([])
        lines[-1].append(entry)
    return lines


def _values(cells: Sequence[Sequence[str]]) -> str:
    """Return the values in words, or "" for a matrix that's too large to be read aloud."""
    if sum(map(len, cells)) > _MOST_READ:
        return ""
    return " has " + "; ".join("the row " + ", ".join(row) for row in cells)


def _is_wrong(entry: _Entry, i: int, j: int) -> bool:
    return entry.correct is not None and entry.cells[i][j] != entry.correct[i][j]


def _draw(axes: Any, x: float, y: float, entry: _Entry) -> None:
    axes.text(x, y + 0.1, entry.label, fontsize=9.5, fontweight="bold", va="center")
    axes.text(x, y + 0.28, entry.shape, fontsize=8.5, color=FAINT, va="center")
    rows, columns = len(entry.cells), len(entry.cells[0])
    top = y + (0.62 if entry.headings else 0.42)
    for j, text in enumerate(entry.headings):
        centered(axes, x + (j + 0.5) * entry.cell_width, top - 0.11, text, 9)
    block(axes, x, top, columns * entry.cell_width, rows * _CELL_HEIGHT, entry.rank, (rows, columns))
    for i, row in enumerate(entry.cells):
        for j, text in enumerate(row):
            left, upper = x + j * entry.cell_width, top + i * _CELL_HEIGHT
            if _is_wrong(entry, i, j):
                rectangle(axes, left, upper, entry.cell_width, _CELL_HEIGHT, tint(RED, 0.45), RED, 1.2)
            at = left + entry.cell_width / 2, upper + _CELL_HEIGHT / 2
            centered(axes, *at, text, 9, va="center_baseline", bbox=on_white(0.55))


def _entry(label: str, value: Any) -> _Entry:
    tensor, named = torch.as_tensor(value).detach().cpu(), re.search(r"\brank (\d+)", label)
    return _Entry(label, shape_text(tensor.shape), int(named[1]) if named else None, _cells(tensor))


def _cells(tensor: Tensor) -> list[list[str]]:
    """Return the elements as text, row by row."""
    matrix = torch.atleast_2d(tensor)
    if matrix.dim() > 2 or not 0 < matrix.numel() <= _MOST * max(matrix.shape) <= _MOST**2:
        raise ValueError(
            f"matrices draws 1 to {_MOST} rows and columns, not {shape_text(tensor.shape)}; draw a part of it"
        )
    digits = _digits(matrix)
    return [[_number(value, digits) for value in row] for row in matrix.tolist()]


def _digits(numbers: Tensor) -> int:
    """Return how many decimals are needed to distinguish the elements: 0 for whole numbers, otherwise at most 2."""
    if not numbers.is_floating_point():
        return 0
    wide = numbers.to(torch.float64)
    return next((d for d in (0, 1) if torch.allclose(wide.round(decimals=d), wide, rtol=0, atol=1e-6)), 2)


def _number(value: Any, digits: int) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    text = f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.1e}"
    return text.replace("-", "−") if text.strip("-0.") else text.replace("-", "")
