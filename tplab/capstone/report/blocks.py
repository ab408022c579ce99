"""The building blocks of a report, and how each is written as Markdown. A string is a paragraph.

In strings, names in `backquotes` are formatted as code, and everything else is text, whatever characters it has.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tplab.viz import Picture
from tplab.viz.table import Table
from tplab.viz.table import table as as_table


class Number(NamedTuple):
    """A large number at the top of the report, such as "2.31", "nats per token", "loss on held-out text"."""

    value: str
    unit: str
    name: str


class Figure(NamedTuple):
    """A picture and a sentence about what it shows. `name` is the name of its file next to the Markdown."""

    name: str
    picture: Picture
    says: str


class Grid(NamedTuple):
    """A table. If `folded` isn't empty, the table is collapsed under this line."""

    table: Table
    folded: str = ""


class Sample(NamedTuple):
    """Text that the model generated from a prompt after a number of steps."""

    step: int
    prompt: str
    text: str


class Missing(NamedTuple):
    """Something that this run didn't measure, and how to measure it or why that's impossible.

    A section yields it like a block, but the report lists all of them at its end.
    """

    what: str
    how: str


Block = str | list[Number] | Figure | Grid | Sample


class Section(NamedTuple):
    title: str
    blocks: list[Block]


class Report(NamedTuple):
    title: str
    about: str
    sections: list[Section]
    missing: list[Missing]


def grid(rows: Sequence[Mapping[str, object]], *, folded: str = "") -> Grid:
    """Create a table from rows that have the same keys."""
    return Grid(as_table(rows), folded)


def to_markdown(report: Report, address: Callable[[Figure], str]) -> str:
    """Return the report as Markdown, with `address(figure)` as the link to each picture."""
    parts = [f"# {_text(report.title)}", _text(report.about)]
    for section in report.sections:
        parts.append(f"## {_text(section.title)}")
        parts += [_block(block, address) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _block(block: Block, address: Callable[[Figure], str]) -> str:
    match block:
        case str(text):
            return _text(text)
        case list(numbers):
            return "\n".join(f"- **{number.value}** {number.unit}  \n  {_text(number.name)}" for number in numbers)
        case Figure(_, picture, says):
            return f"![{_text(picture.caption)}]({address(block)})\n\n{_text(says)}"
        case Grid(table, folded):
            rule = ["---:" if right else "---" for right in table.numeric]
            rows = [rule if row is rule else [_text(cell) for cell in row] for row in (table.head, rule, *table.rows)]
            shown = "\n".join("| " + " | ".join(row) + " |" for row in rows)
            return f"<details><summary>{_text(folded)}</summary>\n\n{shown}\n\n</details>" if folded else shown
        case Sample(step, prompt, text):
            when = "Before training" if step == 0 else f"After step {step:,}"
            written = prompt + text.removeprefix(prompt)
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", written)), default=0))
            return f"{when}:\n\n{fence}text\n{written}\n{fence}"


def _text(text: str) -> str:
    """Put text on a single line and escape everything that has a meaning in Markdown, except `code`."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    marks = r"[\\*<\[\]|]|(?<!\w)_|_(?!\w)"  # underscores inside words need no escape
    return "".join(part if part.startswith("`") else re.sub(marks, r"\\\g<0>", part) for part in parts)
