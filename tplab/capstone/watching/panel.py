"""The live panel of a training run: its progress, its curves, and the communication and memory of its ranks.

    with panel(settings):
        launch(train, settings.ranks, args=(settings,), backend=backend_for(settings.ranks), timeout=None)

In JupyterLab, the panel is a widget that is redrawn a few times a second and replaced by a static picture when the run
ends. In a terminal, it's a single line. Elsewhere, there's no panel, but a notebook still gets the final picture. The
panel runs in the process that waits for the ranks and only reads the log, so if drawing fails, the run isn't affected.

████████████░░░░░░░░   step 312 of 600, 52 %                      2 min 10 s left
loss 2.31 ⌇⌇⌇⌇⌇        tokens/s 8,912 ⌇⌇⌇⌇⌇
rank 0  ▇▇▇░░░ 34 % communicating   412 MB
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from html import escape
from itertools import starmap
from typing import Any

from tplab import viz
from tplab.capstone.data.prepare import prepare
from tplab.capstone.own_layers.find import find_answers
from tplab.capstone.progress import bar
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.loop import train
from tplab.capstone.watching.log_tail import LogTail, Points, RunStatus
from tplab.common.units import duration, size
from tplab.runtime import Results, launch
from tplab.runtime.devices import backend_for
from tplab.runtime.liveview import LiveView, Now, place, shown_by
from tplab.runtime.screen import LastLine, Widget
from tplab.viz.colors import rank_color

WIDE, HIGH = 300, 118  # size of a curve in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 8, 18  # margins around the curve
_CURVE = "#3A86C8"  # visible on white and on black
_FONT = "font-family: var(--jp-ui-font-family, system-ui, sans-serif); font-size: 12px; line-height: 1.45;"
_NUMBERS = "font-variant-numeric: tabular-nums;"


@contextmanager
def panel(settings: Settings) -> Iterator[LogTail]:
    """Context manager that shows the progress of runs started inside the block. Yields the reader of their log."""
    tail = LogTail(settings)
    view = _Panel(tail)
    try:
        with shown_by(view.during):
            yield tail
    finally:
        with suppress(Exception):
            view.end()


def run(settings: Settings, answers: Any = None) -> Results:
    """Train with the panel: prepare the tokens, then run `train` on every rank.

    answers    the learner's answers from the chapters, for layers="mine" (if None, `run` finds them)
    """
    if settings.layers == "mine" and answers is None:
        answers = find_answers(settings.chapters, settings)
    prepare(settings)
    with panel(settings):
        backend = backend_for(settings.ranks)
        return launch(train, settings.ranks, args=(settings, answers), backend=backend, timeout=None)


class _Panel(LiveView):
    """Shows the run in a widget, or in the last line of a terminal. In a notebook, a picture remains at the end."""

    def __init__(self, tail: LogTail) -> None:
        super().__init__(list)
        self.tail, self._where, self._line, self._widget = tail, place(), LastLine(), Widget()

    def during(self, see: Callable[[], list[Now]]) -> LiveView:
        """Return this view for one call of `launch`, which refreshes it while it waits for the ranks."""
        super().__init__(see)
        return self

    def _draw(self, seconds: float) -> None:
        if self._where == "nowhere":
            return
        status, ranks = self.tail.look(), self._see()
        if self._where == "page":
            self._widget.show(to_html(status, ranks))
        else:
            self._line.show(lambda width: to_line(status, width, ranks))

    def hide(self) -> None:
        self._line.wipe()

    def end(self) -> None:
        """Show the final picture, or the final line in a terminal. Called no matter how the run has ended."""
        self.hide()
        status = self.tail.look()
        if self._where == "terminal":
            if status.started and status.step:
                self._line.leave(lambda width: to_line(status, width))
            return
        picture: Any = None
        if status.started and len(status.losses) > 1:
            with suppress(Exception):
                picture = viz.training(status.losses, status.speeds, evaluations=status.evaluations)
        if self._widget.is_there:
            self._widget.end(picture)
        elif picture is not None and "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
            from IPython.display import display

            display(picture)


def to_line(status: RunStatus, width: int, ranks: Sequence[Now] = ()) -> str:
    """Render the panel as one line of at most `width` characters."""
    if status.started and status.step:
        parts = [f"step {status.step}/{status.last_step}", bar(status.done), f"{status.done:.0%}", _time_left(status)]
        if status.loss is not None:
            parts.append(f"loss {status.loss:.4f}")
        if status.tokens_per_second is not None:
            parts.append(f"{status.tokens_per_second:,.0f} tokens/s")
        if status.communication:
            parts.append(f"{max(status.communication):.0%} communicating")
    else:
        parts = ["first step" if status.started else "starting", ", ".join(f"rank {now.rank} {now}" for now in ranks)]
    line = "  ".join(part for part in parts if part)
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


def to_html(status: RunStatus, ranks: Sequence[Now] = ()) -> str:
    """Render the panel as HTML for light and dark pages. Until the first step is done, shows what `ranks` are doing."""
    loss = "" if status.loss is None else f"{status.loss:.4f}"
    speed = "" if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f}"
    charts = _chart("loss", loss, status.losses, status, status.evaluations)
    charts += _chart("tokens/s", speed, status.speeds, status, from_zero=True)
    curves = f'<div style="display: flex; flex-wrap: wrap; gap: 4px 24px;">{charts}</div>'
    style = f"{_FONT} {_NUMBERS} color: var(--jp-ui-font-color1, currentColor); max-width: 640px; padding: 4px 0;"
    return f'<div style="{style}">{_progress(status)}{curves}{_ranks(status, ranks)}</div>'


def _time_left(status: RunStatus) -> str:
    if status.ended is not None:
        return status.ended
    return "" if status.seconds_left is None else f"{duration(max(0, round(status.seconds_left)))} left"


def _progress(status: RunStatus) -> str:
    said, right = "first step" if status.started else "starting", f"{status.last_step:,} steps to go"
    if status.started and status.step:
        said, right = f"step {status.step:,} of {status.last_step:,}, {status.done:.0%}", _time_left(status)
    words = f'<span>{escape(said)}</span><span style="opacity: 0.75;">{escape(right)}</span>'
    words = f'<div style="display: flex; justify-content: space-between; margin: 2px 0 6px;">{words}</div>'
    return _bar(status.done, _CURVE) + words


def _bar(share: float, color: str, width: str = "auto") -> str:
    style = f"height: 9px; width: {width}; border: 1px solid {color}; border-radius: 4px; overflow: hidden;"
    fill = f"height: 100%; width: {100 * min(1.0, max(0.0, share)):.1f}%; background: {color};"
    return f'<div style="{style}"><div style="{fill}"></div></div>'


def _chart(
    name: str, now: str, points: Points, status: RunStatus, dots: Points = (), *, from_zero: bool = False
) -> str:
    """Draw `points` as a curve and `dots` (held-out loss) as rings. The space on the right is for future steps."""
    shown, rings = ([(step, value) for step, value in curve if math.isfinite(value)] for curve in (points, dots))
    low, high = _range([value for _, value in (*shown, *rings)], from_zero)
    right, floor, middle = WIDE - _RIGHT, HIGH - _BOTTOM, (_TOP + HIGH - _BOTTOM) / 2

    def place(step: int, value: float) -> tuple[float, float]:
        x = _LEFT + (right - _LEFT) * (step - 1) / max(1, status.last_step - 1)
        return x, floor - (floor - _TOP) * (value - low) / (high - low)

    lines = labels = ""
    for y, value, opacity in ((_TOP, high, 0.18), (middle, (low + high) / 2, 0.18), (floor, low, 0.55)):
        lines += f'<line x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="currentColor" opacity="{opacity}"/>'
        if shown or rings:
            labels += f'<text x="{_LEFT - 5}" y="{y + 4}" text-anchor="end">{_number(value)}</text>'
    labels += f'<text x="{_LEFT}" y="{HIGH - 4}">1</text>'
    labels += f'<text x="{right}" y="{HIGH - 4}" text-anchor="end">{status.last_step:,}</text>'
    labels += f'<text x="{(WIDE + _LEFT) / 2}" y="{HIGH - 4}" text-anchor="middle">step</text>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in starmap(place, shown))
    circles = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="none" stroke="currentColor" stroke-width="1.3"/>'
        for x, y in starmap(place, rings)
    )
    note = ' <span style="opacity: 0.75;">○ held-out text</span>' if dots else ""
    return (
        f'<div><div><b>{name}</b> {now}{note}</div><svg width="{WIDE}" height="{HIGH}" role="img" '
        f'aria-label="{name} over steps, now {now or "unknown"}" style="display: block; overflow: visible;">{lines}'
        f'<polyline points="{path}" fill="none" stroke="{_CURVE}" stroke-width="1.8" stroke-linejoin="round"/>{circles}'
        f'<g fill="currentColor" font-size="10" opacity="0.8">{labels}</g></svg></div>'
    )


def _ranks(status: RunStatus, now: Sequence[Now]) -> str:
    rows = ""
    for rank in range(max(len(status.memory), len(status.communication), len(now))):
        color, cells = rank_color(rank), [f"<b>rank {rank}</b>"]
        if rank < len(status.communication):
            share = status.communication[rank]
            cells += [_bar(share, color, "110px"), f"{share:.0%} communicating"]
        elif rank < len(now):
            cells += [escape(str(now[rank]))]
        if rank < len(status.memory):
            cells += [f"{size(status.memory[rank])} {'on the GPU' if status.device == 'cuda' else 'resident'}"]
        inner = "".join(f'<td style="padding: 1px 14px 1px 6px; text-align: left;">{cell}</td>' for cell in cells)
        mark = f'<td style="padding: 0; width: 5px; background: {color};"></td>'
        rows += f'<tr style="background: none;">{mark}{inner}</tr>'
    return f'<table style="border-spacing: 0; margin: 4px 0 0; {_FONT} {_NUMBERS}">{rows}</table>' if rows else ""


def _range(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if from_zero:
        step = 10 ** math.floor(math.log10(high)) if high > 0 else 1.0
        return 0.0, step * next(times for times in (1, 1.2, 1.6, 2, 3, 4, 6, 8, 10) if times * step >= high)
    room = (high - low) * 0.04 or abs(high) * 0.05 or 0.5
    return low - room, high + room


def _number(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:.2f}"
