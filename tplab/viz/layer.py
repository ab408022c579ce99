"""A transformer layer on p ranks, with what every rank repeats, what is split, and its four communication operators.

x -+- norm -> f -> attention -> g -> + bias, dropout -> (+) ->     one row for attention, one for the MLP
   +-----------------------------------------------------+
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Circle

from tplab.common import units
from tplab.viz.blocks import arrow, block, centered, label
from tplab.viz.colors import FAINT, INK, WIDTH, Picture, canvas, style

_ROW = 2.0  # inches from the attention's row to the MLP's
_MIDDLE = 1.3  # the vertical center of the first row's boxes
_TALL = 0.86  # the height of a block that is split
_NORM, _F, _BLOCK, _G, _DROP, _PLUS = (0.62, 1.28), 1.74, (2.2, 3.86), 4.32, (4.8, 6.0), 6.62


def layer(forward: Sequence[Any], backward: Sequence[Any], *, ranks: int) -> Picture:
    """Draw a layer with the collectives that one rank recorded in its forward and backward passes.

    forward:  the attention's collective, then the MLP's
    backward: the MLP's collective, then the attention's

    Raises ValueError if there aren't two collectives in each pass.
    """
    (in_attention, in_mlp), (back_in_mlp, back_in_attention) = forward, backward
    head = f"a transformer layer on {ranks} ranks"
    with style():
        picture, axes = canvas(WIDTH, _MIDDLE + _ROW + 1.1, head, head)
        _row(axes, _MIDDLE, "attention", ("x", ""), ranks, (in_attention, back_in_attention))
        _row(axes, _MIDDLE + _ROW, "MLP", ("", "z"), ranks, (in_mlp, back_in_mlp))
        note = "gray: the same on every rank    in color: each rank has its own heads or columns"
        axes.text(0.15, _MIDDLE + _ROW + 0.95, note, fontsize=8.5, color=FAINT, va="center")
    picture.description = (
        f"Attention and MLP, each split over {ranks} ranks between replicated tensors. "
        "One rank has 2 collectives forward and 2 backward."
    )
    return picture


def _row(axes: Axes, y: float, name: str, ends: tuple[str, str], ranks: int, calls: tuple[Any, Any]) -> None:
    start, stop = 0.15, WIDTH - 0.15
    places = (start, _NORM[0], _NORM[1], _F - 0.17, _F + 0.17, _BLOCK[0], _BLOCK[1], _G - 0.17, _G + 0.17, *_DROP)
    for left, right in (*zip(places[0::2], places[1::2], strict=False), (_DROP[1], _PLUS - 0.14), (_PLUS + 0.14, stop)):
        arrow(axes, (left, y), (right, y), color=INK, width=1.2)
    _box(axes, _NORM, y, "norm")
    _box(axes, _DROP, y, "+ bias,\ndropout")
    for rank in range(ranks):
        height = _TALL / ranks
        top = y - _TALL / 2 + rank * height
        block(axes, _BLOCK[0], top, _BLOCK[1] - _BLOCK[0], height, rank)
        label(axes, sum(_BLOCK) / 2, top + height / 2, f"{name}, rank {rank}", 9 if ranks <= 4 else 6.5)
    for at, letter, call, ahead in ((_F, "f", calls[1], False), (_G, "g", calls[0], True)):
        axes.add_patch(Circle((at, y), 0.17, facecolor="white", edgecolor=INK, linewidth=1.3))
        centered(axes, at, y, letter, 10.5, fontstyle="italic")
        _sent(axes, at, y, call, ahead)
    axes.add_patch(Circle((_PLUS, y), 0.14, facecolor="white", edgecolor=INK, linewidth=1.3))
    centered(axes, _PLUS, y, "+", 10.5)
    leaves, high = 0.4, y - 0.72  # the residual is taken before the norm
    axes.plot([leaves, leaves, _PLUS], [y, high, high], color=INK, linewidth=1.2, solid_joinstyle="miter")
    arrow(axes, (_PLUS, high), (_PLUS, y - 0.14), color=INK, width=1.2)
    centered(axes, 5.4, high - 0.1, "residual", 8.5)
    for text, at, side in ((ends[0], start, "left"), (ends[1], stop, "right")):
        axes.text(at, y - 0.14, text, fontsize=10.5, fontstyle="italic", ha=side, va="center")


def _sent(axes: Axes, at: float, y: float, call: Any, ahead: bool) -> None:
    """Write below an operator what it sent, and in which pass."""
    below = y + 0.62
    text = f"{'forward →' if ahead else '← backward'}\n{call.kind}, {units.size(call.bytes)}"
    axes.plot([at, at], [y + 0.17, below - 0.16], color=FAINT, linewidth=0.9, linestyle=":")
    centered(axes, at, below, text, 8.5, linespacing=1.25)


def _box(axes: Axes, span: tuple[float, float], y: float, text: str) -> None:
    block(axes, span[0], y - 0.25, span[1] - span[0], 0.5, None)
    centered(axes, sum(span) / 2, y, text, 9, linespacing=1.15)
