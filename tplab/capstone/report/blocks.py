"""The building blocks of a report, before it is written as HTML or Markdown. A string is a paragraph.

In strings, names in `backquotes` are formatted as code, and everything else is text, whatever characters it has.
"""

from collections.abc import Mapping, Sequence
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
    """Text that the model wrote from a prompt after a number of steps."""

    step: int
    prompt: str
    text: str


class Missing(NamedTuple):
    """Something that wasn't measured in this run, and how to measure it."""

    what: str
    how: str


Block = str | list[Number] | Figure | Grid | Sample | Missing


class Section(NamedTuple):
    title: str
    blocks: list[Block]


class Report(NamedTuple):
    title: str
    about: str
    sections: list[Section]

    @property
    def missing(self) -> list[Missing]:
        """What the sections lack, each of which is named once."""
        found = (block for section in self.sections for block in section.blocks if isinstance(block, Missing))
        return list(dict.fromkeys(found))


def grid(rows: Sequence[Mapping[str, object]], *, folded: str = "") -> Grid:
    """Create a table from rows that have the same keys."""
    return Grid(as_table(rows), folded)
