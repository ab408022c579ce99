"""Values over steps, such as losses. Where the curves coincide, the differences are drawn below them."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tplab.viz.colors import CURVES, DASHES, FAINT, WIDTH, Picture, chart, style

COINCIDE = 0.03  # share of the curves' range by which they may differ if the eye is to take them for one


def curves(
    losses: Mapping[str, Sequence[float]], *, title: str | None = None, xlabel: str = "step", ylabel: str = "loss"
) -> Picture:
    """Draw one curve per label. If all curves coincide, a second chart shows how each differs from the first.

    The curves may have different lengths. A difference ends where the shorter curve ends.
    """
    lines = {name: [float(value) for value in values] for name, values in losses.items()}
    apart = _differences(lines)
    largest = max((abs(value) for values in apart.values() for value in values), default=0.0)
    every = [value for values in lines.values() for value in values]
    two_charts = bool(apart) and largest <= COINCIDE * (max(every) - min(every))
    caption = title or "curves: " + ", ".join(losses)
    with style():
        if two_charts:
            picture = Picture(figsize=(WIDTH * 0.85, 3.9), layout="constrained")
            picture.caption = caption
            axes, below = picture.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2.4, 1]})
            axes.set_title(title or "")
            _draw_differences(below, apart, largest)
        else:
            picture, axes = chart(WIDTH * 0.85, 2.9, title, caption)
            below = axes
        for index, (name, values) in enumerate(lines.items()):
            axes.plot(
                range(1, len(values) + 1), values, label=name, color=CURVES[(index + (not apart)) % len(CURVES)],
                linewidth=4.5 if apart and not index else 1.7, linestyle=DASHES[index % len(DASHES)],
            )  # fmt: skip
        axes.set_ylabel(ylabel)
        axes.grid()
        axes.legend(handlelength=3.2)
        below.set_xlabel(xlabel)
    each = "; ".join(f"{name} goes from {line[0]:,.4g} to {line[-1]:,.4g}" for name, line in lines.items() if line)
    picture.description = f"{ylabel} over {xlabel}: {each}."
    if two_charts:
        picture.description += f" Below, the differences from {next(iter(lines))}, which are at most {largest:.2g}."
    return picture


def _differences(lines: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return how each curve differs from the first one, for the steps that both have."""
    first = next(iter(lines.values()), ())
    return {
        name: [value - reference for value, reference in zip(values, first, strict=False)]
        for name, values in list(lines.items())[1:]
    }


def _draw_differences(axes: Axes, apart: Mapping[str, Sequence[float]], largest: float) -> None:
    axes.axhline(0, color=FAINT, linewidth=0.8)
    for index, values in enumerate(apart.values(), start=1):
        axes.plot(
            range(1, len(values) + 1), values, linewidth=1.3,
            color=CURVES[index % len(CURVES)], linestyle=DASHES[index % len(DASHES)],
        )  # fmt: skip
    axes.set_ylabel("difference")
    axes.set_ylim(*(side * (1.15 * largest or 1e-9) for side in (-1, 1)))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.grid()
