"""A tensor split into p equal parts along one dimension, with the rank of each part."""

from collections.abc import Sequence

from torch import Tensor

from tplab.viz.blocks import block, centered, label, shape_text, text_width
from tplab.viz.colors import FAINT, Picture, canvas, style


def split(tensor_or_shape: Tensor | Sequence[int], dim: int, p: int, *, title: str | None = None) -> Picture:
    """Draw a matrix or vector as p colored blocks, split along `dim`, with the rank and the shape of each block."""
    shape = _shape(tensor_or_shape)
    if len(shape) not in (1, 2):
        raise ValueError(f"split draws vectors and matrices, not shape {shape_text(shape)}")
    dim = dim % len(shape)
    if shape[dim] % p:
        raise ValueError(f"size {shape[dim]} of dimension {dim} can't be cut into {p} equal parts")
    rows, columns = (1, shape[0]) if len(shape) == 1 else shape
    along_rows = len(shape) == 2 and dim == 0
    part = tuple(size // p if index == dim else size for index, size in enumerate(shape))
    width, height = _extent(columns, 1.6, 4.6), _extent(rows, 0.42 if rows == 1 else 1.0, 3.0)
    if along_rows:
        height = max(height, 0.42 * p)
    else:
        width = max(width, 0.78 * p)
    head = title or f"{shape_text(shape)} cut along dimension {dim}"
    each = f"each rank holds {shape_text(part)} of {shape_text(shape)}"
    top, left = 0.72, 0.5
    picture_width = max(left + width + 0.3, text_width(head, 11) + 0.4, text_width(each, 9.5) + 0.4)
    with style():
        picture, axes = canvas(picture_width, top + height + 0.42, f"{head}: {each}", head)
        axes.text(0.12, 0.44, each, fontsize=9.5, va="center")
        for rank in range(p):
            w, h = (width, height / p) if along_rows else (width / p, height)
            x, y = (left, top + rank * h) if along_rows else (left + rank * w, top)
            block(axes, x, y, w, h, rank, (max(1, rows // p), columns) if along_rows else (rows, max(1, columns // p)))
            label(axes, x + w / 2, y + h / 2, f"rank {rank}", bold=True)
        centered(axes, left + width / 2, top + height + 0.17, f"{columns}", 9, color=FAINT)
        if len(shape) == 2:
            axes.text(left - 0.12, top + height / 2, f"{rows}", fontsize=9, color=FAINT, ha="right", va="center")
    picture.description = (
        "The blocks of ranks 0 to " + f"{p - 1} lie {'below each other' if along_rows else 'side by side'}."
    )
    return picture


def _shape(tensor_or_shape: Tensor | Sequence[int]) -> tuple[int, ...]:
    return tuple(tensor_or_shape.shape if isinstance(tensor_or_shape, Tensor) else tensor_or_shape)


def _extent(size: int, least: float, most: float) -> float:
    """Return the inches for a dimension: proportional to the size, within bounds."""
    return min(most, max(least, 0.42 * size))
