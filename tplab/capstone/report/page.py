"""A report as one HTML page that needs nothing else: no script, no address outside, its pictures inside it."""

import base64
import re
from html import escape

from tplab.capstone.report.blocks import Block, Figure, Grid, Missing, Number, Numbers, Report, Sample, Section, Words
from tplab.capstone.report.style import STYLE
from tplab.viz.table import Table

_DPI = 160
_SHORT = 16  # letters of a table's cell that stay on one line


def to_html(report: Report) -> str:
    """The page, as text."""
    links = " ".join(f'<a href="#{_anchor(section.title)}">{escape(section.title)}</a>' for section in report.sections)
    sections = "\n".join(map(_section, report.sections))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(report.title)}</h1>\n<p class="about">{_inline(report.about)}</p>\n<nav>{links}</nav>\n'
        f"{sections}\n</main>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    blocks = "\n".join(map(_block, section.blocks))
    return f'<section>\n<h2 id="{_anchor(section.title)}">{escape(section.title)}</h2>\n{blocks}\n</section>'


def _block(block: Block) -> str:
    match block:
        case Words(text):
            return f"<p>{_inline(text)}</p>"
        case Numbers(numbers):
            return f'<div class="numbers">{"".join(map(_number, numbers))}</div>'
        case Figure():
            return _figure(block)
        case Grid(table, folded):
            shown = f'<div class="wide">{_table(table)}</div>'
            return f"<details><summary>{escape(folded)}</summary>{shown}</details>" if folded else shown
        case Sample(step, prompt, text):
            when = "before training" if step == 0 else f"after step {step:,}"
            return f'<p class="step">{when}</p><pre><b>{escape(prompt)}</b>{escape(text.removeprefix(prompt))}</pre>'
        case Missing(what, how):
            return f'<div class="missing">Not measured: {_inline(what)}.<br>To do so: {_inline(how)}</div>'


def _number(number: Number) -> str:
    name = f"<small>{escape(number.name)}</small>"
    return f"<div><b>{escape(number.value)}</b><span>{escape(number.unit)}</span>{name}</div>"


def _figure(figure: Figure) -> str:
    picture = figure.picture
    width, height = (round(96 * inches) for inches in picture.get_size_inches())
    source = "data:image/png;base64," + base64.b64encode(picture.png(_DPI)).decode()
    image = f'<img src="{source}" width="{width}" height="{height}" alt="{escape(picture.caption, quote=True)}">'
    return f'<figure><div class="wide">{image}</div><figcaption>{_inline(figure.says)}</figcaption></figure>'


def _table(table: Table) -> str:
    def cells(row: list[str], tag: str) -> str:
        sides = [
            ' class="r"' if right else ' class="n"' if len(text) <= _SHORT else ""
            for text, right in zip(row, table.numeric, strict=True)
        ]
        return "".join(f"<{tag}{side}>{escape(text)}</{tag}>" for text, side in zip(row, sides, strict=True))

    body = "".join(f"<tr>{cells(list(row), 'td')}</tr>" for row in table.rows)
    return f"<table><thead><tr>{cells(list(table.head), 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _inline(text: str) -> str:
    """Escaped, with what stands in backquotes as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
