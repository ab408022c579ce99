"""Read a chapter's source (`solutions/NN_name.py`, in jupytext's percent format) and report mistakes in its form.

    # %% [markdown] task="4.1" title="Column-parallel forward" difficulty=2 minutes=15
    # %% exercise="4.1"           functions or classes; the answer is between ### BEGIN SOLUTION and ### END SOLUTION.
                                If the task is to repair code, the answer is followed by ### BROKEN and the broken lines
                                as comments
    # %% [markdown] hints="4.1"   a numbered list of exactly three hints
    # %% check="4.1"              exactly one expression: check("4.1", ColumnParallelLinear)
    # %% predict="4.a"            exactly one expression: predict("4.a", calls=1)
    # %% tags=["setup"]           imports, the only given cells that exercises and checks may depend on
    # %% tags=["explore"]         a widget
    ![what it shows](pictures/fg.svg)  in markdown: a picture from pictures/moving/ (see pictures.py)

`read` parses such a file into a `Chapter` and raises SourceError if its form is wrong. What a chapter must contain is
defined in rules.py. Nothing here runs the chapter.
"""

import ast
import re
import symtable
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tplab.course.notebooks.ipython_syntax import parse, to_python
from tplab.course.notebooks.numbering import INDEX, chapter_files, number_of

ROLES = ("task", "exercise", "hints", "check", "predict")
ATTRIBUTES = {"task": {"title", "difficulty", "minutes"}}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
TAGS = {"setup", "explore", "raises-exception"}


class SourceError(Exception):
    """Raised when a chapter's source breaks a rule. The message says where it does and what to do about it."""


@dataclass
class Cell:
    """One cell of the source, with its number and its role (one of ROLES, or None for prose and given code)."""

    code: bool
    text: str
    where: str
    role: str | None = None
    number: str = ""
    tags: list[str] = field(default_factory=list)
    attributes: dict = field(default_factory=dict)

    def refuse(self, message: str) -> SourceError:
        return SourceError(f"{self.where}: {message}")


@dataclass
class Chapter:
    path: Path
    cells: list[Cell]

    @property
    def number(self) -> int:
        return number_of(self.path.stem)

    def of_role(self, role: str) -> dict[str, Cell]:
        return {cell.number: cell for cell in self.cells if cell.role == role}


def sources(root: Path) -> list[Path]:
    """Return the sources of all chapters under `root`, in course order."""
    return chapter_files(root / "solutions", ".py")


def pages(root: Path) -> list[Path]:
    """Return all sources that notebooks are built from: the index, if there is one, and the chapters."""
    index = root / "solutions" / f"{INDEX}.py"
    return [*([index] if index.exists() else []), *sources(root)]


def read(path: Path) -> Chapter:
    """Read the source file of a chapter, or of the index. Raises SourceError if its form is wrong."""
    import jupytext  # imported here because `tplab check` doesn't need it

    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    return Chapter(path, [_cell(cell, f"cell {index}") for index, cell in enumerate(notebook.cells, 1)])


def _cell(raw: Any, where: str) -> Cell:
    # Keys that start with "lines_to_" are jupytext's own
    metadata = {key: value for key, value in raw.metadata.items() if not key.startswith("lines_to_")}
    tags = metadata.pop("tags", [])
    role = next((role for role in ROLES if role in metadata), None)
    number = str(metadata.pop(role, ""))
    cell = Cell(raw.cell_type == "code", raw.source, f"{where} ({raw.source[:40]!r})", role, number, tags, metadata)
    if unknown := (set(tags) - TAGS) | (set(metadata) ^ ATTRIBUTES.get(role or "", set())):
        known = ", ".join((*ROLES, "tags", *sorted(ATTRIBUTES["task"])))
        raise cell.refuse(f"unknown or missing on the cell line: {', '.join(sorted(unknown))}; known are {known}")
    return cell


def parse_code(source: str) -> ast.Module:
    """Parse a cell's code into a syntax tree. Raises SyntaxError if it's valid neither as Python nor in IPython."""
    return parse(to_python(source))


def defined_names(source: str) -> set[str]:
    """Return the names of the functions and classes that a cell defines at its top level."""
    return {node.name for node in parse_code(source).body if isinstance(node, DEFINITIONS)}


def bound_names(source: str) -> set[str]:
    """Return every name that a cell binds at its top level, by a definition, import or assignment."""
    table = symtable.symtable(to_python(source), "cell", "exec")
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


def used_names(source: str) -> set[str]:
    """Return every notebook-level name that a cell reads, even inside functions. Local names don't count.

    A magic or a shell command may read any variable, as in `%timeit -o f(x)` and `!ls {folder}`. So for a cell that has
    one, this returns every word in it.
    """
    python = to_python(source)
    names = set(re.findall(r"\w+", source)) if "get_ipython" in python else set()
    tables = [symtable.symtable(python, "cell", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        names |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (top or symbol.is_global())
        }
    return names


def checked_in(source: str, function: str = "check") -> str:
    """Return "4.1" for a cell that does nothing but call check("4.1", ...), or another function, and "" otherwise."""
    try:
        body = parse_code(source).body
    except SyntaxError:
        return ""
    only = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    return next((number for call, number in _numbered_calls(only, function) if call is only), "")


def predictions_in(source: str) -> dict[str, set[str]]:
    """Return what a cell predicts: {"4.a": {"calls", "bytes"}} for predict("4.a", calls=1, bytes=96).

    Nothing else in the cell makes a difference. Raises SyntaxError if it can't be parsed.
    """
    calls = _numbered_calls(parse_code(source), "predict")
    return {number: {field.arg or "**" for field in call.keywords} for call, number in calls}


def _numbered_calls(tree: ast.AST | None, function: str) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls of a function whose first argument is a literal, with that argument."""
    for node in ast.walk(tree) if tree else ():
        named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
        if isinstance(node, ast.Call) and named and node.args and isinstance(node.args[0], ast.Constant):
            yield node, str(node.args[0].value)


def passed_names(check: str) -> list[str]:
    """Return the names that a check cell passes: ["shard", "unshard"] for check("2.1", shard, unshard)."""
    call = next(node for node in ast.walk(parse_code(check)) if isinstance(node, ast.Call))
    return [argument.id for argument in call.args if isinstance(argument, ast.Name)]
