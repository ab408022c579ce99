"""Where the time or the memory goes, by category, and a model's predictions compared with published values."""

from collections.abc import Mapping
from typing import Any

from matplotlib.patches import Patch

from tplab.common import units
from tplab.memory.memory_bill import BETWEEN_MATMULS
from tplab.viz.colors import FAINT, INK, RED, WIDTH, Picture, chart, rows, style, tint

# Shades of gray and hatches in order, so that no part looks like a rank
_LOOKS = (
    ("#5F6B73", ""), ("white", "////"), ("#C3CBD0", "...."), ("#EEF0F2", "\\\\\\\\"), ("#94A0A8", "xxxx"),
    ("white", ""), ("#C3CBD0", ""), ("white", "++++"),
)  # fmt: skip
_SAVED = ("attention scores", "inside attention and MLP", "between the matmuls")
_UNITS = (("s", 1.0, "seconds"), ("ms", 1e-3, "milliseconds"), ("µs", 1e-6, "microseconds"))


def time_bars(
    bars: Mapping[str, Mapping[str, float]], *, notes: Mapping[str, str] | None = None, title: str | None = None
) -> Picture:
    """Draw one stacked bar per label: {"p = 8": {"compute": 3e-3, "communicate": 1e-3}}, in seconds.

    notes: text to write after a bar, such as {"p = 8": "80%"}. A bar without a note gets its total

    Raises ValueError if there are no bars, or more than eight different parts.
    """
    most = max((sum(parts.values()) for parts in bars.values()), default=0.0)
    unit, factor, name = next((unit for unit in _UNITS if most >= unit[1]), _UNITS[-1])
    return _stacked(bars, unit, factor, xlabel=name, verb="takes", notes=notes or {}, most=most, title=title)


def saved_activations(
    bars: Mapping[str, Mapping[str, int]], *, title: str | None = None, scale: int | None = None
) -> Picture:
    """Draw what autograd saves for backward, with one bar for each way of running a layer.

    A bar has three parts: the attention scores, what is saved between the matmuls, and everything else.

    bars:  what `tplab.memory.layer_activations` returns, for each bar: {"p = 8": {"attention scores": 4096}}
    scale: the number of bytes that fill the width, to give several pictures the same scale (None: the largest total)
    """
    grouped: dict[str, dict[str, int]] = {label: dict.fromkeys(_SAVED, 0) for label in bars}
    for label, kept in bars.items():
        for name, size in kept.items():
            grouped[label][_part(name)] += size
    most = scale or max((sum(parts.values()) for parts in bars.values()), default=0)
    unit, factor = units.byte_unit(most)
    return _stacked(grouped, unit, factor, xlabel=unit, verb="saves", notes={}, most=most, title=title)


def _part(name: str) -> str:
    scores, inside, between = _SAVED
    return between if name in BETWEEN_MATMULS else scores if name == scores else inside


def _stacked(
    bars: Mapping[str, Mapping[str, float]], unit: str, factor: float, *, xlabel: str, verb: str,
    notes: Mapping[str, str], most: float, title: str | None,
) -> Picture:  # fmt: skip
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    if not names or len(names) > len(_LOOKS):
        raise ValueError(f"stacked bars have 1 to {len(_LOOKS)} different parts, got {names}")
    looks: dict[str, tuple[Any, str]] = dict(zip(names, _LOOKS, strict=False))
    if "waits" in looks:
        looks["waits"] = (tint(RED, 0.6), "")  # as in `overlap`
    totals = {label: f"{sum(parts.values()) / factor:.3g} {unit}" for label, parts in bars.items()}
    caption = title or "; ".join(f"{label}: {total}" for label, total in totals.items())
    with style():
        picture, axes = chart(WIDTH, 1.2 + 0.33 * len(bars), caption, title)
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
        handles = [Patch(facecolor=looks[n][0], hatch=looks[n][1], edgecolor=INK, label=n) for n in names]
        picture.legend(handles=handles, ncols=min(len(handles), 4), loc="outside lower right")
    each = "; ".join(f"{label} {verb} {total}" for label, total in totals.items())
    picture.description = f"Stacked bars of {', '.join(names)}: {each}."
    return picture


def against(ratios: Mapping[str, float], *, title: str | None = None) -> Picture:
    """Plot a model's predictions relative to the published values.

    {"8 GPUs": 1.05} means 5% above the published value.
    """
    if not ratios:
        raise ValueError("there are no figures to compare")
    widest = max(0.1, *(abs(ratio - 1) for ratio in ratios.values()))
    each = ", ".join(f"{label} {ratio - 1:+.0%}" for label, ratio in ratios.items())
    with style():
        caption = title or f"the model against published: {each}"
        picture, axes = chart(WIDTH, 0.9 + 0.23 * len(ratios), caption, title)
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
