"""Render a report as one self-contained HTML page, with embedded pictures, no scripts, and no external resources.

The page has one column and muted colors. It supports dark mode and printing.
"""

import base64
import re
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from tplab.capstone.report.blocks import Report, to_markdown

_STYLE = """
:root {
  --ink: #222; --soft: #5f666b; --line: #ddd; --paper: #fff; --shade: #f5f6f7; color-scheme: light dark;
}
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #dfe3e6; --soft: #9aa3aa; --line: #34393d; --paper: #171717; --shade: #202325; }
  img { border-radius: 6px; filter: brightness(0.85); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.6 system-ui, sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 3rem 1.25rem 5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 0.3rem; }
h2 { font-size: 1.2rem; margin: 3.2rem 0 0.8rem; padding-top: 0.9rem; border-top: 1px solid var(--line); }
h1, h2, th, strong { font-weight: 600; }
h1 + p, nav, ul, th, summary, .picture + p { color: var(--soft); }
p { margin: 0.7rem 0; max-width: 42rem; }
nav { font-size: 0.9rem; line-height: 1.9; }
nav a {
  color: inherit; margin-right: 0.9rem; white-space: nowrap; text-decoration: none;
  border-bottom: 1px solid var(--line);
}
ul {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(7.6rem, 1fr)); gap: 1.2rem 1rem; margin: 1.2rem 0;
  padding: 0; list-style: none; font-size: 0.82rem; line-height: 1.35;
}
ul strong { display: block; color: var(--ink); font-size: 1.6rem; line-height: 1.15; white-space: nowrap; }
ul, table { font-variant-numeric: tabular-nums; }
table { display: block; overflow-x: auto; margin: 0.9rem 0; border-collapse: collapse; font-size: 0.9rem; }
th { text-align: left; vertical-align: bottom; }
th, td { padding: 0.3rem 1.4rem 0.3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:first-child, [style*="right"] { white-space: nowrap; }
.picture { overflow-x: auto; max-width: none; margin: 1.6rem 0 0; }
.picture img { display: block; width: 100%; min-width: 34rem; }
.picture + p { font-size: 0.92rem; margin: 0.5rem 0 1.6rem; }
code { font: 0.88em ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre, p code, td code { background: var(--shade); padding: 0.1em 0.3em; border-radius: 4px; }
pre { padding: 0.8rem 1rem; white-space: pre-wrap; line-height: 1.5; margin: 0.4rem 0 1.4rem; }
summary { cursor: pointer; font-size: 0.92rem; }
@media print {
  .picture img { min-width: 0; }
  main { max-width: none; padding: 0; }
  nav { display: none; }
  .picture, table, pre, ul { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""


def to_html(report: Report, folder: Path) -> str:
    """Render the report as HTML. Embed its pictures, which are in `folder`, and link to each section at the top."""

    def embedded(found: re.Match[str]) -> str:
        data = base64.b64encode((folder / found[1]).read_bytes()).decode()
        return f'<p class="picture"><img src="data:image/png;base64,{data}"'

    body = MarkdownIt("commonmark", {"html": True, "xhtmlOut": False}).enable("table").render(to_markdown(report))
    body = re.sub('<p><img src="(.*?)"', embedded, body)
    links = ""
    for title, _ in report.sections:
        anchor = title.lower().replace(" ", "-")
        body = body.replace(f"<h2>{title}</h2>", f'<h2 id="{anchor}">{title}</h2>')
        links += f'<a href="#{anchor}">{title}</a> '
    above, h2, below = body.partition("<h2")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{above}<nav>{links}</nav>\n{h2}{below}</main>\n</body>\n</html>\n"
    )
