"""The memory that a GPU needs, compared with the memory that it has, and the live memory at each moment of a run."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from matplotlib.patches import Patch

from tplab.common import units
from tplab.viz.colors import FAINT, INK, WIDTH, Picture, chart, rows, style, tint

# Parts have shades of gray and hatches, so that no part looks like a rank; red is for what doesn't fit.
_PARTS = {
    "weights": ("#5F6B73", ""),
    "gradients": ("#94A0A8", "////"),
    "optimizer state": ("#C3CBD0", "...."),
    "activations": ("#EEF0F2", "\\\\\\\\"),
}
RED = "#C62828"
_GB, _MB = 10**9, 10**6


def bill(bills: Mapping[str, Any], *, capacity: int | None = None, title: str) -> Picture:
    """Draw one stacked bar per label with weights, gradients, optimizer state and activations, in GB (10^9 bytes).

    If all bars are below 0.1 GB, the unit is MB.

    bills:    by label, the result of `tplab.memory.memory_bill.bill`, or bytes by category
    capacity: bytes of the GPU's memory; everything beyond is red, and the first category that doesn't fit is named
    """
    bars = {label: getattr(value, "parts", lambda value=value: value)() for label, value in bills.items()}
    totals = {label: sum(parts.values()) for label, parts in bars.items()}
    largest = max(*totals.values(), capacity or 0)
    unit = _GB if largest >= _GB / 10 else _MB
    most = largest / unit
    with style():
        picture, axes = chart(WIDTH, 1.25 + 0.52 * len(bars), title)
        for place, (label, parts) in enumerate(bars.items()):
            left = 0.0
            for name, size in parts.items():
                _part(axes, place, left, size / unit, name, capacity and capacity / unit)
                left += size / unit
            right = left
            if capacity and abs(right - capacity / unit) < 0.02 * most:  # the text would hide the dashed line
                right = max(right, capacity / unit)
            axes.text(
                right + 0.012 * most, place, _verdict(totals[label], parts, capacity), va="center",
                color=RED if capacity and totals[label] > capacity else INK, fontsize=9, zorder=4,
                bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip
        if capacity:
            axes.axvline(capacity / unit, color=INK, linewidth=1.6, linestyle=(0, (4, 2)))
        rows(axes, list(bars))
        axes.set_xlim(0, most * 1.42)
        line = f"; dashed line: {_in_gb(capacity)}, what the GPU has" if capacity else ""
        axes.set_xlabel(("GB" if unit == _GB else "MB") + line)
        handles = [_patch(name) for name in dict.fromkeys(name for parts in bars.values() for name in parts)]
        if capacity and any(total > capacity for total in totals.values()):
            handles.append(Patch(facecolor=tint(RED, 0.72), edgecolor=INK, label="does not fit"))
        picture.legend(handles=handles, ncols=len(handles), loc="outside lower center", columnspacing=1.2)
    each = "; ".join(f"{label} needs {_verdict(totals[label], parts, capacity)}" for label, parts in bars.items())
    picture.description = f"Stacked bars by category{line}: {each}."
    return picture


def live_memory(meter: Any, *, title: str) -> Picture:
    """Plot what a `tplab.memory.meter.MemoryMeter` recorded: live MB after each tensor that was created or freed."""
    if not meter.curve:
        raise ValueError("the meter saw no tensor: is the program inside its `with` block?")
    curve = [size / 1e6 for size in meter.curve]
    top = max([*curve, (meter.capacity or 0) / 1e6]) * 1.3
    with style():
        picture, axes = chart(WIDTH, 2.9, title)
        axes.fill_between(range(len(curve)), curve, step="post", color=_PARTS["optimizer state"][0])
        axes.step(range(len(curve)), curve, where="post", color=INK, linewidth=1)
        starts: list[float] = []  # start of the last name in each row; a name goes into the first row with room
        for place, name in meter.marks:
            axes.axvline(place, color=FAINT, linewidth=0.8, linestyle=(0, (3, 2)))
            row = next((row for row, at in enumerate(starts) if place - at > 0.19 * len(curve)), len(starts))
            starts[row : row + 1] = [place]
            axes.text(
                place + 0.006 * len(curve), top * (0.985 - 0.07 * row), name, fontsize=9, va="top", zorder=4,
                bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip
        if meter.capacity:
            axes.axhline(meter.capacity / 1e6, color=RED, linewidth=1.6, linestyle=(0, (4, 2)))
            axes.text(len(curve) * 0.006, meter.capacity / 1e6 - 0.015 * top, "all there is", color=RED, va="top")
        axes.set_ylim(0, top)
        axes.set_xlim(0, len(curve))
        axes.set_ylabel("MB live")
        axes.set_xlabel("tensors that came and went, in order")
        axes.set_xticks([])
    picture.description = f"Live memory rises and falls over {len(curve)} events, to {max(curve):.3g} MB at most."
    return picture


def _part(axes: Any, place: int, left: float, width: float, name: str, capacity: float | None) -> None:
    """Draw one segment of a bar, with the part above the capacity in red."""
    color, hatch = _PARTS.get(name, ("#FFFFFF", "xxxx"))
    limit = float("inf") if capacity is None else capacity
    inside = max(0.0, min(left + width, limit) - left)
    if inside:
        axes.barh(place, inside, 0.62, left=left, color=color, edgecolor=INK, hatch=hatch, linewidth=0.8)
    if width > inside:
        axes.barh(
            place, width - inside, 0.62, left=left + inside, color=tint(RED, 0.72), edgecolor=INK, hatch=hatch,
            linewidth=0.8,
        )  # fmt: skip


def _verdict(total: int, parts: Mapping[str, int], capacity: int | None) -> str:
    """Return the size and the verdict: "37.1 GB: fits", or the first category that doesn't fit."""
    if capacity is None or total <= capacity:
        return _in_gb(total) + ("" if capacity is None else ": fits")
    sums = accumulate(parts.values())
    name = next(name for name, used in zip(parts, sums, strict=True) if used > capacity)
    return f"{_in_gb(total)}: {name} {'do' if name.endswith('s') else 'does'} not fit"


def _patch(name: str) -> Patch:
    color, hatch = _PARTS.get(name, ("#FFFFFF", "xxxx"))
    return Patch(facecolor=color, edgecolor=INK, hatch=hatch, linewidth=0.8, label=name)


def _in_gb(size: int) -> str:
    """Format a size in GB, as GPUs are sold, even if it is thousands of GB. Below 0.1 GB, use MB."""
    return units.size(size, unit="GB" if size >= _GB / 10 else "MB")
