"""The rules that a chapter's source must follow. `validate` raises SourceError for the first broken rule.

- An exercise consists of four cells, directly after one another: a task, an exercise, hints and a check. Exercises are
  numbered 4.1, 4.2, ...
- The exercise cell contains only functions, classes, imports and a docstring, with the answer between the markers.
- A check cell is a single expression, check("4.1", ...), and so is a predict cell, predict("4.a", ...).
- Given cells, which contain the course's own code, use an answer only after its check. Exercises and checks use no
  given cells except the setup.
- There are exactly three hints, without $...$, because `tplab hint` also shows them in a terminal.
- Code ends at column 88, so that a notebook shows it without a scroll bar.
- Every picture in the text has a description, and a file in pictures/moving/.
"""

import ast
from string import ascii_lowercase

from tplab.course.notebooks.numbering import argument, prefix
from tplab.course.notebooks.pictures import validate_pictures
from tplab.course.notebooks.rewrite import RewriteError, blank_exercise, fold_hints, has_solution_region
from tplab.course.notebooks.source import (
    DEFINITIONS,
    Cell,
    Chapter,
    SourceError,
    bound_names,
    defined_names,
    parse_code,
    used_names,
)

COLUMNS = 88  # of code; solutions/ruff.toml has the same number


def validate(chapter: Chapter) -> None:
    """Raise SourceError for the first broken rule, saying which cell breaks it and what to do."""
    for cell in chapter.cells:
        _validate_form(cell)
    _validate_order(chapter)
    _validate_given_cells(chapter)
    validate_pictures(chapter)


def _validate_form(cell: Cell) -> None:
    wants_code = cell.role in ("exercise", "check", "predict")
    if cell.role and cell.code != wants_code:
        raise cell.refuse(f"{cell.role}={cell.number!r} belongs on a {'code' if wants_code else '[markdown]'} cell")
    if cell.code:
        try:
            parse_code(cell.text)
        except SyntaxError as error:
            raise cell.refuse(f"line {error.lineno} of the cell is not Python: {error.msg}") from error
        for number, line in enumerate(cell.text.split("\n"), 1):
            if len(line) > COLUMNS:
                raise cell.refuse(
                    f"line {number} of the cell has {len(line)} characters; end it at column {COLUMNS}, so that a "
                    "notebook shows it without a scroll bar (`make format` wraps code, but no texts)"
                )
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
        if "$" in cell.text:
            raise cell.refuse(f"hints {cell.number}: write formulas as `code`, because a terminal can't typeset $...$")
    if cell.role == "task":
        wanted = {"title": str, "difficulty": int, "minutes": int}
        if not all(isinstance(cell.attributes.get(name), kind) for name, kind in wanted.items()):
            raise cell.refuse(f'task {cell.number} needs title="...", difficulty=1 to 5, and minutes=')


def _validate_call(cell: Cell) -> None:
    """Require a check or predict cell to be a single expression: check("4.1", ...) or predict("4.a", ...)."""
    role, body = cell.role, parse_code(cell.text).body
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == role):
        raise cell.refuse(f'a {role} cell is exactly one expression: {role}("{cell.number}", ...)')
    first = call.args[0] if call.args else None
    if not isinstance(first, ast.Constant) or first.value != cell.number:
        said = ast.unparse(first) if first else "nothing"
        raise cell.refuse(f'the cell line says {role} "{cell.number}", but its call says {said}; make them the same')
    if role == "check" and (call.keywords or not all(isinstance(answer, ast.Name) for answer in call.args[1:])):
        raise cell.refuse(f'hand answers to a check by their names alone: check("{cell.number}", my_function)')


def _validate_exercise(cell: Cell) -> None:
    """Require functions, classes, imports and a docstring, which are the same with and without the solution."""
    if not has_solution_region(cell.text):
        raise cell.refuse(f"exercise {cell.number} has no ### BEGIN SOLUTION ... ### END SOLUTION region")
    try:
        blank = blank_exercise(cell.text, cell.number)
        body = [*parse_code(cell.text).body, *parse_code(blank).body]
    except RewriteError as error:
        raise cell.refuse(f"exercise {cell.number}: {error}") from error
    except SyntaxError as error:
        raise cell.refuse(
            f"exercise {cell.number} is not Python once its solution is taken out: {error.msg}"
        ) from error
    for node in body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not docstring and not isinstance(node, (*DEFINITIONS, ast.Import, ast.ImportFrom)):
            raise cell.refuse(
                f"exercise {cell.number} holds `{ast.unparse(node).splitlines()[0]}`; "
                "an exercise is functions, classes, imports and a docstring, so move it into a cell of its own"
            )


def _validate_order(chapter: Chapter) -> None:
    """Require consecutive task, exercise, hints and check cells, and numbers that count up from 1 or a."""
    parts = ("task", "exercise", "hints", "check")
    for place, cell in enumerate(chapter.cells):
        if cell.role and chapter.is_index:
            raise cell.refuse(f"{cell.role} {cell.number} in the index; it belongs into a chapter")
        if cell.role in parts:
            first = max(0, place - parts.index(cell.role))
            group = [(each.role, each.number) for each in chapter.cells[first : first + len(parts)]]
            if group != [(part, cell.number) for part in parts]:
                raise cell.refuse(
                    f"{cell.role} {cell.number} isn't in its place; an exercise consists of {', '.join(parts)} with "
                    "the same number, directly after one another"
                )
    for role, names in (("check", range(1, 100)), ("predict", ascii_lowercase)):
        numbers = [cell.number for cell in chapter.cells if cell.role == role]
        if numbers != [f"{prefix(chapter.number)}.{name}" for _, name in zip(numbers, names, strict=False)]:
            raise SourceError(
                f"the {role} cells are numbered {', '.join(numbers)}; in chapter "
                f"{argument(chapter.number)}, count up from {prefix(chapter.number)}.{names[0]}"
            )


def _validate_given_cells(chapter: Chapter) -> None:
    """Require given cells to use only checked answers, and exercises and checks to use only the setup cells."""
    waiting = {name: cell.number for cell in chapter.of_role("exercise").values() for name in defined_names(cell.text)}
    setup: set[str] = set()
    answers: set[str] = set()
    given: dict[str, str] = {}
    for cell in chapter.cells:
        if not cell.code:
            continue
        if cell.role == "check":
            waiting = {name: number for name, number in waiting.items() if number != cell.number}
        if cell.role in ("exercise", "check"):
            needs = used_names(cell.text) & set(given)
            for name in sorted(needs - setup - bound_names(cell.text) - answers):
                raise cell.refuse(
                    f"{cell.role} {cell.number} uses {name} of {given[name]}; give that cell the tag setup"
                )
            answers |= bound_names(cell.text)
        elif "setup" in cell.tags:
            setup |= bound_names(cell.text)
        else:
            for name in sorted(used_names(cell.text) & set(waiting)):
                number = waiting[name]
                raise cell.refuse(
                    f"this given cell uses {name}, which the learner writes in exercise {number}; "
                    f"move it below check {number}"
                )
            given |= dict.fromkeys(bound_names(cell.text), cell.where)
