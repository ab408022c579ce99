"""The building blocks of a report, before it is written as HTML or Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tplab.viz import Picture
from tplab.viz.table import Table
from tplab.viz.table import table as as_table


@dataclass(frozen=True)
class Words:
    """A paragraph. Names in `backquotes` are formatted as code."""

    text: str


@dataclass(frozen=True)
class Number:
    """A large number at the top of the report, such as "2.31", "nats per token", "loss on held-out text"."""

    value: str
    unit: str
    name: str


@dataclass(frozen=True)
class Numbers:
    numbers: list[Number]


@dataclass(frozen=True)
class Figure:
    """A picture and a sentence about what it shows. `name` is the name of its file next to the Markdown."""

    name: str
    picture: Picture
    says: str


@dataclass(frozen=True)
class Grid:
    """A table. If `folded` isn't empty, the table is collapsed under this line."""

    table: Table
    folded: str = ""


@dataclass(frozen=True)
class Sample:
    """Text that the model wrote from a prompt after a number of steps."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Missing:
    """Something that wasn't measured in this run, and how to measure it."""

    what: str
    how: str


Block = Words | Numbers | Figure | Grid | Sample | Missing


@dataclass(frozen=True)
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)

    @property
    def missing(self) -> list[Missing]:
        return [block for block in self.blocks if isinstance(block, Missing)]


@dataclass(frozen=True)
class Report:
    title: str
    about: str
    sections: list[Section]


def grid(rows: Sequence[Mapping[str, object]], *, folded: str = "") -> Grid:
    """Create a table from rows that have the same keys."""
    return Grid(as_table(rows), folded)
