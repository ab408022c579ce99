"""What a report is made of, before it is written as HTML or as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tplab.viz import Picture
from tplab.viz.table import Table
from tplab.viz.table import table as as_table


@dataclass(frozen=True)
class Words:
    """A paragraph. `names` in backquotes are set as code."""

    text: str


@dataclass(frozen=True)
class Number:
    """One of the large numbers at the top: "2.31", "nats per token", "loss on held-out text"."""

    value: str
    unit: str
    name: str


@dataclass(frozen=True)
class Numbers:
    numbers: list[Number]


@dataclass(frozen=True)
class Figure:
    """A picture and the one sentence that says what to see in it. `name`: of its file beside the Markdown."""

    name: str
    picture: Picture
    says: str


@dataclass(frozen=True)
class Grid:
    """A table; `folded`: shown when it is asked for, below this line."""

    table: Table
    folded: str = ""


@dataclass(frozen=True)
class Sample:
    """Text that the model wrote after a prompt, after so many steps."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Missing:
    """What was not measured in this run, and what measures it."""

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
    """The whole page."""

    title: str
    about: str
    sections: list[Section]


def grid(rows: Sequence[Mapping[str, object]], *, folded: str = "") -> Grid:
    """A table of rows with the same names."""
    return Grid(as_table(rows), folded)
