"""Rectangles for tensors: filled blocks in a rank's color, with the tensor's name, its shape and its cells."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from tplab.viz.colors import FAINT, INK, on_white, rank_color, rank_fill, rank_hatch

_MOST_CELLS = 16  # cells are drawn up to this many rows or columns


def rectangle(
    axes: Axes, x: float, y: float, width: float, height: float, fill: Any, edge: Any = "none", line: float = 0.8,
    **more: Any,
) -> None:  # fmt: skip
    """Draw a rectangle with its upper left corner at (x, y), and with an edge of `line` points if it has a color."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge, linewidth=line, **more))


def centered(axes: Axes, x: float, y: float, text: str, size: float, bold: bool = False, **more: Any) -> None:
    """Write a text around (x, y)."""
    weight = "bold" if bold else "normal"
    axes.text(x, y, text, fontsize=size, fontweight=weight, ha="center", **{"va": "center", **more})


def block(
    axes: Axes, x: float, y: float, width: float, height: float, rank: int | None, cells: tuple[int, int] = (1, 1)
) -> None:
    """Draw a rectangle in the rank's color, with its upper left corner at (x, y), split into (rows, columns) cells."""
    rectangle(axes, x, y, width, height, rank_fill(rank))
    hatch_color = rank_color(rank) + "66"
    rectangle(axes, x, y, width, height, "none", hatch_color, 0, hatch=rank_hatch(rank))
    rows, columns = cells
    if rows <= _MOST_CELLS and columns <= _MOST_CELLS:
        for row in range(1, rows):
            axes.plot(
                [x, x + width], [y + height * row / rows] * 2, color="white", linewidth=0.9, solid_capstyle="butt"
            )
        for column in range(1, columns):
            at = x + width * column / columns
            axes.plot([at, at], [y, y + height], color="white", linewidth=0.9, solid_capstyle="butt")
    outline = INK if rank is None else rank_color(rank)
    rectangle(axes, x, y, width, height, "none", outline, 1.3)


def label(axes: Axes, x: float, y: float, text: str, size: float = 9.0, bold: bool = False) -> None:
    """Draw text centered on (x, y), on a translucent white background so that it's readable above cells and hatches."""
    centered(axes, x, y, text, size, bold, bbox=on_white(0.82))


def arrow(
    axes: Axes, start: tuple[float, float], stop: tuple[float, float], *, color: str = FAINT, width: float = 1.0,
    dashed: bool = False,
) -> None:  # fmt: skip
    """Draw an arrow with its head at `stop`, above whatever else is there."""
    style = (0, (3, 2)) if dashed else "solid"
    axes.add_patch(
        FancyArrowPatch(
            start, stop, arrowstyle="-|>", mutation_scale=9, color=color, linewidth=width, linestyle=style, shrinkA=0,
            shrinkB=0, zorder=6,
        )
    )  # fmt: skip


def shape_text(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def text_width(text: str, size: float = 9.5) -> float:
    """Return the approximate width of a text in inches."""
    return len(text) * size * 0.0087
