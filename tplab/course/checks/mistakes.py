"""Read the tables of known mistakes, and choose the question that a wrong answer gets.

An exercise's table is a section of `exercises/chNN/mistakes.md`:

    ## 3.2

    ### You returned the mean across ranks. Does the chain rule add or average the gradients from all uses of x?
    - the mean: `return dx` → `return dx / dist.get_world_size()`
    - when dx: 1/p

    ### [changed]
    - writes into the upstream gradient: `dist.all_reduce(dx)` → `dist.all_reduce(grad_output)`

Every heading is a question. Below it are the mistakes that deserve this question, each as changes of the reference
answer. If an answer fails, these known mistakes run beside it on the same inputs, and one that does the same picks the
question. A line that begins with "when" is a symptom. It picks the question for a mistake that nobody has listed.
`mistakes.md` in this folder has the questions that any exercise may ask. A chapter refers to them by the word in
brackets.

A change replaces a text that occurs exactly once in the reference answer. `def Class.method` stands for the body of
that method, and `*` for the full answer. The new text may be the word *nothing*, or a code block below the line. A
mistake marked "(fails)" ends in an error or a deadlock, so it can't run beside an answer. It's only there to test the
check.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

from tplab.course.checks.differences import NOT_RUN, Differences
from tplab.course.notebooks.numbering import chapter_of, package

SHARED = Path(__file__).with_name("mistakes.md")
FIRST, LAST = "first", "last"  # sections of SHARED: questions to consider before an exercise's own, and after them
FAILS = " (fails)"
_CODE = re.compile(
    r"^ *```python\n(?P<block>.*?)^ *```$|`` (?P<long>.+?) ``|`(?P<short>[^`\n]+)`|\bnothing\b", re.M | re.S
)


class TableError(ValueError):
    """Raised for a table that contradicts itself or its reference answer. The message names the file and the line."""


@dataclass(frozen=True)
class Mistake:
    """A wrong answer: the reference answer with every (old, new) replaced. `fails`: it ends in an error or deadlock."""

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
    """A question, the mistakes that deserve it, and the symptoms that call for it."""

    ask: str
    where: str  # file and line
    key: str = ""
    mistakes: tuple[Mistake, ...] = ()
    symptoms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """The rows of one section, in the order in which their questions are considered."""

    title: str
    rows: tuple[Row, ...] = field(repr=False)

    @property
    def mistakes(self) -> list[Mistake]:
        return [mistake for row in self.rows for mistake in row.mistakes]


def table(section: str) -> Table:
    """Return the table of an exercise, or of one of its answers, such as "3.3 scatter"."""
    path = Path(__file__).parents[1] / "exercises" / package(chapter_of(section.split()[0])) / "mistakes.md"
    return tables(path)[section]


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
        found[title] = Table(title, tuple(rows))
    return found


def _split(lines: Sequence[str], mark: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield (heading, its line number, the lines below it) for each heading that starts with `mark`."""
    starts = [number for number, line in enumerate(lines) if line.startswith(mark)]
    for start, end in pairwise([*starts, len(lines)]):
        yield lines[start].removeprefix(mark).strip(), start + 1, list(lines[start + 1 : end])


def _row(path: Path, heading: str, number: int, lines: list[str]) -> Row:
    where = f"{path.parent.name}/{path.name}:{number}"
    key, ask = re.match(r"(?:\[(.+?)\] ?)?(.*)", heading).groups()  # type: ignore[union-attr]
    if key and not ask and path != SHARED:
        if key not in _shared_by_key():
            raise TableError(f"{where}: there is no question [{key}] in {SHARED.name} of the checks")
        ask = shared(key)
    row = Row(ask, where, key or "")
    for item, offset, more in _split(lines, "- "):
        place = f"{path.parent.name}/{path.name}:{number + offset}"
        if item.startswith("when "):
            row = replace(row, symptoms=(*row.symptoms, item.removeprefix("when ")))
        else:
            row = replace(row, mistakes=(*row.mistakes, _mistake("\n".join([item, *more]), place)))
    return row


def _mistake(text: str, where: str) -> Mistake:
    name, _, changes = text.partition(": ")
    codes = [_code(found) for found in _CODE.finditer(changes)]
    if not codes or len(codes) % 2 or changes.count("→") * 2 != len(codes):
        raise TableError(f"{where}: write a mistake as - its name: `old text` → `new text`, `old text` → `new text`")
    pairs = tuple(zip(codes[::2], codes[1::2], strict=True))
    return Mistake(name.removesuffix(FAILS), pairs, name.endswith(FAILS), where)


def _code(found: re.Match[str]) -> str:
    if found["block"] is not None:
        return dedent(found["block"]).rstrip("\n")
    return found["long"] or found["short"] or ""


