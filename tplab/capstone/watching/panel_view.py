"""Render the live panel: pure functions that turn a run's status into HTML or into a line of text.

████████████░░░░░░░░   step 312 of 600, 52 %                      2 min 10 s left
loss 2.31 ⌇⌇⌇⌇⌇        tokens/s 8,912 ⌇⌇⌇⌇⌇
rank 0  ▇▇▇░░░ 34 % communicating   412 MB
"""

import math
from collections.abc import Sequence
from html import escape

from tplab.capstone.progress import bar
from tplab.capstone.watching.log_tail import RunStatus
from tplab.common.units import duration, size
from tplab.runtime.liveview import Now
from tplab.viz.colors import rank_color

WIDE, HIGH = 300, 118  # size of a curve in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 8, 18  # margins around the curve
_CURVE = "#3A86C8"  # visible on white and on black
_FONT = "font-family: var(--jp-ui-font-family, system-ui, sans-serif); font-size: 12px; line-height: 1.45;"
_NUMBERS = "font-variant-numeric: tabular-nums;"
Points = Sequence[tuple[int, float]]


def to_html(status: RunStatus, ranks: Sequence[Now] = ()) -> str:
    """Render the panel as HTML for light and dark pages. Until the first step is done, shows what `ranks` are doing."""
    loss = "" if status.loss is None else f"{status.loss:.4f}"
    speed = "" if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f}"
    charts = _chart("loss", loss, status.losses, status, status.evaluations)
    charts += _chart("tokens/s", speed, status.speeds, status, from_zero=True)
    curves = f'<div style="display: flex; flex-wrap: wrap; gap: 4px 24px;">{charts}</div>'
    rows = [_progress(status), curves, _ranks(status, ranks)]
    style = f"{_FONT} {_NUMBERS} color: var(--jp-ui-font-color1, currentColor); max-width: 640px; padding: 4px 0;"
    return f'<div style="{style}">{"".join(rows)}</div>'


def to_line(status: RunStatus, width: int, ranks: Sequence[Now] = ()) -> str:
    """Render the panel as one line of at most `width` characters."""
    if not status.step or not status.started:
        doing = ", ".join(f"rank {now.rank} {now}" for now in ranks)
        return _cut(f"{'first step' if status.started else 'starting'}  {doing}", width)
    parts = [f"step {status.step}/{status.last_step}", bar(status.done), f"{status.done:.0%}"]
    if left := _time_left(status):
        parts.append(left)
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.tokens_per_second is not None:
        parts.append(f"{status.tokens_per_second:,.0f} tokens/s")
    if status.communication:
        parts.append(f"{max(status.communication):.0%} communicating")
    return _cut("  ".join(parts), width)


def _time_left(status: RunStatus) -> str:
    if status.ended is not None:
        return status.ended
    return "" if status.seconds_left is None else f"{duration(max(0, round(status.seconds_left)))} left"


def _progress(status: RunStatus) -> str:
    said, right = "first step" if status.started else "starting", f"{status.last_step:,} steps to go"
    if status.started and status.step:
        said, right = f"step {status.step:,} of {status.last_step:,}, {status.done:.0%}", _time_left(status)
    bar = (
        '<div style="height: 9px; border: 1px solid currentColor; border-radius: 5px; overflow: hidden;">'
        f'<div style="height: 100%; width: {100 * status.done:.1f}%; background: {_CURVE};"></div></div>'
    )
    words = f'<span>{escape(said)}</span><span style="opacity: 0.75;">{escape(right)}</span>'
    return f'{bar}<div style="display: flex; justify-content: space-between; margin: 2px 0 6px;">{words}</div>'


def _chart(
    name: str, now: str, points: Points, status: RunStatus, dots: Points = (), *, from_zero: bool = False
) -> str:
    """Draw a curve over all steps of the run, with rings for held-out text. Space on the right is for future steps."""
    shown = [(step, value) for step, value in points if math.isfinite(value)]
    values = [value for _, value in shown] + [value for _, value in dots if math.isfinite(value)]
    low, high = _range(values, from_zero)
    inner_width, inner_height = WIDE - _LEFT - _RIGHT, HIGH - _TOP - _BOTTOM

    def place(point: tuple[int, float]) -> tuple[float, float]:
        step, value = point
        x = _LEFT + inner_width * (step - 1) / max(1, status.last_step - 1)
        return x, _TOP + inner_height * (1 - (value - low) / (high - low))

    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, shown))
    rings = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="none" stroke="currentColor" stroke-width="1.3"/>'
        for x, y in (place(dot) for dot in dots if math.isfinite(dot[1]))
    )
    floor = HIGH - _BOTTOM
    lines = "".join(
        f'<line x1="{_LEFT}" x2="{WIDE - _RIGHT}" y1="{y}" y2="{y}" stroke="currentColor" opacity="{opacity}"/>'
        for y, opacity in ((_TOP, 0.18), (_TOP + inner_height / 2, 0.18), (floor, 0.55))
    )
    labels = "".join(
        f'<text x="{_LEFT - 5}" y="{y + 4}" text-anchor="end">{_number(value)}</text>'
        for y, value in ((_TOP, high), (_TOP + inner_height / 2, (low + high) / 2), (floor, low))
        if values
    )
    labels += f'<text x="{_LEFT}" y="{HIGH - 4}">1</text>'
    labels += f'<text x="{WIDE - _RIGHT}" y="{HIGH - 4}" text-anchor="end">{status.last_step:,}</text>'
    labels += f'<text x="{(WIDE + _LEFT) / 2}" y="{HIGH - 4}" text-anchor="middle">step</text>'
    note = ' <span style="opacity: 0.75;">○ held-out text</span>' if dots else ""
    return (
        f'<div><div><b>{name}</b> {now}{note}</div><svg width="{WIDE}" height="{HIGH}" role="img" '
        f'aria-label="{name} over steps, now {now or "unknown"}" style="display: block; overflow: visible;">{lines}'
        f'<polyline points="{path}" fill="none" stroke="{_CURVE}" stroke-width="1.8" stroke-linejoin="round"/>{rings}'
        f'<g fill="currentColor" font-size="10" opacity="0.8">{labels}</g></svg></div>'
    )


def _ranks(status: RunStatus, now: Sequence[Now]) -> str:
    rows = ""
    for rank in range(max(len(status.memory), len(status.communication), len(now))):
        color, cells = rank_color(rank), [f"<b>rank {rank}</b>"]
        if rank < len(status.communication):
            share = min(1.0, max(0.0, status.communication[rank]))
            bar = f"height: 8px; width: 110px; border: 1px solid {color}; border-radius: 2px; overflow: hidden;"
            fill = f"height: 100%; width: {100 * share:.0f}%; background: {color};"
            cells += [f'<div style="{bar}"><div style="{fill}"></div></div>', f"{share:.0%} communicating"]
        elif rank < len(now):
            cells += [escape(str(now[rank]))]
        if rank < len(status.memory):
            cells += [f"{size(status.memory[rank])} {'on the GPU' if status.device.startswith('cuda') else 'resident'}"]
        inner = "".join(f'<td style="padding: 1px 14px 1px 6px; text-align: left;">{cell}</td>' for cell in cells)
        rows += (
            f'<tr style="background: none;"><td style="padding: 0; width: 5px; background: {color};"></td>{inner}</tr>'
        )
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


def _cut(line: str, width: int) -> str:
    line = line.rstrip()
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"
