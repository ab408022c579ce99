"""Draws pictures/first_minutes.svg for the README: the first fifteen minutes of the course, cell by cell.

    make picture

The code comes from the finished notebook solutions/00_start.ipynb, and so does everything that its cells printed.
"""

import ast
import json
from collections.abc import Iterator
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


def draw() -> str:
    body, y = [], MARGIN
    for heading, code, printed, color in panels():
        output = [part for line in printed for part in wrap(line, COLUMNS, subsequent_indent=" " * 8)]
        height, bar = LINE * len(code) + 16, LINE * len(output)
        body.append(text(MARGIN, y + 12, heading, size=SMALL, color=INK, bold=True))
        body.append(box(MARGIN, y + 22, WIDTH - 2 * MARGIN, height, CODE, stroke=0, radius=4))
        body += _lines(code, y + 40, INK)
        body.append(box(MARGIN, y + height + 28, 3, bar, color, stroke=0, radius=0))
        body += _lines(output, y + height + 41, color if color != INK else FAINT)
        y += height + bar + LINE * 4 - 16
    return document(WIDTH, y, body, "The first fifteen minutes", DESCRIPTION)


def panels() -> Iterator[tuple[str, list[str], list[str], str]]:
    """Yield headings, code, what it printed, and the color of that: green for a pass and red for a failure."""
    cells = {cell["id"]: cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]}
    first, last = (_cell(start, cells) for start in ("def add_up", "def lazy_product"))
    printed = [line for line in _printed(first) if not line.startswith("tplab:")]
    yield "1. Two processes, one sum", _code(first), printed, INK
    heading = "2. Your first tensor parallelism: a matmul that's split over two processes, in three lines of your own"
    code = _without_docstring("".join(cells["exercise-S-1"]["source"]))
    yield heading, code, _printed(cells["check-S-1"]), GREEN
    heading = "3. One process doesn't show up. Elsewhere, your program would just hang. Here, you get a report"
    report = _printed(last)
    report.remove("")
    yield heading, _code(last), report[:-1], RED  # without the rule in its last line


def _cell(start: str, cells: dict) -> dict:
    return next(cell for cell in cells.values() if "".join(cell["source"]).startswith(start))


def _code(cell: dict) -> list[str]:
    return "".join(cell["source"]).replace("\n\n\n", "\n\n").splitlines()


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


def _lines(lines: list[str], y: int, color: str) -> Iterator[str]:
    style = f'font-family="{MONO}" xml:space="preserve"'
    for number, line in enumerate(lines):
        yield text(MARGIN + 12, y + LINE * number, line, size=SMALL, color=color).replace("<text", f"<text {style}")


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")
