"""The ranks of a mesh in a row, node by node, and for each axis the ranks that form a group."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from tplab.viz.blocks import block, centered, label, rectangle
from tplab.viz.colors import FAINT, INK, WIDTH, Picture, canvas, style

_NAMES = {"tp": "tensor parallel", "pp": "pipeline parallel", "dp": "data parallel"}
_LEFT, _ROW = 1.5, 0.78  # where the ranks begin, height of an axis
_NODE = 8  # GPUs
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def mesh(groups: Mapping[str, Sequence[Sequence[int]]], *, title: str | None = None) -> Picture:
    """Draw the groups of each axis. Ranks of a group have the same color and letter, and each node has a frame.

    groups: for each axis, all its groups as lists of ranks, such as {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
    """
    ranks = sorted({rank for group in next(iter(groups.values()), ()) for rank in group})
    if not ranks:
        raise ValueError("mesh needs at least one axis with one group to draw")
    for axis, its in groups.items():
        if sorted(rank for group in its for rank in group) != ranks:
            raise ValueError(f"the groups of {axis} don't hold each of the ranks 0 to {ranks[-1]} once: {list(its)}")
    sizes = ", ".join(f"{axis} = {max(map(len, its))}" for axis, its in groups.items())
    width = min(0.62, (WIDTH - _LEFT - 0.15) / len(ranks))
    top = 0.62 if title else 0.3
    with style():
        caption = title or f"groups of {len(ranks)} ranks: {sizes}"
        picture, axes = canvas(WIDTH, top + _ROW * len(groups) + 0.28, caption, title)
        for number, (axis, its) in enumerate(groups.items()):
            y = top + _ROW * number
            axes.text(0.12, y + 0.16, f"{axis} = {max(map(len, its))}", fontsize=9.5, fontweight="bold", va="center")
            axes.text(0.12, y + 0.36, _NAMES.get(axis, axis), fontsize=8.5, va="center")
            for place, group in enumerate(sorted(its, key=list)):
                for rank in group:
                    _rank(axes, _LEFT + rank * width, y, width, rank, place, len(its))
        _nodes(axes, len(ranks), width, top, top + _ROW * len(groups))
    each = "; ".join(f"along {axis}, {', '.join(str(list(group)) for group in its)}" for axis, its in groups.items())
    picture.description = f"Which ranks form a group: {each}."
    return picture


def _rank(axes: Axes, x: float, y: float, width: float, rank: int, group: int, count: int) -> None:
    gap = 0.04 if width > 0.3 else 0.015
    block(axes, x + gap, y, width - 2 * gap, 0.34, group)
    size = 9.0 if width > 0.3 else 6.5
    if width > 0.3:
        label(axes, x + width / 2, y + 0.17, str(rank), size)
    else:
        centered(axes, x + width / 2, y + 0.17, str(rank), size)
    letter = _LETTERS[group] if count <= len(_LETTERS) else str(group)
    centered(axes, x + width / 2, y + 0.45, letter, size, color=FAINT)


def _nodes(axes: Axes, count: int, width: float, top: float, bottom: float) -> None:
    for start in range(0, count, _NODE):
        length = min(_NODE, count - start) * width
        rectangle(axes, _LEFT + start * width, top - 0.1, length, bottom - top, "none", INK, 1, linestyle=(0, (4, 2)))
        name = f"node {start // _NODE}"
        centered(axes, _LEFT + start * width + length / 2, bottom + 0.03, name, 8.5)
