"""Read the tables of known mistakes.

An exercise's table is a section of `exercises/chNN/mistakes.md`:

    ## 3.2

    ### You returned the mean across ranks. Does the chain rule add or average the gradients from all uses of x?
    - the mean: `return dx` → `return dx / dist.get_world_size()`
    - when dx: 1/p

    ### [changed]
    - writes into the upstream gradient: `dist.all_reduce(dx)` → `dist.all_reduce(grad_output)`

Every heading is a question. The mistakes that trigger it are listed below it, each as an edit to the reference answer.
If an answer fails, these known mistakes run alongside it on the same inputs, and one that behaves like the answer
chooses the question. A line that begins with "when" is a symptom. When no listed mistake fits, the symptoms choose the
question. `checks/mistakes.md` contains the questions shared by all exercises. A chapter refers to them by the word in
brackets.

A change replaces a text that occurs exactly once in the reference answer. If a text occurs in several functions,
`def Class.method: text` stands for the one in that method. `def Class.method` stands for its whole body, and `*` for
the full answer. A space after a colon also stands for a line break, so `if x: return y` may be two lines of the
reference answer. The new text may be the word *nothing*, or a code block below the line.

A mistake marked "(fails)" never runs beside an answer, because it ends in an error or a deadlock in some cases, or
because the symptoms are enough. It's only there to test the check. The same holds for the lines below the heading
"(passes)". They're unusual answers that are right, and that a check has once refused or that the text allows.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

from tplab.course.notebooks.numbering import chapter_of, package
from tplab.course.notebooks.source import DEFINITIONS

COURSE = Path(__file__).parents[1]
SHARED = COURSE / "checks" / "mistakes.md"
FAILS, PASSES = " (fails)", "(passes)"
_CODE = re.compile(r"^ *```python\n(?P<block>.*?)^ *```$|`(?P<line>[^`\n]+)`|\bnothing\b", re.M | re.S)


class TableError(ValueError):
    """Raised for a table that contradicts itself or its reference answer. The message names the file and the line."""


@dataclass(frozen=True)
class Mistake:
    """A wrong answer: the reference answer with every (old, new) replaced. `fails`: it never runs beside an answer.

    In `Table.right`, the answer is right.
    """

    name: str
    changes: tuple[tuple[str, str], ...]
    fails: bool
    where: str  # file and line

    def of(self, reference: str) -> str:
        """Return the reference answer with this mistake. Raises TableError if a text to replace isn't there once."""
        spans = []
        for old, new in self.changes:
            try:
                spans.append((*_span(reference, old), new))
            except ValueError as error:
                raise TableError(f"{self.where}: {error}") from None
        for start, end, new in sorted(spans, reverse=True):  # from the end, so that earlier positions stay valid
            line = reference[:start].rpartition("\n")[2]
            margin = line[: len(line) - len(line.lstrip())]
            reference = reference[:start] + new.replace("\n", "\n" + margin) + reference[end:]
        return reference


@dataclass(frozen=True)
class Row:
    """A question, and the mistakes and symptoms that trigger it."""

    ask: str
    where: str  # file and line
    key: str = ""
    mistakes: tuple[Mistake, ...] = ()
    symptoms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """The rows of one section, in the order in which their questions are considered, and the unusual right answers."""

    title: str
    rows: tuple[Row, ...] = field(repr=False)
    right: tuple[Mistake, ...] = field(default=(), repr=False)

    @property
    def mistakes(self) -> list[Mistake]:
        return [mistake for row in self.rows for mistake in row.mistakes]


def path_of(chapter: int) -> Path:
    """Return the path of a chapter's tables, which exists once the chapter's checks use them."""
    return COURSE / "exercises" / package(chapter) / "mistakes.md"


def table(section: str) -> Table:
    """Return the table of an exercise, or of one of its answers, such as "3.3 scatter"."""
    return tables(path_of(chapter_of(section.split()[0])))[section]


def shared(key: str) -> str:
    """Return the question that any exercise may ask, by the word in brackets."""
    return _shared_by_key()[key].ask


