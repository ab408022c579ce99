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

from tplab.course.notebooks.ipython_syntax import magic_arguments, parse, to_python
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
    def stem(self) -> str:
        return self.path.stem

    @property
    def is_index(self) -> bool:
        """Whether this is the index, the page with the table of contents, which has no number and no exercises."""
        return self.stem == INDEX

    @property
    def number(self) -> int:
        return number_of(self.stem)

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

    text = path.read_text(encoding="utf-8")
    try:
        notebook = jupytext.reads(text, fmt="py:percent")
    except Exception as error:  # jupytext and nbformat raise many kinds of errors
        raise SourceError(f"jupytext can't read it as percent format: {error}") from error
    lines = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"# %%(\s|$)", line)]
    if len(lines) != len(notebook.cells):
        lines = [0] * len(notebook.cells)
    cells = [
        _cell(cell, f"cell {index}" + (f" (line {line})" if line else ""))
        for index, (cell, line) in enumerate(zip(notebook.cells, lines, strict=True), 1)
    ]
    return Chapter(path, cells)


def _cell(raw: Any, where: str) -> Cell:
    # Keys that start with "lines_to_" are jupytext's own
    metadata = {key: value for key, value in raw.metadata.items() if not key.startswith("lines_to_")}
    tags = list(metadata.pop("tags", []))
    roles = [role for role in ROLES if role in metadata]
    cell = Cell(raw.cell_type == "code", raw.source, where, tags=tags)
    if raw.cell_type not in ("code", "markdown"):
        raise cell.refuse(f"a {raw.cell_type} cell; use code or [markdown]")
    if len(roles) > 1:
        raise cell.refuse(f"it says {' and '.join(roles)}; a cell has one role")
    if roles:
        cell.role, cell.number = roles[0], str(metadata.pop(roles[0]))
    unknown = sorted(set(metadata) - ATTRIBUTES.get(cell.role or "", set()))
    if unknown:
        raise cell.refuse(
            f"unknown attribute {', '.join(unknown)} on the cell line; known roles are {', '.join(ROLES)}"
        )
    if wrong := sorted(set(tags) - TAGS):
        raise cell.refuse(f"unknown tag {', '.join(wrong)}; use one of {', '.join(sorted(TAGS))}")
    cell.attributes = metadata
    return cell


def parse_code(source: str) -> ast.Module:
    """Parse a cell's code into a syntax tree. Raises SyntaxError if it's valid neither as Python nor in IPython."""
    return parse(to_python(source))


def defined_names(source: str) -> set[str]:
    """Return the names of the functions and classes that a cell defines at its top level."""
    return {node.name for node in parse_code(source).body if isinstance(node, DEFINITIONS)}


def bound_names(source: str) -> set[str]:
    """Return every name that a cell binds at its top level, by a definition, import or assignment."""
    names = defined_names(source)
    for statement in parse_code(source).body:
        if isinstance(statement, DEFINITIONS):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.alias):
                names.add((node.asname or node.name).partition(".")[0])
    return names


def used_names(source: str) -> set[str]:
    """Return every notebook-level name that a cell reads, even inside functions. Local names don't count.

    A magic or a shell command may read any variable that it mentions, as in `%timeit -o f(x)` and `!ls {folder}`.
    """
    names, python = set(), to_python(source)
    for argument in magic_arguments(parse(python)) if "get_ipython" in python else ():
        try:
            names |= used_names(argument)  # most magics run Python, such as ipyparallel's %%px
        except SyntaxError:
            names |= set(re.findall(r"\w+", argument))
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


def checked_in(source: str) -> str:
    """Return the number of the exercise that a cell checks, or "" if the cell isn't just a check."""
    try:
        body = parse_code(source).body
    except SyntaxError:
        return ""
    only = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    return next((number for call, number in _numbered_calls(only, "check") if call is only), "")


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
