"""The activations that autograd saves for backward, by category, with one bar per way to run the same layer."""

from collections.abc import Mapping

from matplotlib.patches import Patch

from tplab.common import units
from tplab.viz.colors import INK, WIDTH, Picture, chart, style

_LOOKS = (("#5F6B73", ""), ("#94A0A8", "////"), ("#C3CBD0", "...."), ("#EEF0F2", "\\\\\\\\"), ("#FFFFFF", "xxxx"))


def saved_activations(
    bars: Mapping[str, Mapping[str, int]], *, title: str | None = None, scale: int | None = None
) -> Picture:
    """Draw one stacked bar per label. `bars` contains bytes by category, with up to five categories.

    scale: bytes at the right edge, to draw several pictures to the same scale (None: the longest bar)
    """
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    if not bars or len(names) > len(_LOOKS):
        raise ValueError(
            f"saved_activations draws bars of up to {len(_LOOKS)} parts; got {len(bars)} bars of {len(names)} parts"
        )
    totals = {label: sum(parts.values()) for label, parts in bars.items()}
    most = scale or max(totals.values())
    unit, factor = units.byte_unit(most)
    caption = title or "; ".join(f"{label}: {total / factor:.3g} {unit}" for label, total in totals.items())
    with style():
        picture, axes = chart(WIDTH, 1.2 + 0.46 * len(bars), caption, title)
        for place, (name, parts) in enumerate(bars.items()):
            left = 0.0
            for part, size in parts.items():
                color, hatch = _LOOKS[names.index(part)]
                axes.barh(place, size / factor, 0.62, left=left, color=color, edgecolor=INK, hatch=hatch, linewidth=0.8)
                left += size / factor
            axes.text(
                left + 0.012 * most / factor, place, f"{totals[name] / factor:.3g} {unit}", va="center", fontsize=9
            )
        axes.set_yticks(range(len(bars)), list(bars))
        axes.set_ylim(len(bars) - 0.45, -0.55)
        axes.set_xlim(0, most / factor * 1.16)
        axes.set_xlabel(unit)
        axes.tick_params(left=False)
        looks = {name: _LOOKS[number] for number, name in enumerate(names)}
        handles = [Patch(facecolor=c, edgecolor=INK, hatch=h, linewidth=0.8, label=n) for n, (c, h) in looks.items()]
        picture.legend(handles=handles, ncols=len(handles), loc="outside lower center", columnspacing=1.2)
    picture.description = (
        "Stacked bars of "
        + ", ".join(names)
        + ": "
        + "; ".join(f"{label} saves {total / factor:.3g} {unit}" for label, total in totals.items())
        + "."
    )
    return picture
