"""The ranks of a mesh in a row, node by node, and for each axis the ranks that form a group."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from tplab.viz.blocks import centered, rectangle
from tplab.viz.colors import FAINT, INK, NOBODY, WIDTH, Picture, canvas, rank_color, style, tint

_NAMES = {"tp": "tensor parallel", "pp": "pipeline parallel", "dp": "data parallel"}
_LEFT, _ROW = 1.5, 0.78  # where the ranks begin, height of an axis
_NODE = 8  # GPUs
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def mesh(groups: Mapping[str, Sequence[Sequence[int]]], *, rank: int, title: str) -> Picture:
    """Draw the groups of each axis. Ranks with the same letter form a group, and each node has a frame.

    groups: for each axis, all its groups as lists of ranks, such as {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
    rank:   the groups of this rank are in its color
    """
    ranks = sorted(each for group in next(iter(groups.values())) for each in group)
    for axis, its in groups.items():
        if sorted(each for group in its for each in group) != ranks:
            raise ValueError(f"the groups of {axis} don't hold each of the ranks 0 to {ranks[-1]} once: {list(its)}")
    width = min(0.62, (WIDTH - _LEFT - 0.15) / len(ranks))
    top = 0.62
    with style():
        picture, axes = canvas(WIDTH, top + _ROW * len(groups) + 0.28, title, title)
        for number, (axis, its) in enumerate(groups.items()):
            y = top + _ROW * number
            axes.text(0.12, y + 0.16, f"{axis} = {max(map(len, its))}", fontsize=9.5, fontweight="bold", va="center")
            axes.text(0.12, y + 0.36, _NAMES.get(axis, axis), fontsize=8.5, va="center")
            for place, group in enumerate(sorted(its, key=list)):
                letter = _LETTERS[place] if len(its) <= len(_LETTERS) else str(place)
                color = rank_color(rank) if rank in group else None
                for each in group:
                    _rank(axes, _LEFT + each * width, y, width, each, letter, color, chosen=each == rank)
        _nodes(axes, len(ranks), width, top, top + _ROW * len(groups))
    each_axis = "; ".join(f"along {axis}, {', '.join(map(str, its))}" for axis, its in groups.items())
    picture.description = f"Which ranks form a group: {each_axis}. The groups of rank {rank} are in color."
    return picture


def _rank(
    axes: Axes, x: float, y: float, width: float, rank: int, letter: str, color: str | None, *, chosen: bool
) -> None:
    gap = 0.04 if width > 0.3 else 0.015
    fill = tint(color, 0.85 if chosen else 0.4) if color else NOBODY
    rectangle(axes, x + gap, y, width - 2 * gap, 0.34, fill, color or FAINT, 2.2 if color else 0.8)
    size = 9.0 if width > 0.3 else 6.5
    centered(axes, x + width / 2, y + 0.17, str(rank), size, bold=color is not None)
    centered(axes, x + width / 2, y + 0.45, letter, size, color=INK if color else FAINT)


def _nodes(axes: Axes, count: int, width: float, top: float, bottom: float) -> None:
    for start in range(0, count, _NODE):
        length = min(_NODE, count - start) * width
        rectangle(axes, _LEFT + start * width, top - 0.1, length, bottom - top, "none", INK, 1, linestyle=(0, (4, 2)))
        name = f"node {start // _NODE}"
        centered(axes, _LEFT + start * width + length / 2, bottom + 0.03, name, 8.5)
