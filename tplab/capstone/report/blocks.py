"""The building blocks of a report, and the functions that write them as Markdown. A string is a paragraph.

In a string, anything in `backquotes` is formatted as code, and all other characters are escaped so that they appear
unchanged. A table with a title is collapsed under that title.
"""

import re
from typing import NamedTuple

from tplab.viz import Picture
from tplab.viz.table import Table

PICTURES = "report_files"  # the folder with the report's pictures


class Number(NamedTuple):
    """A value in large type at the top of the report, such as "2.31", with its unit and the name of the quantity."""

    value: str
    unit: str
    name: str


class Figure(NamedTuple):
    """A picture and a sentence about what it shows."""

    name: str
    picture: Picture
    says: str

    @property
    def address(self) -> str:
        return f"{PICTURES}/{self.name}.png"


class Sample(NamedTuple):
    """Text that the model generated after `step` steps, including the prompt."""

    step: int
    text: str


class Missing(NamedTuple):
    """Something that wasn't measured for this run, and how to measure it.

    A section yields it in place of a block. The report's last section lists everything that's missing.
    """

    what: str
    how: str


Block = str | list[Number] | Figure | Table | Sample


class Section(NamedTuple):
    title: str
    blocks: list[Block]


class Report(NamedTuple):
    title: str
    about: str
    sections: list[Section]
    missing: list[Missing]


def to_markdown(report: Report) -> str:
    parts = [f"# {_text(report.title)}", _text(report.about)]
    for title, blocks in report.sections:
        parts += [f"## {_text(title)}", *map(_block, blocks)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    match block:
        case str(text):
            return _text(text)
        case list(numbers):
            return "\n".join(f"- **{number.value}** {number.unit}  \n  {_text(number.name)}" for number in numbers)
        case Figure(_, picture, says):
            return f"![{_text(picture.caption)}]({block.address})\n\n{_text(says)}"
        case Sample(step, text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            return f"After step {step:,}:\n\n{fence}text\n{text}\n{fence}"
        case Table():
            rule = ["---:" if right else "---" for right in block.numeric]
            head, *rows = ([_text(cell) for cell in row] for row in (block.head, *block.rows))
            shown = "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))
            title = _text(block.title)
            return f"<details><summary>{title}</summary>\n\n{shown}\n\n</details>" if title else shown


def _text(text: str) -> str:
    """Put text on a single line and escape everything that has a special meaning in Markdown, except `code`."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    marks = r"[\\*<\[\]|]|(?<!\w)_|_(?!\w)"  # underscores inside words don't need to be escaped
    return "".join(part if part.startswith("`") else re.sub(marks, r"\\\g<0>", part) for part in parts)