@cache
def _shared_by_key() -> dict[str, Row]:
    return {row.key: row for each in tables(SHARED).values() for row in each.rows if row.key}


@cache
def tables(path: Path) -> dict[str, Table]:
    """Read a file of tables. Raises TableError if a line can't be understood."""
    found = {}
    for title, first, lines in _split(path.read_text(encoding="utf-8").splitlines(), "## "):
        rows = [_row(path, heading, first + number, below) for heading, number, below in _split(lines, "### ")]
        right = [mistake for row in rows if row.ask == PASSES for mistake in row.mistakes]
        found[title] = Table(title, tuple(row for row in rows if row.ask != PASSES), tuple(right))
    return found


def _split(lines: Sequence[str], mark: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield (heading, its line number, the lines below it) for each heading that starts with `mark`."""
    starts = [number for number, line in enumerate(lines) if line.startswith(mark)]
    for start, end in pairwise([*starts, len(lines)]):
        yield lines[start].removeprefix(mark).strip(), start + 1, list(lines[start + 1 : end])


def _row(path: Path, heading: str, number: int, lines: list[str]) -> Row:
    file = f"{path.parent.name}/{path.name}"
    where = f"{file}:{number}"
    key, ask = re.match(r"(?:\[(.+?)\] ?)?(.*)", heading).groups()  # type: ignore[union-attr]
    if key and not ask and path != SHARED:
        if key not in _shared_by_key():
            raise TableError(f"{where}: there is no question [{key}] in {SHARED.parent.name}/{SHARED.name}")
        ask = shared(key)
    items = [(item, "\n".join([item, *more]), number + offset) for item, offset, more in _split(lines, "- ")]
    symptoms = [item.removeprefix("when ") for item, _, _ in items if item.startswith("when ")]
    mistakes = [_mistake(text, f"{file}:{line}") for item, text, line in items if not item.startswith("when ")]
    return Row(ask, where, key or "", tuple(mistakes), tuple(symptoms))


def _mistake(text: str, where: str) -> Mistake:
    name, _, changes = text.partition(": ")
    found = _CODE.finditer(changes)
    codes = [dedent(each["block"]).rstrip("\n") if each["block"] else each["line"] or "" for each in found]
    if not codes or len(codes) % 2 or changes.count("→") * 2 != len(codes):
        raise TableError(f"{where}: write a mistake as - its name: `old text` → `new text`, `old text` → `new text`")
    pairs = tuple(zip(codes[::2], codes[1::2], strict=True))
    return Mistake(name.removesuffix(FAILS), pairs, name.endswith(FAILS), where)


def _span(source: str, old: str) -> tuple[int, int]:
    """Return where `old` starts and ends in the source. Raises ValueError unless it occurs exactly once.

    old: a text, a function (`def Class.method`), a text in a function (`def Class.method: text`), or `*`
    """
    if old == "*":
        return 0, len(source)
    start, end, text = 0, len(source), old
    if old.startswith("def "):
        name, _, text = old.removeprefix("def ").partition(": ")
        start, end = _body(source, name)
        if not text:
            return start, end
    pattern = re.escape(text).replace(re.escape(": "), r":\s+")
    found = list(re.compile(pattern).finditer(source, start, end))
    if len(found) != 1:
        raise ValueError(f"{old!r} occurs {len(found)} times in the reference answer instead of once")
    return found[0].span()


def _body(source: str, name: str) -> tuple[int, int]:
    """Return where the body of a function or method starts and ends, without its docstring."""
    scope: ast.AST = ast.parse(source)
    for wanted in name.split("."):
        fitting = [node for node in ast.walk(scope) if isinstance(node, DEFINITIONS) and node.name == wanted]
        if len(fitting) != 1:
            raise ValueError(f"the reference answer has {len(fitting)} definitions of {wanted} instead of one")
        [scope] = fitting
    assert isinstance(scope, ast.FunctionDef)
    body = scope.body[ast.get_docstring(scope) is not None :]
    lines = source.splitlines(keepends=True)
    start = sum(map(len, lines[: body[0].lineno - 1])) + body[0].col_offset
    return start, len("".join(lines[: body[-1].end_lineno]).rstrip("\n"))
