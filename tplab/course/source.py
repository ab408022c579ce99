"""Read the source of a chapter (`solutions/NN_name.py`, jupytext's percent format) and say what is wrong with it.

    # %% [markdown] task="4.1" title="Column-parallel forward" difficulty=2 minutes=15
    # %% exercise="4.1"           functions or classes; the answer between ### BEGIN SOLUTION and ### END SOLUTION
    # %% [markdown] hints="4.1"   a numbered list of exactly three hints
    # %% check="4.1"              exactly one expression: check("4.1", ColumnParallelLinear)
    # %% predict="4.a"            exactly one expression: predict("4.a", calls=1)
    # %% tags=["setup"]           imports, the only given cells that exercises and checks may depend on
    # %% tags=["explore"]         a widget

`read` turns such a file into a `Chapter`; `validate` refuses one that breaks a rule, with a message that names the
file, the cell and what to do. Nothing here runs the chapter.
"""

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

import jupytext

from tplab.course.rewrite import RewriteError, blank_exercise, fold_hints, has_solution_region

ROLES = ("task", "exercise", "hints", "check", "predict")
ATTRIBUTES = {"task": {"title", "difficulty", "minutes"}}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
TAGS = {"setup", "explore", "raises-exception"}


class SourceError(Exception):
    """A rule of the chapter's source is broken; the message says where and what to do."""


@dataclass
class Cell:
    """One cell of the source: its role (one of ROLES, or None for prose and given code) and the number it carries."""

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
    def number(self) -> int:
        return int(self.stem[:2])

    def of_role(self, role: str) -> dict[str, Cell]:
        return {cell.number: cell for cell in self.cells if cell.role == role}


def sources(root: Path) -> list[Path]:
    """The sources of all chapters under `root`, in the course's order."""
    return sorted((root / "solutions").glob("[0-9][0-9]_*.py"))


def read(path: Path) -> Chapter:
    """Read and validate one source file."""
    text = path.read_text(encoding="utf-8")
    try:
        notebook = jupytext.reads(text, fmt="py:percent")
    except Exception as error:  # jupytext and nbformat raise many kinds
        raise SourceError(f"{path.name}: jupytext can't read it as percent format: {error}") from error
    lines = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"# %%(\s|$)", line)]
    if len(lines) != len(notebook.cells):
        lines = [0] * len(notebook.cells)
    cells = [
        _cell(cell, f"{path.name}, cell {index}" + (f" (line {line})" if line else ""))
        for index, (cell, line) in enumerate(zip(notebook.cells, lines, strict=True), 1)
    ]
    chapter = Chapter(path, cells)
    validate(chapter)
    return chapter


def _cell(raw, where: str) -> Cell:
    metadata = {key: value for key, value in raw.metadata.items() if not key.startswith("lines_to_")}  # jupytext's own
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
    """The syntax tree of a cell, IPython's magics taken out. Raises SyntaxError."""
    lines = source.split("\n")
    if lines and lines[0].lstrip().startswith("%%"):
        lines[0] = ""
    lines = [re.sub(r"^(\s*)[%!].*$", r"\1pass", line) for line in lines]
    return ast.parse("\n".join(lines))


def defined_names(source: str) -> set[str]:
    """Functions and classes that a cell defines at its top level."""
    return {node.name for node in parse_code(source).body if isinstance(node, DEFINITIONS)}


def bound_names(source: str) -> set[str]:
    """Every name that a cell binds at its top level: definitions, imports and assignments."""
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
    """Every name that a cell reads."""
    nodes = ast.walk(parse_code(source))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def validate(chapter: Chapter) -> None:
    """Raise SourceError for the first rule of the module docstring that the chapter breaks."""
    for cell in chapter.cells:
        _validate_form(cell)
    _validate_numbers(chapter)
    _validate_order(chapter)
    _validate_given_cells(chapter)


def _validate_form(cell: Cell) -> None:
    wants_code = cell.role in ("exercise", "check", "predict")
    if cell.role and cell.code != wants_code:
        raise cell.refuse(f"{cell.role}={cell.number!r} belongs on a {'code' if wants_code else '[markdown]'} cell")
    if cell.code:
        try:
            parse_code(cell.text)
        except SyntaxError as error:
            raise cell.refuse(f"line {error.lineno} of the cell is not Python: {error.msg}") from error
    if cell.role != "exercise" and has_solution_region(cell.text):
        raise cell.refuse(
            "a solution region outside an exercise; put exercise=... on the cell line or drop the markers"
        )
    if cell.role in ("check", "predict"):
        _validate_call(cell)
    if cell.role == "exercise":
        _validate_exercise(cell)
    if cell.role == "hints":
        try:
            fold_hints(cell.text)
        except RewriteError as error:
            raise cell.refuse(f"hints {cell.number}: {error}") from error
    if cell.role == "task":
        _validate_task(cell)


def _validate_task(cell: Cell) -> None:
    title, difficulty, minutes = (cell.attributes.get(name) for name in ("title", "difficulty", "minutes"))
    if not isinstance(title, str) or not title:
        raise cell.refuse(f'task {cell.number} needs title="..."')
    if not isinstance(difficulty, int) or not 1 <= difficulty <= 5:
        raise cell.refuse(f"task {cell.number} needs difficulty=1 to 5, not {difficulty}")
    if not isinstance(minutes, int) or minutes < 1:
        raise cell.refuse(f"task {cell.number} needs minutes=, a whole number, not {minutes}")


