"""Render a report as one self-contained HTML page, with embedded pictures, no scripts, and no external resources."""

import base64
import re
from collections.abc import Sequence
from html import escape

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tplab.capstone.report.blocks import Figure, Report, to_markdown
from tplab.capstone.report.style import STYLE

_DPI = 160


def to_html(report: Report) -> str:
    """Render the report's Markdown as an HTML page, with links to the sections at the top."""
    sizes: dict[str, tuple[int, int]] = {}

    def embed(figure: Figure) -> str:
        address = "data:image/png;base64," + base64.b64encode(figure.picture.png(_DPI)).decode()
        width, height = figure.picture.get_size_inches()
        sizes[address] = round(96 * width), round(96 * height)
        return address

    markdown = MarkdownIt("commonmark", {"html": True, "xhtmlOut": False}).enable("table")
    tokens = markdown.parse(to_markdown(report, embed))
    _mark(tokens, sizes)
    start = next((place for place, token in enumerate(tokens) if token.tag == "h2"), len(tokens))
    above, below = (markdown.renderer.render(part, markdown.options, {}) for part in (tokens[:start], tokens[start:]))
    links = " ".join(f'<a href="#{_anchor(section.title)}">{escape(section.title)}</a>' for section in report.sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{above}<nav>{links}</nav>\n{below}</main>\n</body>\n</html>\n"
    )


def _mark(tokens: Sequence[Token], sizes: dict[str, tuple[int, int]]) -> None:
    """Add anchors to headings, sizes to pictures, and the class `picture` to the paragraphs around pictures."""
    for opening, inside, *_ in zip(tokens, tokens[1:], strict=False):
        if opening.type == "heading_open" and opening.tag == "h2":
            opening.attrSet("id", _anchor("".join(child.content for child in inside.children or ())))
        for child in inside.children or ():
            if child.type == "image":
                width, height = sizes[str(child.attrs["src"])]
                child.attrs |= {"width": width, "height": height}
                opening.attrSet("class", "picture")


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
