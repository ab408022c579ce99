"""The elements of a report as HTML and SVG: paragraphs, tables, curves, bars, and the picture of the split.

They take their colors from the page's style, and their width from the page. Text stays text, so it never shrinks with a
picture.
"""

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import NamedTuple

Points = Sequence[tuple[int, float]]  # (step, value)
POINTS = 300  # maximum number of points per curve


class Number(NamedTuple):
    """A value in large type, such as "2.31", and what it is."""

    value: str
    name: str


class Part(NamedTuple):
    """A block of the model in the picture of the split. A block that isn't split is the same on every rank."""

    name: str
    split: bool = False
    who: str = ""
    sends: str = ""


class Bar(NamedTuple):
    """A bar, with its value in words. `parts` are (name, value) pairs, drawn from left to right."""

    name: str
    said: str
    parts: Sequence[tuple[str, float]]


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def numbers(found: Sequence[Number]) -> str:
    cells = (f"<li><strong>{escape(one.value)}</strong><br>{escape(one.name)}</li>" for one in found)
    return f'<ul class="numbers">{"".join(cells)}</ul>'


def text_block(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def table(rows: Sequence[Mapping[str, str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.values()) + "</tr>" for row in rows)
    return f'<div class="scrolls"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(title: str, *inner: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{''.join(inner)}</details>"


def thinned(lines: Mapping[str, Points]) -> dict[str, Points]:
    """Average each group of n adjacent points of a line, so that the longest line has at most `POINTS`."""
    every = -(-max(map(len, lines.values())) // POINTS)
    groups = {name: [points[at : at + every] for at in range(0, len(points), every)] for name, points in lines.items()}
    return {name: [(one[-1][0], fmean(value for _, value in one)) for one in line] for name, line in groups.items()}


def curves(lines: Mapping[str, Points], dots: Mapping[str, Points], says: str) -> str:
    """Draw up to two lines over the steps, the second one dashed and in front, and dots."""
    lines = thinned(lines)
    everything = [point for points in (*lines.values(), *dots.values()) for point in points]
    steps, values = [step for step, _ in everything], [value for _, value in everything]
    first, last, low, high = min(steps), max(steps), min(values), max(values)

    def at(point: tuple[int, float]) -> str:
        x, y = (point[0] - first) / max(1, last - first), (high - point[1]) / (high - low or 1)
        return f"{4 + 992 * x:.1f} {4 + 292 * y:.1f}"

    drawn = "".join(f'<path class="grid" d="M0 {4 + 146 * row} H1000"/>' for row in range(3))
    legend = ""
    for kind, (name, points) in zip(("one", "two"), lines.items(), strict=False):
        drawn += f'<path class="{kind}" d="M{" L".join(map(at, points))}"/>'
        legend += f'<li class="{kind}">{escape(name)}</li>'
    for name, points in dots.items():
        drawn += "".join(f'<path class="dot" d="M{at(point)} h0"/>' for point in points)
        legend += f'<li class="dot">{escape(name)}</li>'
    labels = "".join(f"<span>{value:,.{0 if high >= 100 else 2}f}</span>" for value in (high, (low + high) / 2, low))
    return (
        f'<figure class="curve"><div class="values" aria-hidden="true">{labels}</div>'
        f'<svg viewBox="0 0 1000 300" preserveAspectRatio="none" role="img" aria-label="{escape(says)}">{drawn}</svg>'
        f'<div class="steps" aria-hidden="true"><span>step {first:,}</span><span>step {last:,}</span></div></figure>'
        f'<ul class="legend">{legend}</ul>'
    )


def bars(found: Sequence[Bar], colors: Sequence[str]) -> str:
    """Draw bars on a common scale, and a legend if they have named parts. `colors` lists the names of all parts."""
    most = max(sum(value for _, value in bar.parts) for bar in found) or 1
    rows, used = "", set[str]()
    for bar in found:
        pieces = ""
        for name, value in bar.parts:
            used |= {name} if name and value else set()
            color = f"c{colors.index(name) + 1}" if name else "whole"
            pieces += f'<i class="{color}" style="width: {100 * value / most:.2f}%"></i>'
        rows += f'<span>{escape(bar.name)}</span><div class="bar">{pieces}</div><span>{escape(bar.said)}</span>'
    legend = "".join(f'<li class="c{n}">{escape(name)}</li>' for n, name in enumerate(colors, 1) if name in used)
    return f'<div class="bars">{rows}</div>' + (f'<ul class="legend">{legend}</ul>' if legend else "")


def split(before: Sequence[Part], layer: Sequence[Part], times: int, after: Sequence[Part], ranks: int) -> str:
    """Draw a model from the top down, with a stripe per rank in every block that is split."""

    def row(part: Part) -> str:
        stripes = "".join(f'<i class="r{rank % 8}"></i>' for rank in range(ranks)) if part.split else ""
        block = f'<div class="block{" split" * part.split}">{stripes}<b>{escape(part.name)}</b></div>'
        return f'<div class="row">{block}<span>{escape(part.who)}</span><span>{escape(part.sends)}</span></div>'

    repeated = f'<div class="layer"><p>{times} × this layer</p>{"".join(map(row, layer))}</div>'
    return f'<div class="model">{"".join(map(row, before))}{repeated}{"".join(map(row, after))}</div>'
