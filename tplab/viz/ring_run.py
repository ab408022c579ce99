"""The steps of a ring all-reduce, one picture per step: the ranks in a circle, what each has, and the bytes per link.

A slot is a chunk of a rank's tensor. It has a stripe for each rank in its sum, with rank 0 at the top, so that both the
position and the color of a stripe show its rank. A gold frame means that all ranks are in the sum. An incomplete sum
moves on when it's sent, and leaves an empty slot.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from tplab.viz.blocks import arrow, centered, rectangle
from tplab.viz.colors import FAINT, GOLD, INK, WIDTH, Picture, canvas, rank_color, style, tint
from tplab.viz.controls import Frames

_LINE = "#C4C4C4"
_SLOT_HEIGHT = 0.5  # in inches, like everything here
_MARGIN = 0.12
_LEGEND = (
    "A chunk has a stripe for each rank in its sum, and a gold frame once all ranks are in. "
    "A link shows all its bytes so far."
)


def ring_run(run: Any) -> Frames:
    """Return the pictures of a recorded run, one for the start and one for each step, for `viz.play`.

    run: a `tplab.collectives.RingRun` of p ranks, from `record_ring`
    """
    return Frames(len(run.held), partial(_draw, run))


def _draw(run: Any, step: int) -> Picture:
    """Draw what the ranks had after a step, what they sent in it, and the bytes that each link has carried so far."""
    p, last = len(run.held[0]), len(run.messages)
    down = 1.45 if p < 6 else 2.1  # from the center of the circle to a rank at its lower end
    top = 0.62 if run.note else 0.38
    name = run.name.removeprefix("your ")
    when = f"after step {step} of {last}" if step else "before the first step"
    title = f"{'Your ' * (name != run.name)}{name} on {p} ranks, {when}"
    circle = _Circle(WIDTH / 2, top + _SLOT_HEIGHT + down, 2.05 if p < 6 else WIDTH / 2 - 0.95, down, p)
    with style():
        picture, axes = canvas(WIDTH, circle.y + down + 0.85, title, title)
        if run.note:
            axes.text(_MARGIN, 0.44, run.note, fontsize=9, color="#8A5A00", va="center")
        moved = run.messages[step - 1] if step else ()
        axes.plot(*zip(*(circle.at(p * turn / 120) for turn in range(121)), strict=True), color=_LINE, linewidth=1.6)
        for message in run.messages[step - 1] if step else run.messages[0]:
            carried = sum(sent.bytes for row in run.messages[:step] for sent in row if sent[:2] == message[:2])
            _link(axes, circle, message, carried, moved=step > 0)
        for rank, chunks in enumerate(run.held[step]):
            _rank(axes, circle, rank, chunks, {message.chunk for message in moved if message.target == rank})
        _tell(axes, circle, run, step)
    sent = [f"rank {one.source} sent chunk {one.chunk} of {len(one.ranks)} to rank {one.target}" for one in moved]
    picture.description = f"{run.note} In this step, {'; '.join(sent) or 'nothing was sent'}.".lstrip()
    return picture


class _Circle:
    """The positions of p ranks on an ellipse around (x, y), with rank 0 at the top and the others clockwise."""

    def __init__(self, x: float, y: float, across: float, down: float, p: int) -> None:
        self.x, self.y, self.across, self.down, self.p = x, y, across, down, p
        self.slot_width = min(0.34, 1.4 / p)

    def at(self, turn: float) -> tuple[float, float]:
        """Return a point on the ellipse, `turn` ranks clockwise from rank 0."""
        angle = 2 * math.pi * turn / self.p
        return self.x + self.across * math.sin(angle), self.y - self.down * math.cos(angle)

    def away(self, turn: float) -> tuple[float, float]:
        """Return the unit vector that points out of the ellipse, `turn` ranks clockwise from rank 0."""
        angle = 2 * math.pi * turn / self.p
        x, y = math.sin(angle) / self.across, -math.cos(angle) / self.down
        return x / math.hypot(x, y), y / math.hypot(x, y)

    def between(self, source: int, target: int) -> tuple[float, int]:
        """Return the `turn` at the middle of the link between two neighbors, and its direction (1 is clockwise)."""
        direction = 1 if (target - source) % self.p == 1 else -1
        return source + direction / 2, direction


def _rank(axes: Axes, circle: _Circle, rank: int, chunks: Sequence[frozenset[int]], new: set[int]) -> None:
    """Draw a rank's slots with the chunks' numbers below. The number of a chunk that it has just received is bold."""
    x, y = circle.at(rank)
    left, top = x - circle.slot_width * circle.p / 2, y - _SLOT_HEIGHT / 2
    wide, high = 2 * (x - left) + 0.08, _SLOT_HEIGHT + 0.42
    rectangle(axes, left - 0.04, top - 0.24, wide, high, "white", zorder=2)  # above the circle
    centered(axes, x, top - 0.14, f"rank {rank}", 9, bold=True)
    for chunk, ranks in enumerate(chunks):
        _slot(axes, left + chunk * circle.slot_width, top, circle.slot_width, ranks, circle.p)
        at = left + (chunk + 0.5) * circle.slot_width
        color = INK if chunk in new else FAINT
        centered(axes, at, top + _SLOT_HEIGHT + 0.1, str(chunk), 7.5, bold=chunk in new, color=color)


def _slot(axes: Axes, x: float, y: float, width: float, ranks: frozenset[int], p: int) -> None:
    """Draw a chunk with a stripe per rank in its sum, and a gold frame if it's complete. It's empty if it moved on."""
    inset, high = 0.02, _SLOT_HEIGHT / p
    x, width = x + inset, width - 2 * inset
    rectangle(axes, x, y, width, _SLOT_HEIGHT, "white", zorder=3)
    for rank in sorted(ranks):
        color = tint(rank_color(rank), 0.8)
        rectangle(axes, x, y + rank * high, width, high, color, zorder=4)
    edge, stroke = (GOLD, 2.6) if len(ranks) == p else (FAINT, 0.8) if ranks else (_LINE, 0.8)
    rectangle(axes, x, y, width, _SLOT_HEIGHT, "none", edge, stroke, zorder=5)


def _link(axes: Axes, circle: _Circle, message: Any, carried: int, moved: bool) -> None:
    """Draw a link's direction, the message that it carried in this step (as it was sent), and all its bytes so far."""
    turn, direction = circle.between(message.source, message.target)
    (x, y), (out_x, out_y) = circle.at(turn), circle.away(turn)
    along, beside = (-out_y * direction, out_x * direction), (x + 0.36 * out_x, y + 0.36 * out_y)
    ends = [(beside[0] + way * 0.17 * along[0], beside[1] + way * 0.17 * along[1]) for way in (-1, 1)]
    arrow(axes, ends[0], ends[1], width=1.3)
    if moved:
        _slot(axes, x - circle.slot_width / 2, y - _SLOT_HEIGHT / 2, circle.slot_width, message.ranks, circle.p)
    told = f"chunk {message.chunk}\n{carried:,} bytes" if moved else f"{carried:,} bytes"
    side = 0 if abs(out_x) < 0.2 else math.copysign(circle.slot_width / 2 + 0.05, out_x)
    align = "center" if not side else "right" if side > 0 else "left"
    inside = (0.5 if not side else 0.3 + 0.2 * abs(out_y)) * out_y
    axes.text(x - side, y - inside, told, fontsize=8.5, ha=align, va="center", linespacing=1.3)


def _tell(axes: Axes, circle: _Circle, run: Any, step: int) -> None:
    last, complete = len(run.messages), frozenset(range(circle.p))
    copied = bool(step) and all(message.ranks == complete for message in run.messages[step - 1])
    phase = "finished chunks are copied" if copied else "chunks are summed" if step else "each rank has its own tensor"
    for offset, words, size, bold in (
        (-0.2, f"step {step} of {last}", 13, True),
        (0.08, phase, 9, False),
        (0.28, f"tensor: {run.size:,} bytes", 9, False),
    ):
        centered(axes, circle.x, circle.y + offset, words, size, bold)
    axes.text(_MARGIN, circle.y + circle.down + 0.68, _LEGEND, fontsize=8.5, color=FAINT, va="center")
