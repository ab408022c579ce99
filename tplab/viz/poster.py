"""A whole model from the top down: which blocks are split over the ranks, who wrote them, and what they send."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from tplab.viz.blocks import centered, rectangle
from tplab.viz.colors import FAINT, INK, NOBODY, WIDTH, Picture, canvas, rank_fill, style

_TOP, _LEFT, _BOX = 0.62, 0.3, 2.1  # the first block, the left edge of all blocks, and their width, in inches
_TALL, _LOW, _GAP = 0.36, 0.22, 0.09
_FORWARD, _BACKWARD = "#0B62A4", "#A5460A"


class Block(NamedTuple):
    """A block of the model. A block that isn't split is the same on every rank.

    said:     who wrote it, and when it passed
    forward, backward    what it sends in each direction, in words, or ""
    """

    name: str
    split: bool = False
    said: str = ""
    forward: str = ""
    backward: str = ""


def poster(blocks: Sequence[Block], *, ranks: int, layer: slice, times: int, title: str) -> Picture:
    """Draw the blocks from the top down. The blocks in the slice `layer` are one of `times` identical layers."""
    height = _TOP + sum(_height(block) for block in blocks) + 0.1
    with style():
        picture, axes = canvas(WIDTH, height, title)
        axes.text(_LEFT, 0.18, title, fontsize=11.5, fontweight="bold", va="center")
        axes.text(_LEFT, 0.43, "one color per rank; gray is the same on every rank", fontsize=8.5, va="center")
        for x, color, text in ((5.15, _FORWARD, "sent forward"), (6.45, _BACKWARD, "sent backward")):
            axes.text(x, 0.43, text, fontsize=8.5, color=color, va="center")
        y = _TOP
        for number, block in enumerate(blocks):
            if number == layer.start:
                _frame(axes, y, sum(_height(each) for each in blocks[layer]), times)
            _draw(axes, y, block, ranks)
            y += _height(block)
    each = "; ".join(", ".join(filter(None, (b.name, b.said, b.forward, b.backward))) for b in blocks)
    picture.description = f"The blocks on {ranks} ranks, with what they send forward and backward: {each}."
    return picture


def _height(block: Block) -> float:
    return (_TALL if block.split else _LOW) + _GAP


def _draw(axes: Axes, y: float, block: Block, ranks: int) -> None:
    tall = _height(block) - _GAP
    for rank in range(ranks if block.split else 1):
        width = _BOX / (ranks if block.split else 1)
        fill = rank_fill(rank) if block.split else NOBODY
        rectangle(axes, _LEFT + rank * width, y, width, tall, fill)
    edge = INK if block.split else FAINT
    rectangle(axes, _LEFT, y, _BOX, tall, "none", edge, 0.9)
    middle = y + tall / 2
    centered(axes, _LEFT + _BOX / 2, middle, block.name, 9, bold=block.split)
    axes.text(_LEFT + _BOX + 0.12, middle, block.said, fontsize=8.5, va="center")
    axes.text(5.15, middle, block.forward and f"↓ {block.forward}", fontsize=8.5, color=_FORWARD, va="center")
    axes.text(6.45, middle, block.backward and f"↑ {block.backward}", fontsize=8.5, color=_BACKWARD, va="center")


def _frame(axes: Axes, y: float, height: float, times: int) -> None:
    """Draw a dashed frame around the blocks of a layer, with the number of layers."""
    frame = FancyBboxPatch(
        (_LEFT - 0.12, y - _GAP / 2), WIDTH - _LEFT - 0.06, height, boxstyle="round,pad=0,rounding_size=0.06",
        facecolor="none", edgecolor=FAINT, linestyle=(0, (4, 3)), linewidth=0.9,
    )  # fmt: skip
    axes.add_patch(frame)
    axes.text(_LEFT + _BOX + 0.12, y + _LOW / 2, f"{times} × this layer", fontsize=9, fontweight="bold", va="center")
