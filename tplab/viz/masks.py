"""Dropout masks of all ranks side by side: the positions that each rank keeps."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle
from torch import Tensor

from tplab.viz.blocks import rectangle, shape_text, text_width
from tplab.viz.colors import FAINT, WIDTH, Picture, canvas, rank_color, style, tint

_MOST = 32  # in a mask with more rows or columns, positions can't be distinguished
_GAP = 0.3
_LEFT = 0.15


def masks(masks: Mapping[str, Sequence[Tensor]]) -> Picture:
    """Draw masks [rows, columns] by label, one per rank. Kept positions are filled, and dropped ones are white.

    A position is kept if its mask isn't zero. Raises ValueError if a mask has more than 32 rows or columns.
    """
    for shape in (mask.shape for row in masks.values() for mask in row):
        if max(shape) > _MOST:
            raise ValueError(f"masks draws matrices of at most {_MOST} x {_MOST}, not {shape_text(shape)}")
    p = max(len(row) for row in masks.values())
    each = (WIDTH - 2 * _LEFT - (p - 1) * _GAP) / p
    columns = max(mask.shape[1] for row in masks.values() for mask in row)
    cell = min(0.17, each / columns)
    top = 0.18
    heights = [max(mask.shape[0] for mask in row) * cell for row in masks.values()]
    height = top + sum(0.62 + mask_height for mask_height in heights) - 0.1
    step = max(columns * cell, 0.55) + _GAP
    width = max(2 * _LEFT + p * step - _GAP, *(text_width(label, 11) + 0.4 for label in masks))
    with style():
        picture, axes = canvas(width, height, "masks: " + ", ".join(masks))
        y = top
        for (label, row), mask_height in zip(masks.items(), heights, strict=True):
            axes.text(_LEFT, y, label, fontsize=9.5, va="center")
            for rank, mask in enumerate(row):
                x = _LEFT + rank * step
                axes.text(x, y + 0.23, f"rank {rank}", fontsize=9, fontweight="bold", va="center")
                _draw(axes, x, y + 0.37, cell, rank, mask)
            y += 0.62 + mask_height
    kept = {label: ", ".join(f"{float((m != 0).float().mean()):.0%}" for m in row) for label, row in masks.items()}
    told = "; ".join(f"{label}: {its}" for label, its in kept.items())
    picture.description = f"Kept positions are filled. Share kept on ranks 0, 1, ...: {told}."
    return picture


def _draw(axes: Any, x: float, y: float, cell: float, rank: int, mask: Tensor) -> None:
    rows, columns = mask.shape
    kept = [
        Rectangle((x + column * cell, y + row * cell), cell, cell)
        for row, places in enumerate(mask.tolist())
        for column, keeps in enumerate(places)
        if keeps
    ]
    axes.add_collection(PatchCollection(kept, facecolor=tint(rank_color(rank), 0.85), edgecolor="white", linewidth=0.6))
    rectangle(axes, x, y, columns * cell, rows * cell, "none", FAINT)
