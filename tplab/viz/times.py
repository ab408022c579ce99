"""The time of a message of n bytes: measured points and lines, on logarithmic axes."""

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from tplab.common import units
from tplab.viz.colors import DASHES, FAINT, INK, WIDTH, Picture, chart, rank_color, style

_SHOWN = 2, 2**30  # the smallest and the largest message in bytes
_SIZES = {10.0**k: units.size(10**k) for k in range(0, 13, 2)}
_SECONDS = {10.0**k: units.duration(10.0**k) for k in range(-7, 2)}


def times(
    lines: Mapping[str, Callable[[float], float]],
    points: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
) -> Picture:
    """Plot times against message sizes. Every line is labeled at its right end. Lines without measured points are
    thin and gray.

    lines:  by name, a function from bytes to seconds, such as `Link.seconds`
    points: by name, measured (bytes, seconds), in the color of the line of the same name
    """
    low, high = _SHOWN
    steps = [low * (high / low) ** (index / 120) for index in range(121)]
    with style():
        picture, axes = chart(WIDTH, 4.1, title)
        axes.set_xscale("log")
        axes.set_yscale("log")
        drawn = {name: [line(size) for size in steps] for name, line in lines.items()}
        for index, (name, seconds) in enumerate(drawn.items()):
            axes.plot(
                steps, seconds, color=_color(name, points), linewidth=2 if name in points else 1.1,
                linestyle="solid" if name in points else DASHES[index % len(DASHES)],
            )  # fmt: skip
        for name, measured in points.items():
            axes.plot(
                *zip(*measured, strict=True), "o", markersize=5.5, markerfacecolor="white",
                markeredgecolor=_color(name, points), markeredgewidth=1.4, linestyle="none",
            )  # fmt: skip
        axes.set_xlim(low, high)
        axes.set_xlabel("message")
        axes.set_ylabel("time")
        _ticks(axes)
        _names(axes, high, {name: seconds[-1] for name, seconds in drawn.items()}, points)
        axes.grid()
    ends = [f"{name} {units.duration(line[0])} and {units.duration(line[-1])}" for name, line in drawn.items()]
    picture.description = f"{units.size(low)} and {units.size(high)} take {'; '.join(ends)}."
    return picture


def _color(name: str, points: Mapping[str, object]) -> str:
    return rank_color(list(points).index(name)) if name in points else FAINT


def _ticks(axes: Axes) -> None:
    for axis, names in ((axes.xaxis, _SIZES), (axes.yaxis, _SECONDS)):
        low, high = sorted(axis.get_view_interval())
        shown = [place for place in sorted(names) if low <= place <= high]
        axis.set_major_locator(FixedLocator(shown))
        axis.set_major_formatter(FixedFormatter([names[place] for place in shown]))
        axis.set_minor_locator(NullLocator())


def _names(axes: Axes, x: float, ends: Mapping[str, float], points: Mapping[str, object]) -> None:
    """Label each line at its right end. Labels are moved apart where the ends are close together."""
    low, high = axes.get_ylim()
    apart = (high / low) ** 0.062
    places: dict[str, float] = {}
    below = 0.0
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        below = places[name] = max(end, below * apart)
    for name, place in places.items():
        axes.annotate(
            name, xy=(x, ends[name]), xytext=(x * (axes.get_xlim()[1] / axes.get_xlim()[0]) ** 0.03, place),
            fontsize=9, va="center", annotation_clip=False,
            color=INK if name not in points else _color(name, points),
            fontweight="bold" if name in points else "normal",
            arrowprops={
                "arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5),
            },
        )  # fmt: skip
