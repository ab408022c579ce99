"""When each operation of a list runs: one lane for what a rank computes, and one for what is on the wire.

compute   [ dZ ][ dB ][ dX ]▒▒ waits 8 ▒▒[ dA ]      28 ms
wire                       [  message  ]
dY        ──────────                                 how long a result has to be kept
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tplab.cost.clock import Operation, Timing, play
from tplab.viz.blocks import centered, text_width
from tplab.viz.colors import FAINT, GOLD, RED, WIDTH, Picture, chart, rank_color, rows, style, tint
from tplab.viz.controls import Frames

_LANES = ("compute", "wire")
_HEIGHT = 0.8


def clock(operations: Sequence[Operation[str]], *, kept: str) -> Frames:
    """Return pictures for `viz.play`, one per operation that takes time or waits. The last picture shows all of them.

    kept: a result; a line below the lanes shows how long it has to be kept in memory

    Raises OrderError for operations that can't be run in this order.
    """
    whole = play(operations)
    counts = [
        number
        for number, one in enumerate(operations, start=1)
        if one.duration or any(wait.operation == one for wait in whole.waits())
    ]
    counts = [*counts[:-1], len(operations)]
    return Frames(len(counts), lambda place: _draw(operations[: counts[place]], whole, kept))


def _draw(operations: Sequence[Operation[str]], whole: Timing[str], kept: str) -> Picture:
    timing = play(operations)
    waited = sum(wait.end - wait.start for wait in timing.waits())
    done = {one.name for one in operations}
    ends = [timing.spans[name].end for name in done if timing.spans[name].operation.lane == "compute"]
    so_far = f"{_text(max(ends))} ms so far" if len(done) < len(whole.spans) else f"{_text(whole.total)} ms in total"
    title = f"{so_far}, {_text(waited)} ms of them spent waiting"
    with style():
        picture, axes = chart(WIDTH, 2.05, title)
        for lane, name in enumerate(_LANES):
            for span in timing.lanes.get((0, name), []):
                if span.end > span.start:
                    color = rank_color(0) if name == "compute" else FAINT
                    _box(axes, lane, span.start, span.end, span.operation.name, color, whole.total)
        for wait in timing.waits():
            _box(axes, 0, wait.start, wait.end, f"waits {_text(wait.end - wait.start)}", RED, whole.total)
        if kept in done:
            start, end = timing.lifetimes[kept]
            axes.plot([start, end], [2, 2], color=GOLD, linewidth=4, solid_capstyle="butt")
        rows(axes, [*_LANES, f"{kept} is kept"])
        axes.set_xlim(0, whole.total * 1.01)
        axes.set_xlabel("milliseconds")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="x")
    ran = sorted((span for span in timing.spans.values() if span.end > span.start), key=lambda span: span.start)
    order = ", ".join(f"{span.operation.name} from {_text(span.start)} to {_text(span.end)}" for span in ran)
    picture.description = f"When each operation runs: {order}."
    return picture


def _box(axes: Axes, lane: int, start: float, end: float, name: str, color: str, total: float) -> None:
    axes.barh(lane, end - start, _HEIGHT, left=start, color=tint(color, 0.6), edgecolor=color, linewidth=0.8)
    if (end - start) / total * (WIDTH - 1.3) > text_width(name, 8.5) + 0.05:
        centered(axes, (start + end) / 2, lane, name, 8.5)


def _text(value: float) -> str:
    return f"{value:g}"
