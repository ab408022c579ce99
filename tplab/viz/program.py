"""A program as rows of boxes: the order of its steps, the chapters they come from, and where ranks communicate."""

from collections.abc import Collection, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrow, Rectangle

from tplab.viz.colors import FAINT, INK, WIDTH, Picture, canvas, style

_LEFT, _RIGHT, _ROW, _HEIGHT, _GAP = 1.05, 0.12, 0.72, 0.5, 0.3
_TALKS, _HATCH = "#D6DDE2", "////"

Row = Sequence[tuple[str, str]]


def program(rows: Mapping[str, Row], *, talking: Collection[str] = (), title: str | None = None) -> Picture:
    """Draw one row of boxes per entry, from left to right: {"forward": [("embedding", "7"), ("loss", "8")]}.

    rows:    for each row, its boxes as (name, text below the name)
    talking: names of the boxes in which ranks communicate, which are hatched
    Raises ValueError if there are no rows, if a row is empty, or if `talking` has a name that no box has.
    """
    if not rows or not all(rows.values()):
        raise ValueError("program draws rows with one box at least")
    names = {name for row in rows.values() for name, _ in row}
    if unknown := sorted(set(talking) - names):
        raise ValueError(f"no box is called {unknown}: there are {sorted(names)}")
    most = max(map(len, rows.values()))
    width = (WIDTH - _LEFT - _RIGHT - (most - 1) * _GAP) / most
    top = 0.5 if title else 0.12
    each = "; ".join(f"{row}: {', '.join(name for name, _ in boxes)}" for row, boxes in rows.items())
    with style():
        picture, axes = canvas(WIDTH, top + _ROW * len(rows) + (0.26 if talking else 0), title or each, title)
        for number, (row, boxes) in enumerate(rows.items()):
            y = top + _ROW * number
            axes.text(0.12, y + _HEIGHT / 2, row, fontsize=9.5, fontweight="bold", va="center")
            for place, (name, below) in enumerate(boxes):
                x = _LEFT + place * (width + _GAP)
                _box(axes, x, y, width, name, below, name in talking)
                if place:
                    _arrow(axes, x - _GAP, y + _HEIGHT / 2)
        if talking:
            _legend(axes, top + _ROW * len(rows))
    talk = f". Ranks communicate in {', '.join(sorted(talking))}" if talking else ""
    picture.description = f"Steps from left to right: {each}{talk}."
    return picture


def _box(axes: Axes, x: float, y: float, width: float, name: str, below: str, talks: bool) -> None:
    _frame(axes, x, y, width, _HEIGHT, talks)
    ground = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"} if talks else None
    center = x + width / 2
    axes.text(center, y + 0.16, name, fontsize=9.5, fontweight="bold", ha="center", va="center", bbox=ground)
    axes.text(center, y + 0.37, below, fontsize=8.5, ha="center", va="center", bbox=ground)


def _frame(axes: Axes, x: float, y: float, width: float, height: float, talks: bool) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=_TALKS if talks else "white", edgecolor="none"))
    if talks:
        axes.add_patch(
            Rectangle((x, y), width, height, facecolor="none", edgecolor="#8A979F", hatch=_HATCH, linewidth=0)
        )
    axes.add_patch(Rectangle((x, y), width, height, facecolor="none", edgecolor=INK, linewidth=1.1))


def _arrow(axes: Axes, x: float, y: float) -> None:
    axes.add_patch(
        FancyArrow(
            x + 0.05, y, _GAP - 0.1, 0, width=0.012, head_width=0.1, head_length=0.09, length_includes_head=True,
            facecolor=FAINT, edgecolor="none",
        )
    )  # fmt: skip


def _legend(axes: Axes, y: float) -> None:
    _frame(axes, _LEFT, y + 0.02, 0.3, 0.16, True)
    axes.text(_LEFT + 0.38, y + 0.1, "talks to other ranks", fontsize=8.5, va="center")
