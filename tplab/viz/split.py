"""A matrix split into p equal parts along one dimension, with the rank of each part."""

from torch import Tensor

from tplab.viz.blocks import block, centered, label, shape_text, text_width
from tplab.viz.colors import FAINT, Picture, canvas, style


def split(weight: Tensor, *, dim: int, p: int, title: str) -> Picture:
    """Draw a matrix as p colored blocks, split along `dim`, with the rank and the shape of each block."""
    if weight.shape[dim] % p:
        raise ValueError(f"size {weight.shape[dim]} of dimension {dim} can't be cut into {p} equal parts")
    (rows, columns), along_rows = weight.shape, dim == 0
    part = (rows // p, columns) if along_rows else (rows, columns // p)
    width, height = _extent(columns, 1.6, 4.6), _extent(rows, 1.0, 3.0)
    if along_rows:
        height = max(height, 0.42 * p)
    else:
        width = max(width, 0.78 * p)
    each = f"each rank holds {shape_text(part)} of {shape_text(weight.shape)}"
    top, left = 0.72, 0.5
    picture_width = max(left + width + 0.3, text_width(title, 11) + 0.4, text_width(each, 9.5) + 0.4)
    with style():
        picture, axes = canvas(picture_width, top + height + 0.42, f"{title}: {each}", title)
        axes.text(0.12, 0.44, each, fontsize=9.5, va="center")
        for rank in range(p):
            w, h = (width, height / p) if along_rows else (width / p, height)
            x, y = (left, top + rank * h) if along_rows else (left + rank * w, top)
            block(axes, x, y, w, h, rank, part)
            label(axes, x + w / 2, y + h / 2, f"rank {rank}", bold=True)
        centered(axes, left + width / 2, top + height + 0.17, f"{columns}", 9, color=FAINT)
        axes.text(left - 0.12, top + height / 2, f"{rows}", fontsize=9, color=FAINT, ha="right", va="center")
    side = "below each other" if along_rows else "side by side"
    picture.description = f"The blocks of ranks 0 to {p - 1} lie {side}."
    return picture


def _extent(size: int, least: float, most: float) -> float:
    """Return the inches for a dimension: proportional to the size, within bounds."""
    return min(most, max(least, 0.42 * size))