def _span(source: str, old: str) -> tuple[int, int]:
    """Return where `old` starts and ends in the source. Raises ValueError unless it occurs exactly once."""
    if old == "*":
        return 0, len(source)
    if old.startswith("def "):
        return _body(source, old.removeprefix("def "))
    if source.count(old) != 1:
        raise ValueError(f"{old!r} occurs {source.count(old)} times in the reference answer instead of once")
    return source.index(old), source.index(old) + len(old)


def _body(source: str, name: str) -> tuple[int, int]:
    """Return where the body of a function or method starts and ends, without its docstring."""
    owner, _, function = name.rpartition(".")
    scope: ast.AST = ast.parse(source)
    for kind, wanted in ((ast.ClassDef, owner), (ast.FunctionDef, function)):
        if wanted:
            fitting = [node for node in ast.walk(scope) if isinstance(node, kind) and node.name == wanted]
            if len(fitting) != 1:
                raise ValueError(f"the reference answer has {len(fitting)} definitions of {wanted} instead of one")
            scope = fitting[0]
    assert isinstance(scope, ast.FunctionDef)
    body = scope.body[ast.get_docstring(scope) is not None :]
    lines = source.splitlines(keepends=True)
    first, last = body[0], body[-1]
    assert last.end_lineno is not None
    start = sum(map(len, lines[: first.lineno - 1])) + first.col_offset
    return start, sum(map(len, lines[: last.end_lineno])) - lines[last.end_lineno - 1].endswith("\n")


# Which question


def choose(own: Table, differences: Differences, explains: Callable[[Mistake], int]) -> str:
    """Return the question for an answer that differs from the right one.

    explains: how much of the differences a known mistake explains, which is all of them (2), the first one (1), or
              nothing (0)

    A mistake that explains everything wins. Otherwise, it's the first question whose mistake or symptom fits, among
    those that come first in every exercise, the exercise's own, and those that come last.
    """
    for row in own.rows:
        if any(explains(mistake) == 2 for mistake in row.mistakes):
            return row.ask
    for row in (*tables(SHARED)[FIRST].rows, *own.rows, *tables(SHARED)[LAST].rows):
        if any(fits(symptom, differences) for symptom in row.symptoms) or any(map(explains, row.mistakes)):
            return row.ask
    raise AssertionError(f"the last row of {SHARED.name} fits everything")


def choose_general(section: str, differences: Differences) -> str:
    """Return the first question of a section of the shared table whose symptom fits, or ""."""
    rows = tables(SHARED)[section].rows
    return next((row.ask for row in rows if any(fits(symptom, differences) for symptom in row.symptoms)), "")


def about_report(own: Table, report: str, *, stuck: bool) -> str:
    """Return the first question with a symptom "report WORDS", "stuck" or "crash" that fits a failed run, or ""."""
    for row in (*own.rows, *tables(SHARED)[LAST].rows):
        for symptom in row.symptoms:
            word, _, rest = symptom.partition(" ")
            if word == "report" and re.search(rest, report) or symptom == ("stuck" if stuck else "crash"):
                return row.ask
    return ""


def about_groups(own: Table) -> str:
    """Return the question with the symptom "in groups", which is about a call that doesn't pass its group, or ""."""
    return next((row.ask for row in own.rows if "in groups" in row.symptoms), "")


def fits(symptom: str, d: Differences) -> bool:
    """Return whether the differences show a symptom, such as "dx: 1/p / p times and not out" or "only traffic".

    NAME                an observation that differs. The name is a regular expression
    NAME: KIND / KIND   an observation that differs in one of these ways
    only NAME, NAME     these observations differ, and no others
    saw WORDS           the traffic differs, and the calls that were seen match this regular expression
    root NAME           the observation is right on rank 0, and wrong on other ranks
    aspect WORD         only one aspect of the values differs: "dtype", "sign", "order" or "scale"
    malformed           an output is missing, isn't a tensor, or has the wrong structure or dtype
    not TERM            the opposite
    """
    return all(_fits(term, d) for term in symptom.split(" and "))


def _fits(term: str, d: Differences) -> bool:
    word, _, rest = term.partition(" ")
    if word == "not":
        return not _fits(rest, d)
    if word == "only":
        wanted = rest.split(", ")
        named = [[name for name in d.names if re.fullmatch(each, name)] for each in wanted]
        return all(named) and d.names == {name for some in named for name in some}
    if word == "saw":
        return any(re.search(rest, row.text.partition("; saw ")[2]) for row in d if "traffic" in row.name)
    if word == "root":
        return d.p > 1 and rest in d.names and 0 not in d.ranks(rest)
    if word == "aspect":
        return d.aspect == rest
    if term == "malformed":
        return d.malformed
    name, _, kinds = term.partition(": ")
    ways = kinds.split(" / ") if kinds else []
    rows = [row for row in d if row.kind != NOT_RUN or NOT_RUN in ways]
    return any(re.fullmatch(name, row.name) and (not ways or row.kind in ways) for row in rows)
