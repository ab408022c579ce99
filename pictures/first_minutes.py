"""Draws pictures/first_minutes.svg for the README: the first fifteen minutes of the course, cell by cell.

    make picture

The code comes from the finished notebook solutions/00_start.ipynb, and so does everything that its cells printed.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from pictures.drawing import SMALL, box, document, text

ROOT = Path(__file__).parents[1]
TARGET = Path(__file__).with_name("first_minutes.svg")
NOTEBOOK = ROOT / "solutions" / "00_start.ipynb"

WIDTH, MARGIN, LINE, COLUMNS = 880, 16, 18, 100
INK, FAINT, CODE, GREEN, RED = "#1F2933", "#66727F", "#F4F6F8", "#2E7D4F", "#B4443C"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
DESCRIPTION = (
    "Three cells of the first notebook with what they printed: two processes add up a number, a matmul is split over "
    "them in three lines and checked, and a process that never joins gives a report that names the waiting line."
)


@dataclass
class Panel:
    """A heading, code, and the output below it. `color` marks the output, green for a pass and red for a failure."""

    heading: str
    code: list[str]
    output: list[str]
    color: str = INK

    def __post_init__(self) -> None:
        self.output = [part for line in self.output for part in wrap(line, COLUMNS, subsequent_indent=" " * 8)]

    @property
    def height(self) -> int:
        return LINE * (len(self.code) + len(self.output) + 4)


def draw() -> str:
    body, y = [], MARGIN
    for panel in panels():
        body += _panel(panel, y)
        y += panel.height
    return document(WIDTH, y, body, "The first fifteen minutes", DESCRIPTION)


def panels() -> Iterator[Panel]:
    cells = {cell["id"]: cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]}
    yield Panel(
        "1. Two processes, one sum",
        _with("def add_up", cells).splitlines(),
        [line for line in _printed(_cell("def add_up", cells)) if not line.startswith("tplab:")],
    )
    yield Panel(
        "2. Your first tensor parallelism: a matmul that's split over two processes, in three lines of your own",
        _without_docstring("".join(cells["exercise-S-1"]["source"])),
        _printed(cells["check-S-1"]),
        GREEN,
    )
    report = _printed(_cell("def lazy_product", cells))
    yield Panel(
        "3. One process doesn't show up. Elsewhere, your program would just hang. Here, you get a report",
        _with("def lazy_product", cells).splitlines(),
        report[: report.index("")] + report[report.index("") + 1 : -1],  # without the rule in its last line
        RED,
    )


def _cell(start: str, cells: dict) -> dict:
    return next(cell for cell in cells.values() if "".join(cell["source"]).startswith(start))


def _with(start: str, cells: dict) -> str:
    return "".join(_cell(start, cells)["source"]).replace("\n\n\n", "\n\n")


def _without_docstring(source: str) -> list[str]:
    function = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    lines = source.splitlines()
    return lines[: function.body[0].lineno - 1] + lines[function.body[0].end_lineno :]


def _printed(cell: dict) -> list[str]:
    """Return what a cell printed and what its last line showed."""
    lines = []
    for output in cell["outputs"]:
        said = "".join(output.get("text") or output["data"]["text/plain"])
        lines += said.rstrip().splitlines()
    return lines


def _panel(panel: Panel, y: int) -> Iterator[str]:
    height, bar = LINE * len(panel.code) + 16, LINE * len(panel.output)
    yield text(MARGIN, y + 12, panel.heading, size=SMALL, color=INK, bold=True)
    yield box(MARGIN, y + 22, WIDTH - 2 * MARGIN, height, CODE, stroke=0, radius=4)
    yield from _lines(panel.code, y + 40, INK)
    yield box(MARGIN, y + height + 28, 3, bar, panel.color, stroke=0, radius=0)
    yield from _lines(panel.output, y + height + 41, panel.color if panel.color != INK else FAINT)


def _lines(lines: list[str], y: int, color: str) -> Iterator[str]:
    style = f'font-family="{MONO}" xml:space="preserve"'
    for number, line in enumerate(lines):
        yield text(MARGIN + 12, y + LINE * number, line, size=SMALL, color=color).replace("<text", f"<text {style}")


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")
