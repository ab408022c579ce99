"""Training runs: loss and speed over the steps, a comparison of two runs, and the speed-up on more ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tplab.viz.colors import CURVES, DASHES, FAINT, INK, MARKERS, WIDTH, Picture, chart, style

Points = Sequence[tuple[int, float]]


def training(
    losses: Points,
    speeds: Points = (),
    *,
    evaluations: Points = (),
    ylabel: str = "loss",
    from_zero: bool = False,
) -> Picture:
    """Plot the loss over the steps of a run and, in a second chart, its speed.

    losses               the (step, loss) points
    speeds               the (step, tokens/s) points; if there are none, only the loss is plotted
    evaluations          the (step, loss) points of held-out text, which are drawn as circles
    ylabel, from_zero    the label of the first curve if it isn't a loss, and whether its axis starts at zero
    """
    with style():
        picture = Picture(figsize=(WIDTH, 2.75), layout="constrained")
        newest = f"{ylabel} {losses[-1][1]:,.4g} at step {losses[-1][0]:,}"
        picture.caption = newest + (f", {speeds[-1][1]:,.0f} tokens/s" if speeds else "")
        widths = [1.5, 1] if speeds else [1]
        places = picture.subplots(1, len(widths), squeeze=False, gridspec_kw={"width_ratios": widths})[0]
        _over_steps(places[0], losses, ylabel, from_zero)
        if evaluations:
            places[0].plot(
                *zip(*evaluations, strict=True), "o", color="white", markeredgecolor=INK, markeredgewidth=1.4,
                markersize=5.5, label="held-out text",
            )  # fmt: skip
            places[0].lines[0].set_label("training text")
            places[0].legend()
        if speeds:
            _over_steps(places[1], speeds, "tokens/s", from_zero=True)
    picture.description = f"{ylabel} over the steps, from {losses[0][1]:,.4g} to {newest}."
    return picture


def _over_steps(axes: Axes, points: Points, ylabel: str, from_zero: bool) -> None:
    axes.plot(*zip(*points, strict=True), color=CURVES[1], linewidth=1.4)
    axes.set_ylabel(ylabel)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if from_zero:
        axes.set_ylim(0, 1.15 * max(value for _, value in points))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid()


def compared(
    runs: Mapping[str, Sequence[float]],
    difference: Sequence[float],
    *,
    steps: Sequence[int] | None = None,
) -> Picture:
    """Plot the losses of several runs in one chart, and below it the difference between the last run and the first.

    steps    the steps of the losses; None: 1, 2, 3 .. If some steps are missing, the others are marked with dots
    """
    at = list(range(1, len(difference) + 1) if steps is None else steps)
    dots: dict[str, Any] = {} if at == list(range(1, len(at) + 1)) else {"marker": "o", "markersize": 4}
    with style():
        picture = Picture(figsize=(WIDTH, 3.7), layout="constrained")
        largest = max(map(abs, difference), default=0.0)
        picture.caption = f"losses of {' and '.join(runs)}: {largest:.2g} apart at most"
        above, below = picture.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2.1, 1]})
        for index, (name, values) in enumerate(runs.items()):
            last = index == len(runs) - 1
            above.plot(
                at, values, label=name, **dots, linestyle=DASHES[index % len(DASHES)],
                color=CURVES[index % len(CURVES)], linewidth=1.5 if last else 4.5,
            )  # fmt: skip
        above.set_ylabel("loss")
        above.legend(handlelength=3.2)
        below.axhline(0, color=FAINT, linewidth=0.8)
        below.plot(at, difference, color=INK, linewidth=1.2, **dots)
        below.set_ylabel("difference")
        below.set_ylim(*(side * (1.15 * largest or 1e-9) for side in (-1, 1)))
        below.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        below.yaxis.set_major_locator(MaxNLocator(3))
        below.set_xlabel("step")
        below.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        for axes in (above, below):
            axes.grid()
    each = "; ".join(f"{name} goes from {values[0]:.4g} to {values[-1]:.4g}" for name, values in runs.items())
    picture.description = f"Losses in one chart: {each}. Below them, a difference of at most {largest:.2g}."
    return picture


def scaling(lines: Mapping[str, Mapping[int, float]], *, ylabel: str = "speed-up") -> Picture:
    """Plot values such as speed-ups over the number of ranks, on logarithmic axes: {"measured": {1: 1.0, 2: 1.7}}.

    The first line is bold. The other lines are for comparison. A thin line shows perfect scaling.
    """
    counts = sorted({count for line in lines.values() for count in line})
    with style():
        caption = "; ".join(f"{name}: {max(line)} ranks {line[max(line)]:.2f}" for name, line in lines.items())
        picture, axes = chart(WIDTH * 0.85, 3.1, caption, None)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.plot(counts, counts, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)), label="as many times as ranks")
        for index, (name, line) in enumerate(lines.items()):
            points = sorted(line.items())
            axes.plot(
                *zip(*points, strict=True), marker=MARKERS[index % len(MARKERS)], label=name, markersize=6,
                color=CURVES[1] if index == 0 else (INK, FAINT, FAINT)[(index - 1) % 3],
                linewidth=2.2 if index == 0 else 1.3, linestyle=DASHES[index % len(DASHES)],
                markerfacecolor=CURVES[1] if index == 0 else "white", zorder=4 - index * 0.1,
            )  # fmt: skip
        _plain(axes, counts)
        axes.set_xlabel("ranks that share the model")
        axes.set_ylabel(ylabel)
        axes.grid()
        axes.legend(handlelength=3.2)
    each = "; ".join(f"{name}: {line[max(line)]:.2f} on {max(line)} ranks" for name, line in lines.items())
    picture.description = f"{ylabel} over ranks: {each}."
    return picture


def _plain(axes: Axes, counts: Sequence[int]) -> None:
    """Label the axes with plain numbers instead of powers of two."""
    axes.xaxis.set_major_locator(FixedLocator(counts))
    low, high = axes.get_ylim()
    steps = [step for step in (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 16, 32, 64) if low <= step <= high]
    axes.yaxis.set_major_locator(FixedLocator(steps))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
