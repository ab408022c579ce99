"""Extract an answer from a notebook as plain Python, together with the imports and helpers that it uses.

    Passage(imports=["from torch import nn"], helpers=["def double(x): ..."], code=["class Layer(nn.Module): ..."])

Comments above a statement belong to it. Below a class, there is often code that tries it out, such as
`print(launch(my_try, 2))`, a plot or a small layer. That's fine in a notebook, but on a rank it would start ranks
inside a rank. So we keep the definitions and imports of the answer's cell, statements that may change paths, modules or
the environment, and whatever binds or changes a name that these use. We never keep anything that calls `launch` or uses
its results. IPython's magics and shell commands are left out, too, unless the answer needs them. In that case, it can't
go into a module.
"""

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from textwrap import shorten

from tplab.course.grade.answers import Merged, Piece
from tplab.course.grade.needs import binds, has_side_effects, select, uses
from tplab.course.notebooks.ipython_syntax import ipython_lines, parse, to_python
from tplab.course.notebooks.source import DEFINITIONS, passed_names

_IMPORTS = (ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Passage:
    """The code of an answer. Each item is a single top-level statement, with the comments above it.

    imports:  import statements that import one name each, sorted
    helpers:  statements from given cells and the learner's own cells that define what the answer uses
    code:     the statements of the answer itself
    """

    imports: list[str] = field(default_factory=list)
    helpers: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)

    @property
    def lines(self) -> int:
        """How many lines of code it has, with its helpers, not counting blank lines."""
        return sum(bool(line.strip()) for text in (*self.helpers, *self.code) for line in text.split("\n"))

    @property
    def used(self) -> set[str]:
        return {name for text in [*self.helpers, *self.code] for name in uses(text)}


@dataclass(frozen=True)
class Statement:
    """A top-level statement, with the comments above it."""

    node: ast.stmt
    text: str

    @cached_property
    def uses(self) -> frozenset[str]:
        return uses(self.text)

    @cached_property
    def binds(self) -> set[str]:
        """The names that it binds, including definitions inside an `if`, or of whose value it sets a part."""
        if isinstance(self.node, DEFINITIONS):
            return {self.node.name}
        return {inner.name for inner in ast.walk(self.node) if isinstance(inner, DEFINITIONS)} | binds(self.text)

    @cached_property
    def calls_methods_of(self) -> set[str]:
        """The names whose values it may change by a method call, as in `table.append(1)`."""
        call = self.node.value if isinstance(self.node, ast.Expr) else None
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            return set()
        return {inner.id for inner in ast.walk(call.func.value) if isinstance(inner, ast.Name)}

    @property
    def calls_launch(self) -> bool:
        calls = (inner.func for inner in ast.walk(self.node) if isinstance(inner, ast.Call))
        return any(getattr(call, "id", getattr(call, "attr", "")) == "launch" for call in calls)

    @property
    def replaces(self) -> bool:
        """Whether what earlier statements have bound to its names no longer counts, unlike in `table["a"] = 1`."""
        if isinstance(self.node, ast.Assign):
            return any(isinstance(target, ast.Name) for target in self.node.targets)
        return isinstance(self.node, DEFINITIONS + _IMPORTS + (ast.AnnAssign,))


def extract_from(merged: Merged, number: str) -> Passage:
    """Extract the answer to an exercise from a chapter that a learner's cells are merged into. Raises as `extract`."""
    return extract(number, select(merged, [number], whole=False))


def extract(number: str, pieces: list[Piece]) -> Passage:
    """Extract the answer to an exercise from the code cells that ran up to its check.

    Other cells that can't be parsed are left out. Raises SyntaxError if the answer's own cell can't be, and if the
    answer needs a line that only works in a notebook.
    """
    own = [piece for piece in pieces if piece.role == "exercise" and piece.number == number]
    checks = [piece for piece in pieces if piece.role == "check" and piece.number == number]
    checked = {name for piece in checks for name in passed_names(piece.source)}
    answers = {name for piece in pieces if piece.role == "exercise" for name in binds(piece.source)}
    mine = [one for piece in own for one in top_level(piece.source)]
    others = [
        (piece, one)
        for piece in pieces
        if piece.role not in ("check", "exercise")
        for one in _top_level_if_any(piece.source)
    ]
    later = pieces[pieces.index(own[-1]) :] if own else []
    # what the learner's later cells change about the answer, as in `Layer.forward = mine`
    changing = [one for piece, one in others if piece.role == "own" and piece in later and one.binds & checked]
    first = [
        one
        for one in mine
        if (isinstance(one.node, DEFINITIONS + _IMPORTS) or has_side_effects(ast.unparse(one.node)))
        and not ipython_lines(one.node)
    ]
    code = needed_statements(mine, first, checked) + changing
    used = {name for one in code for name in one.uses} - {name for one in code for name in one.binds}
    helpers = needed_statements([one for _, one in others], [], used - answers, answers | checked)
    undefined = checked - {name for one in code for name in one.binds}  # a magic that ran the cell defines them
    for one in (*code, *helpers, *(mine if undefined else ())):
        _refuse_what_needs_a_notebook(one)
    found = [*code, *helpers]
    used = {name for one in found if not isinstance(one.node, _IMPORTS) for name in one.uses}
    imports = {text for one in found for text in single_imports(one.node)}
    return Passage(
        sorted(text for text in imports if binds(text) & used),
        [one.text for one in helpers if not isinstance(one.node, _IMPORTS)],
        [one.text for one in code if not isinstance(one.node, _IMPORTS)],
    )


