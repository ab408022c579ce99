"""The tokens and columns that each rank has in each step, and whether the ranks' values still have to be summed."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from tplab.common import units
from tplab.viz.blocks import block, label, shape_text
from tplab.viz.colors import FAINT, INK, WIDTH, Picture, canvas, style

_LEFT, _TOP, _CELL, _TALL = 0.72, 0.78, 0.94, 0.56  # inches: first column, first row, a tensor's width and height


def layouts(steps: Sequence[Mapping[str, Any]], *, ranks: int, title: str | None = None) -> Picture:
    """Draw a column per tensor and a row per rank. The filled part of each frame is the rank's part of the tensor.

    steps: the tensors in order, each as {"name": "norm(x)", "whole": (tokens, columns), "part": (tokens, columns)}.
           If the part is smaller, the tensor is split in rank order. Optional entries: "summand" is True if the
           ranks' parts have to be summed, and "sent" has the collectives between the previous step and this one
    """
    if len(steps) < 2:
        raise ValueError(f"layouts draws how a tensor goes on from step to step; got {len(steps)}")
    head = title or f"what {ranks} ranks hold"
    gap = (WIDTH - _LEFT - 0.15 - len(steps) * _CELL) / (len(steps) - 1)
    bottom = _TOP + ranks * (_TALL + 0.14)
    with style():
        picture, axes = canvas(WIDTH, bottom + 0.85, head)
        axes.text(0.15, 0.2, head, fontsize=10.5, fontweight="bold", va="center")
        for rank in range(ranks):
            middle = _TOP + rank * (_TALL + 0.14) + _TALL / 2
            axes.text(0.15, middle, f"rank {rank}", fontsize=9, va="center")
        for number, step in enumerate(steps):
            left = _LEFT + number * (_CELL + gap)
            axes.text(left + _CELL / 2, 0.56, step["name"], fontsize=9, ha="center", va="center")
            for rank in range(ranks):
                _tensor(axes, left, _TOP + rank * (_TALL + 0.14), rank, step)
            shape = shape_text(step["part"])
            axes.text(left + _CELL / 2, bottom + 0.08, shape, fontsize=8.5, color=FAINT, ha="center", va="center")
            if step.get("sent"):
                _sent(axes, left - gap / 2, gap, bottom, step["sent"])
    picture.description = (
        f"What each of {ranks} ranks stores in each step: "
        + "; ".join(f"{step['name']} is {shape_text(step['part'])} of {shape_text(step['whole'])}" for step in steps)
        + "."
    )
    return picture


def _tensor(axes: Axes, left: float, top: float, rank: int, step: Mapping[str, Any]) -> None:
    axes.add_patch(
        Rectangle((left, top), _CELL, _TALL, facecolor="none", edgecolor=FAINT, linewidth=0.8, linestyle=":")
    )
    (tokens, columns), (whole_tokens, whole_columns) = step["part"], step["whole"]
    height, width = _TALL * tokens / whole_tokens, _CELL * columns / whole_columns
    x = left + (rank * width if columns < whole_columns else 0)
    y = top + (rank * height if tokens < whole_tokens else 0)
    block(axes, x, y, width, height, rank)
    if step.get("summand"):
        label(axes, left + _CELL / 2, top + _TALL / 2, "summand", 8)


def _sent(axes: Axes, x: float, gap: float, bottom: float, calls: Sequence[Any]) -> None:
    """Draw a line between two columns, and below it the collectives that were called there."""
    axes.plot([x, x], [_TOP, bottom + 0.26], color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
    text = "\n".join(f"{call.kind}\n{units.size(call.bytes)}" for call in calls)
    axes.text(x, bottom + 0.34, text, fontsize=8.5, ha="center", va="top", linespacing=1.25)
