"""Where the time or the memory goes, by category, and a model's predictions compared with published values."""

from collections.abc import Mapping
from typing import Any

from matplotlib.patches import Patch

from tplab.common import units
from tplab.memory.memory_bill import BETWEEN_MATMULS
from tplab.viz.colors import FAINT, INK, RED, WIDTH, Picture, chart, rows, style, tint

# Shades of gray and hatches, so that no part looks like a rank
_LOOKS: dict[str, tuple[Any, str]] = {
    "computes": ("#5F6B73", ""),
    "waits": (tint(RED, 0.6), ""),  # as in `overlap`
    "attention scores": ("#5F6B73", ""),
    "inside attention and MLP": ("white", "////"),
    "between the matmuls": ("#C3CBD0", "...."),
}
_UNITS = (("s", 1.0, "seconds"), ("ms", 1e-3, "milliseconds"), ("µs", 1e-6, "microseconds"))


def time_bars(bars: Mapping[str, Mapping[str, float]], *, notes: Mapping[str, str], title: str) -> Picture:
    """Draw one stacked bar per label, with a note behind it.

    bars:  seconds, {"p = 8": {"computes": 3e-3, "waits": 1e-3}}
    notes: what to write behind each bar, such as {"p = 8": "75%"}
    """
    most = max((sum(parts.values()) for parts in bars.values()), default=0.0)
    unit, factor, name = next((unit for unit in _UNITS if most >= unit[1]), _UNITS[-1])
    return _stacked(bars, unit, factor, xlabel=name, verb="takes", notes=notes, most=most, title=title)


def saved_activations(bars: Mapping[str, Mapping[str, int]], *, title: str, scale: int) -> Picture:
    """Draw what autograd saves for backward, with one bar for each way of running a layer, and its size behind it.

    A bar has three parts: the attention scores, what is saved between the matmuls, and everything else.

    bars:  what `tplab.memory.layer_activations` returns, for each bar: {"p = 8": {"attention scores": 4096}}
    scale: the number of bytes that fill the width, so that several pictures have the same scale
    """
    grouped: dict[str, dict[str, int]] = {label: dict.fromkeys(list(_LOOKS)[2:], 0) for label in bars}
    for label, kept in bars.items():
        for name, size in kept.items():
            inside = name if name in _LOOKS else "inside attention and MLP"
            grouped[label]["between the matmuls" if name in BETWEEN_MATMULS else inside] += size
    unit, factor = units.byte_unit(scale)
    return _stacked(grouped, unit, factor, xlabel=unit, verb="saves", notes={}, most=scale, title=title)


def _stacked(
    bars: Mapping[str, Mapping[str, float]], unit: str, factor: float, *, xlabel: str, verb: str,
    notes: Mapping[str, str], most: float, title: str,
) -> Picture:  # fmt: skip
    looks = {name: _LOOKS[name] for parts in bars.values() for name in parts}
    totals = {label: f"{sum(parts.values()) / factor:.3g} {unit}" for label, parts in bars.items()}
    with style():
        picture, axes = chart(WIDTH, 1.2 + 0.33 * len(bars), title)
        for place, (label, parts) in enumerate(bars.items()):
            left = 0.0
            for name, size in parts.items():
                color, hatch = looks[name]
                axes.barh(place, size / factor, 0.66, left=left, color=color, hatch=hatch, edgecolor=INK, linewidth=0.8)
                left += size / factor
            note = notes.get(label, totals[label])
            axes.text(left + 0.012 * most / factor, place, note, va="center", fontsize=9)
        rows(axes, list(bars))
        axes.set_xlim(0, most / factor * 1.3)
        axes.set_xlabel(xlabel)
        handles = [Patch(facecolor=c, hatch=h, edgecolor=INK, label=name) for name, (c, h) in looks.items()]
        picture.legend(handles=handles, ncols=len(handles), loc="outside lower right")
    each = "; ".join(f"{label} {verb} {total}" for label, total in totals.items())
    picture.description = f"Stacked bars of {', '.join(looks)}: {each}."
    return picture


def against(ratios: Mapping[str, float], *, title: str) -> Picture:
    """Plot a model's predictions relative to the published values.

    {"8 GPUs": 1.05} means 5% above the published value.
    """
    widest = max(0.1, *(abs(ratio - 1) for ratio in ratios.values()))
    each = ", ".join(f"{label} {ratio - 1:+.0%}" for label, ratio in ratios.items())
    with style():
        picture, axes = chart(WIDTH, 0.9 + 0.23 * len(ratios), title)
        axes.axvline(100, color=INK, linewidth=1.4)
        for place, ratio in enumerate(ratios.values()):
            axes.plot([100, 100 * ratio], [place, place], color=FAINT, linewidth=1.4, zorder=2)
            side = "left" if ratio >= 1 else "right"
            at = 100 * ratio + (1 if ratio >= 1 else -1) * 5 * widest
            axes.text(at, place, f"{ratio - 1:+.0%}", ha=side, va="center", fontsize=9)
        axes.plot([100 * r for r in ratios.values()], range(len(ratios)), "o", color=INK, markersize=6.5, zorder=3)
        rows(axes, list(ratios))
        axes.set_xlim(100 - 140 * widest, 100 + 140 * widest)
        axes.set_xlabel("prediction in % of the published value")
        axes.grid(axis="x")
    picture.description = f"One disc per prediction, and a line for the published values: {each}."
    return picture
