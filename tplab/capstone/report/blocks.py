"""The building blocks of a report, and how each is written as Markdown. A string is a paragraph.

In strings, names in `backquotes` are formatted as code, and everything else is text, whatever characters it has. A
table that has a title is collapsed under it.
"""

import re
from typing import NamedTuple

from tplab.viz import Picture
from tplab.viz.table import Table

PICTURES = "report_files"  # the folder of the pictures that the Markdown shows


class Number(NamedTuple):
    """A large number at the top of the report, such as "2.31", "nats per token", "loss on held-out text"."""

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
    """Text that the model generated after a number of steps, including its prompt."""

    step: int
    text: str


class Missing(NamedTuple):
    """Something that this run didn't measure, and how to measure it or why that's impossible.

    A section yields it like a block, but the report lists all of them at its end.
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
            when = "Before training" if step == 0 else f"After step {step:,}"
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            return f"{when}:\n\n{fence}text\n{text}\n{fence}"
        case Table():
            rule = ["---:" if right else "---" for right in block.numeric]
            head, *rows = ([_text(cell) for cell in row] for row in (block.head, *block.rows))
            shown = "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))
            title = _text(block.title)
            return f"<details><summary>{title}</summary>\n\n{shown}\n\n</details>" if title else shown


def _text(text: str) -> str:
    """Put text on a single line and escape everything that has a meaning in Markdown, except `code`."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    marks = r"[\\*<\[\]|]|(?<!\w)_|_(?!\w)"  # underscores inside words need no escape
    return "".join(part if part.startswith("`") else re.sub(marks, r"\\\g<0>", part) for part in parts)