def _validate_call(cell: Cell) -> None:
    """A check or predict cell is exactly one expression: check("4.1", ...) or predict("4.a", ...)."""
    role, body = cell.role, parse_code(cell.text).body
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == role):
        raise cell.refuse(f'a {role} cell is exactly one expression: {role}("{cell.number}", ...)')
    first = call.args[0] if call.args else None
    if not isinstance(first, ast.Constant) or first.value != cell.number:
        said = ast.unparse(first) if first else "nothing"
        raise cell.refuse(f'the cell line says {role} "{cell.number}", but its call says {said}; make them the same')


def _validate_exercise(cell: Cell) -> None:
    if not has_solution_region(cell.text):
        raise cell.refuse(f"exercise {cell.number} has no ### BEGIN SOLUTION ... ### END SOLUTION region")
    try:
        blank = blank_exercise(cell.text, cell.number)
    except RewriteError as error:
        raise cell.refuse(f"exercise {cell.number}: {error}") from error
    try:
        blank_tree = parse_code(blank)
    except SyntaxError as error:
        raise cell.refuse(
            f"exercise {cell.number} is not Python once its solution is taken out: {error.msg}"
        ) from error
    for tree, form in ((parse_code(cell.text), ""), (blank_tree, ", once its solution is taken out,")):
        for position, node in enumerate(tree.body):
            docstring = position == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not docstring and not isinstance(node, (*DEFINITIONS, ast.Import, ast.ImportFrom)):
                raise cell.refuse(
                    f"exercise {cell.number}{form} holds `{ast.unparse(node).splitlines()[0]}`; an exercise is functions, "
                    "classes, imports and a docstring, so move it into a cell of its own"
                )
    if not defined_names(cell.text) or defined_names(cell.text) != defined_names(blank):
        raise cell.refuse(
            f"exercise {cell.number} must define the same functions or classes with and without its solution"
        )


def _validate_numbers(chapter: Chapter) -> None:
    seen: set[tuple[str, str]] = set()
    pattern = {role: r"\d+" for role in ROLES} | {"predict": "[a-z]"}
    for cell in chapter.cells:
        if cell.role is None:
            continue
        if not re.fullmatch(rf"{chapter.number}\.{pattern[cell.role]}", cell.number):
            example = f"{chapter.number}.{'a' if cell.role == 'predict' else 1}"
            raise cell.refuse(f"{cell.role} {cell.number!r} in chapter {chapter.number}; number it like {example}")
        if (cell.role, cell.number) in seen:
            raise cell.refuse(f"a second {cell.role} {cell.number}; give each its own number")
        seen.add((cell.role, cell.number))


def _validate_order(chapter: Chapter) -> None:
    """Per exercise: task, exercise, hints, check, directly one after another; numbered 1, 2, 3, ..."""
    parts = ("task", "exercise", "hints", "check")
    cells = chapter.cells
    for index, cell in enumerate(cells):
        if cell.role not in parts:
            continue
        if cell.role != "task":
            place = parts.index(cell.role)
            before = cells[index - 1] if index else None
            if before is None or (before.role, before.number) != (parts[place - 1], cell.number):
                raise cell.refuse(
                    f"{cell.role} {cell.number} must follow {parts[place - 1]} {cell.number} directly; "
                    f"the order of an exercise is {', '.join(parts)}"
                )
        if cell.role != "check":
            follower = parts[parts.index(cell.role) + 1]
            after = cells[index + 1] if index + 1 < len(cells) else None
            if after is None or (after.role, after.number) != (follower, cell.number):
                raise cell.refuse(
                    f"{cell.role} {cell.number} has no {follower} right after it; "
                    f"the order of an exercise is {', '.join(parts)}"
                )
    for role in ("check", "predict"):
        numbers = list(chapter.of_role(role))
        names = [chr(ord("a") + i) if role == "predict" else str(i + 1) for i in range(len(numbers))]
        if numbers != [f"{chapter.number}.{name}" for name in names]:
            raise SourceError(
                f"{chapter.path.name}: the {role} cells are numbered {', '.join(numbers)}; count up from 1 or a"
            )


def _validate_given_cells(chapter: Chapter) -> None:
    """No given cell needs an answer before it has been checked; no answer needs a given cell outside the setup."""
    waiting = {name: cell.number for cell in chapter.of_role("exercise").values() for name in defined_names(cell.text)}
    setup: set[str] = set()
    given: dict[str, str] = {}
    for cell in chapter.cells:
        if not cell.code:
            continue
        if cell.role == "check":
            waiting = {name: number for name, number in waiting.items() if number != cell.number}
        if cell.role in ("exercise", "check"):
            for name in sorted(used_names(cell.text) & set(given) - setup - bound_names(cell.text)):
                raise cell.refuse(
                    f"{cell.role} {cell.number} uses {name} of {given[name]}; give that cell the tag setup"
                )
        elif "setup" in cell.tags:
            setup |= bound_names(cell.text)
        else:
            for name in sorted(used_names(cell.text) & set(waiting)):
                number = waiting[name]
                raise cell.refuse(
                    f"this given cell uses {name}, which the learner writes in exercise {number}; "
                    f"move it below check {number}"
                )
            given |= {name: cell.where for name in bound_names(cell.text)}
