"""The look of all pictures: one color, hatch and label per rank, a common style, and a common figure class."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

# Okabe and Ito's palette, ordered so that neighbors differ in lightness, too
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#666666")
_HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "||||", "oooo")
DASHES: Any = ("solid", (0, (5, 2)), (0, (1.2, 1.4)), (0, (6, 2, 1.2, 2)), (0, (2.5, 1.2)), (0, (8, 3)))
CURVES = ("#9A9A9A", "#6A3D9A", "#8C510A", "#222222", "#B79AD6")  # what others are compared with, then the others
INK = "#222222"
FAINT = "#6B6B6B"
GOLD = "#D4A017"  # finished, or what the picture follows
RED = "#C0392B"  # the backward pass, and waiting
NOBODY = "#EDEDED"  # fill color for things that belong to no particular rank
WIDTH = 7.6  # inches that fit a notebook's output without scaling

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


@contextmanager
def style() -> Iterator[None]:
    """Context manager that applies the style of all pictures."""
    with mpl.rc_context(_STYLE):
        yield


def rank_color(rank: int | None) -> str:
    """Return the color of a rank, which is the same in every picture."""
    return FAINT if rank is None else _COLORS[rank % len(_COLORS)]


def rank_hatch(rank: int | None) -> str:
    return "" if rank is None else _HATCHES[rank % len(_HATCHES)]


def tint(color: str, strength: float = 0.32) -> tuple[float, float, float]:
    """Mix the color with white, so that dark text stays readable on it."""
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(color))
    return red, green, blue


def rank_fill(rank: int | None) -> Any:
    return NOBODY if rank is None else tint(rank_color(rank))


class Picture(Figure):
    """A matplotlib Figure for notebooks. It's displayed only once, it looks sharp, and you don't have to close it."""

    _DPI = 144
    caption = "picture"
    description = ""  # what the picture shows, computed from what was drawn, for readers who don't see it

    @property
    def alt(self) -> str:
        """The alt text: the caption and the description."""
        return f"{self.caption}. {self.description}" if self.description else self.caption

    def __repr__(self) -> str:
        return f"<{self.caption}>"

    __str__ = __repr__

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        width, height = (round(96 * inches) for inches in self.get_size_inches())
        return self.png(), {"width": width, "height": height, "alt": self.alt}

    def png(self, dpi: int = _DPI) -> bytes:
        buffer = io.BytesIO()
        with style():
            self.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
        return buffer.getvalue()


def canvas(width: float, height: float, caption: str, title: str | None = None) -> tuple[Picture, Axes]:
    """Return a picture and axes for drawing freely, with coordinates in inches from the left and from the top.

    title: what stands in the upper left corner; it takes about 0.34 inches
    """
    picture = Picture(figsize=(width, height))
    picture.caption = caption
    axes = picture.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    if title:
        axes.text(0.12, 0.2, title, fontsize=10.5, fontweight="bold", va="center")
    return picture, axes


def rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of a chart from the top down. Row i is at y = i."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.tick_params(left=False)


def on_white(alpha: float) -> dict[str, Any]:
    """Return the `bbox` of a text on a translucent white background, so that it's readable above cells and hatches."""
    return {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": alpha}


def chart(width: float, height: float, title: str | None, caption: str = "") -> tuple[Picture, Axes]:
    """Return a picture with x and y axes. Its caption is the title if there's no other."""
    picture = Picture(figsize=(width, height), layout="constrained")
    picture.caption = caption or title or ""
    axes = picture.add_subplot()
    if title:
        axes.set_title(title)
    return picture, axes
