"""The rules that a chapter's source must follow. `validate` raises SourceError for the first broken rule.

- An exercise consists of four cells, directly after one another: a task, an exercise, hints and a check. Exercises are
  numbered 4.1, 4.2, ...
- The exercise cell contains only functions, classes, imports and a docstring, with the answer between the markers.
- A check cell is a single expression, check("4.1", ...), and so is a predict cell, predict("4.a", ...).
- There are exactly three hints, without $...$, because `tplab hint` also shows them in a terminal.
- Exercises and checks use no given cells except the setup. (This isn't tested here, but in tests/course/.)
- Code ends at column 88, so that a notebook shows it without a scroll bar.
"""

import ast

from tplab.course.notebooks.numbering import prefix
from tplab.course.notebooks.rewrite import blank_exercise, fold_hints, regions
from tplab.course.notebooks.source import DEFINITIONS, Cell, Chapter, checked_in, parse_code

COLUMNS = 88  # of code; solutions/ruff.toml has the same number
PARTS = ("task", "exercise", "hints", "check")


def validate(chapter: Chapter) -> None:
    """Raise SourceError for the first broken rule, saying which cell breaks it and what to do."""
    for cell in chapter.cells:
        try:
            _validate_form(cell)
        except (ValueError, SyntaxError) as error:
            raise cell.refuse(str(error)) from error
    places = [place for place, cell in enumerate(chapter.cells) if cell.role in PARTS]
    for count, place in enumerate(places[:: len(PARTS)], 1):
        number = f"{prefix(chapter.number)}.{count}"
        group = [(cell.role, cell.number) for cell in chapter.cells[place : place + len(PARTS)]]
        if group != [(part, number) for part in PARTS]:
            raise chapter.cells[place].refuse(
                f"exercise {number} begins here, so it needs {', '.join(PARTS)} with this number, one after the other"
            )


def _validate_form(cell: Cell) -> None:
    """Raise ValueError if a cell breaks a rule on its own, or SyntaxError if its code can't be parsed."""
    if cell.code:
        parse_code(cell.text)
        for line in cell.text.split("\n"):
            if len(line) > COLUMNS:
                raise ValueError(f"{line!r} has {len(line)} characters; end it at column {COLUMNS}")
    if any(part == "marker" for _, part in regions(cell.text)) != (cell.role == "exercise"):
        raise ValueError("an exercise has ### BEGIN SOLUTION ... ### END SOLUTION, and no other cell has it")
    if cell.role in ("check", "predict") and checked_in(cell.text, cell.role) != cell.number:
        raise ValueError(f'a {cell.role} cell is exactly one expression: {cell.role}("{cell.number}", ...)')
    if cell.role == "exercise":
        _validate_exercise(cell)
    if cell.role == "hints":
        fold_hints(cell.text)
        if "$" in cell.text:
            raise ValueError("write the formulas of hints as `code`, because a terminal can't typeset $...$")


def _validate_exercise(cell: Cell) -> None:
    """Require functions, classes, imports and a docstring, which are the same with and without the solution."""
    for node in [*parse_code(cell.text).body, *parse_code(blank_exercise(cell.text, cell.number)).body]:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not docstring and not isinstance(node, (*DEFINITIONS, ast.Import, ast.ImportFrom)):
            raise ValueError(
                f"`{ast.unparse(node)}` is in an exercise, which may only have functions, classes, imports and a "
                "docstring; move it into a cell of its own"
            )
