"""Pictures of a cost model: where the time goes, by category, and its predictions compared with published values."""

from collections.abc import Mapping

from matplotlib.patches import Patch

from tplab.viz.colors import FAINT, INK, WIDTH, Picture, chart, style

# Shades of gray and hatches in order, so that no part looks like a rank
_LOOKS = (
    ("#5F6B73", ""), ("white", "////"), ("#C3CBD0", "...."), ("#EEF0F2", "\\\\\\\\"), ("#94A0A8", "xxxx"),
    ("white", ""), ("#C3CBD0", ""), ("white", "++++"),
)  # fmt: skip
_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def time_bars(
    rows: Mapping[str, Mapping[str, float]],
    *,
    notes: Mapping[str, str] | None = None,
    title: str | None = None,
) -> Picture:
    """Draw one stacked bar per label: {"p = 8": {"compute": 3e-3, "communicate": 1e-3}}, in seconds.

    notes: text after each bar, such as {"p = 8": "80 %"}; bars without a note show their sum

    Raises ValueError if there are no rows, or more than eight different parts.
    """
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    if not names or len(names) > len(_LOOKS):
        raise ValueError(f"time_bars draws 1 to {len(_LOOKS)} different parts, got {names}")
    totals = {label: sum(parts.values()) for label, parts in rows.items()}
    most = max(totals.values())
    unit, factor = next((unit for unit in _UNITS if most >= unit[1]), _UNITS[-1])
    looks = dict(zip(names, _LOOKS, strict=False))
    caption = title or "; ".join(f"{label}: {total / factor:.3g} {unit}" for label, total in totals.items())
    with style():
        picture, axes = chart(WIDTH, 1.2 + 0.33 * len(rows), caption, title)
        for place, (label, parts) in enumerate(rows.items()):
            left = 0.0
            for name, seconds in parts.items():
                color, hatch = looks[name]
                axes.barh(
                    place, seconds / factor, 0.66, left=left, color=color, hatch=hatch, edgecolor=INK, linewidth=0.8
                )
                left += seconds / factor
            note = (notes or {}).get(label, f"{totals[label] / factor:.3g} {unit}")
            axes.text(left + 0.012 * most / factor, place, note, va="center", fontsize=9)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_xlim(0, most / factor * 1.3)
        axes.set_xlabel({"s": "seconds", "ms": "milliseconds", "µs": "microseconds"}[unit])
        axes.tick_params(left=False)
        handles = [Patch(facecolor=looks[n][0], hatch=looks[n][1], edgecolor=INK, label=n) for n in names]
        picture.legend(handles=handles, ncols=min(len(handles), 4), loc="outside lower right")
    picture.description = (
        "Stacked bars of "
        + ", ".join(names)
        + ": "
        + "; ".join(f"{label} takes {total / factor:.3g} {unit}" for label, total in totals.items())
        + "."
    )
    return picture


def against(
    rows: Mapping[str, tuple[float, float]],
    *,
    unit: str = "",
    title: str | None = None,
) -> Picture:
    """Plot pairs such as {"8 GPUs": (77, 81)}, a published number and the model's, labeled with their difference."""
    if not rows:
        raise ValueError("there are no figures to compare")
    most = max(max(pair) for pair in rows.values())
    off = {label: second / first - 1 for label, (first, second) in rows.items()}
    with style():
        caption = title or "the model against published: " + ", ".join(f"{k} {v:+.0%}" for k, v in off.items())
        picture, axes = chart(WIDTH, 1.2 + 0.27 * len(rows), caption, title)
        for place, (label, (first, second)) in enumerate(rows.items()):
            axes.plot([first, second], [place, place], color=FAINT, linewidth=1.4, zorder=2)
            axes.text(max(first, second) + 0.025 * most, place, f"{off[label]:+.0%}", va="center", fontsize=9)
        places = range(len(rows))
        axes.plot([a for a, _ in rows.values()], places, "o", color=INK, markersize=7, label="published", zorder=3)
        axes.plot(
            [b for _, b in rows.values()], places, "o", color="white", markeredgecolor=INK, markersize=7,
            markeredgewidth=1.5, label="the model", zorder=4,
        )  # fmt: skip
        axes.set_yticks(places, list(rows))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, most * 1.12)
        axes.set_xlabel(unit)
        axes.tick_params(left=False)
        axes.grid(axis="x")
        picture.legend(ncols=2, loc="outside lower right")
    picture.description = (
        "Discs for published and rings for the model: "
        + "; ".join(
            f"{label}: {first:,.4g} and {second:,.4g} {unit}".rstrip() for label, (first, second) in rows.items()
        )
        + "."
    )
    return picture
