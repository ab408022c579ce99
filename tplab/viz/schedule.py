"""A pipeline schedule: one lane per rank, one box per action, and gaps where the rank waits."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from tplab.pipeline.schedule_order import Span
from tplab.viz.blocks import centered, rectangle
from tplab.viz.colors import INK, WIDTH, Picture, chart, rank_color, rows, style, tint

_STRENGTH = {"F": 0.2, "B": 0.62, "I": 0.62, "W": 0.2}
_HATCH = {"F": "", "B": "", "I": "", "W": "////"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}
_ENOUGH = 0.11  # inches that a number needs


def schedule(spans: Sequence[Sequence[Span]], *, title: str) -> Picture:
    """Draw the result of `tplab.pipeline.simulate`. The length of each box is the duration of an action.

    The boxes contain micro-batch numbers. F is light, B and I are dark, W is light and hatched. A rank with several
    chunks of the model has a lane for each chunk, the first one on top.
    """
    every = [span for row in spans for span in row]
    begin, end = min(span.start for span in every), max(span.end for span in every)
    chunks = 1 + max(span.action.chunk for span in every)
    p = len(spans)
    with style():
        picture, axes = chart(WIDTH, 1.3 + (0.42 + 0.16 * (chunks - 1)) * p, title)
        unit = (WIDTH - 1.0) / (end - begin)  # inches
        for rank, row in enumerate(spans):
            for span in row:
                _box(axes, rank, span, chunks, unit)
        rows(axes, [f"rank {rank}" for rank in range(p)])
        axes.set_xlim(begin, end + 0.01 * (end - begin))  # the last box has an edge
        axes.set_xlabel("time")
        axes.spines["left"].set_visible(False)
        kinds = [kind for kind in _NAMES if any(span.action.kind == kind for span in every)]
        handles = [Patch(facecolor=tint(INK, _STRENGTH[k]), edgecolor=INK, hatch=_HATCH[k]) for k in kinds]
        names = [f"{kind}: {_NAMES[kind]}" for kind in kinds]
        picture.legend(handles, names, ncols=4, loc="outside lower right")
    idle = [f"{1 - sum(span.end - span.start for span in row) / (end - begin):.0%}" for row in spans]
    picture.description = f"{len(every)} actions over {end - begin:.4g} units of time. Idle ranks: {', '.join(idle)}."
    return picture


def _box(axes: Axes, rank: int, span: Span, chunks: int, unit: float) -> None:
    action = span.action
    height = 0.8 / chunks
    y, width = rank - 0.4 + height * action.chunk, span.end - span.start
    color = tint(rank_color(rank), _STRENGTH[action.kind])
    rectangle(axes, span.start, y, width, height, color, INK, 0.7, hatch=_HATCH[action.kind])
    if width * unit >= _ENOUGH * (1 if action.micro_batch < 10 else 1.5):
        box = {"facecolor": color, "edgecolor": "none", "pad": 0.6} if _HATCH[action.kind] else None
        centered(axes, span.start + width / 2, y + height / 2, str(action.micro_batch), 8.5, bbox=box)