def needed_statements(
    statements: list[Statement], first: list[Statement], names: Iterable[str], without: Collection[str] = ()
) -> list[Statement]:
    """Return the statements in `first` and those that these and `names` depend on, in order.

    If several statements bind a name, the last one above its use counts, with everything that changes its value after
    that. Functions and classes use names at the end. Names in `without` are defined elsewhere. Whatever calls `launch`,
    or uses what such a call has returned, is left out.
    """
    launched = _what_comes_of_a_launch(statements)
    values = {name for one in statements if isinstance(one.node, ast.Assign | ast.AnnAssign) for name in one.binds}
    kept: set[int] = set()  # places in `statements`
    waiting = [(name, len(statements)) for name in names]
    done: set[tuple[str, int]] = set()

    def keep(place: int) -> None:
        if place not in kept:
            kept.add(place)
            end = len(statements) if isinstance(statements[place].node, DEFINITIONS) else place
            waiting.extend((name, end) for name in statements[place].uses)

    for place, one in enumerate(statements):
        if one in first and id(one) not in launched:
            keep(place)
    while waiting:
        name, end = waiting.pop()
        if name in without or (name, end) in done:
            continue
        done.add((name, end))
        for place, one in reversed([*enumerate(statements[:end])]):
            if id(one) not in launched and name in one.binds | (one.calls_methods_of & values):
                keep(place)
                if name in one.binds and one.replaces:
                    break
    return [statements[place] for place in sorted(kept)]


def _what_comes_of_a_launch(statements: list[Statement]) -> set[int]:
    """Return the ids of the statements that call `launch` or use a name that such a statement has bound."""
    found: set[int] = set()
    launched: set[str] = set()
    for one in statements:
        if isinstance(one.node, DEFINITIONS + _IMPORTS) or not (one.calls_launch or one.uses & launched):
            launched -= one.binds
        else:
            found.add(id(one))
            launched |= one.binds
    return found


def _refuse_what_needs_a_notebook(one: Statement) -> None:
    """Raise SyntaxError if a statement needs IPython, or awaits something outside a function."""
    is_async = (ast.Await, ast.AsyncFor, ast.AsyncWith)
    awaits = not isinstance(one.node, DEFINITIONS) and any(isinstance(node, is_async) for node in ast.walk(one.node))
    if awaits or ipython_lines(one.node):
        line = next(line for line in one.text.split("\n") if re.search(r"\b(get_ipython|await|async)\b", line))
        raise SyntaxError(
            f"it needs `{shorten(line, 80)}`, which only works in a notebook. (IPython translates magics and "
            "shell commands into such lines.) Write this line in plain Python, and check the exercise again."
        )


def _top_level_if_any(source: str) -> list[Statement]:
    try:
        return top_level(source)
    except SyntaxError:
        return []


def top_level(source: str) -> list[Statement]:
    """Return the top-level statements of a cell with the comments above them. Raises SyntaxError if it has none."""
    text = to_python(source)
    lines = text.split("\n")
    found = []
    end = 0
    for node in parse(text).body:
        start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1
        while start > end and lines[start - 1].startswith("#"):
            start -= 1
        end = node.end_lineno or node.lineno
        found.append(Statement(node, "\n".join(lines[start:end]).rstrip()))
    return found


def single_imports(node: ast.stmt) -> Iterator[str]:
    """Split an import statement: yield a statement of its own for each name that it imports."""
    if isinstance(node, _IMPORTS):
        for name in node.names:
            one = (
                ast.Import([name]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [name], node.level)
            )
            yield ast.unparse(one)


def joined_imports(texts: Iterable[str]) -> str:
    """Join import statements that import one name each into one line per module, with those from the course last."""

    def order(text: str) -> tuple[bool, bool, bool, str]:
        of_the_course = text.startswith(("from tplab", "import tplab", "from ."))
        return not text.startswith("from __future__"), of_the_course, text.startswith("from"), text

    names: dict[str, list[str]] = {}
    for text in sorted(set(texts), key=order):
        module, _, name = text.partition(" import ")  # "from torch" and "nn", or "import math" and ""
        names.setdefault(module, []).extend([name] if name else [])
    return "\n".join(f"{module} import {', '.join(found)}" if found else module for module, found in names.items())
