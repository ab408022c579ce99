"""Rectangles for tensors: filled blocks in a rank's color, with the tensor's name, its shape and its cells."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from tplab.viz.colors import FAINT, INK, on_white, rank_color, rank_fill, rank_hatch

_MOST_CELLS = 16  # cells are drawn up to this many rows or columns


def block(
    axes: Axes, x: float, y: float, width: float, height: float, rank: int | None, cells: tuple[int, int] = (1, 1)
) -> None:
    """Draw a rectangle in the rank's color, with its upper left corner at (x, y), split into (rows, columns) cells."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=rank_fill(rank), edgecolor="none"))
    hatch_color = rank_color(rank) + "66"
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor="none", edgecolor=hatch_color, hatch=rank_hatch(rank), linewidth=0)
    )
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
    axes.add_patch(Rectangle((x, y), width, height, facecolor="none", edgecolor=outline, linewidth=1.3))


def label(axes: Axes, x: float, y: float, text: str, size: float = 9.0, bold: bool = False) -> None:
    """Draw text centered on (x, y), on a translucent white background so that it's readable above cells and hatches."""
    weight = "bold" if bold else "normal"
    axes.text(x, y, text, fontsize=size, fontweight=weight, ha="center", va="center", bbox=on_white(0.82))


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
