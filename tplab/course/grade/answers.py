"""Merge the learner's answers into the reference chapter.

The reference is the executed solution, which provides the check cells, expected outputs and tags. Only the source of
code cells is taken from the learner's notebook:

    exercise cell            found by its cell id, or else by its metadata, its source, or the names that it defines;
                             several cells for one exercise run one after another, and the last one is the answer
    check cell               dropped; the reference's check cell runs instead
    given cell               dropped if it's the same as in the reference; if the learner changed it, it runs after the
                             reference's version, like a cell that the learner added
    cells the learner added  keep their place, since they may define helpers

needs.py then selects the cells that must run for a given exercise.
"""

import ast
import re
from contextlib import suppress
from dataclasses import dataclass, field

from tplab.course.notebooks.cells import Cell
from tplab.course.notebooks.source import checked_in, defined_names, parse_code, predictions_in

_MARKS = ("exercise", "check", "predict")


@dataclass
class Piece:
    """A code cell of the merged chapter. Pieces are listed in execution order."""

    role: str  # "setup", "given", "exercise", "check" or "own" (a cell that the learner added)
    id: str
    source: str
    number: str = ""
    reference: Cell | None = None


@dataclass
class Merged:
    pieces: list[Piece]
    notes: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # exercise -> why the notebook has no answer to it


def role_of(cell: Cell) -> tuple[str, str]:
    """Return the role of a code cell in the reference, and the number of the exercise that it belongs to, or ""."""
    for role in ("exercise", "check"):
        if role in cell.marks:
            return role, cell.marks[role]
    return ("setup" if "setup" in cell.metadata.get("tags", []) else "given"), ""


def code_cells(cells: list[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.kind == "code"]


def names_in(source: str) -> set[str]:
    """Return the names of the functions and classes at a cell's top level, even if the cell isn't valid Python."""
    try:
        return defined_names(source)
    except SyntaxError:
        return set(re.findall(r"^(?:async +)?(?:def|class) +(\w+)", source, re.MULTILINE))


def _plain(source: str) -> str:
    return "\n".join(line.rstrip() for line in source.strip().split("\n"))


def is_stub(source: str, number: str) -> bool:
    """Return whether an exercise's cell still has the line that its answer replaces."""
    try:
        raised = [node.exc for node in ast.walk(parse_code(source)) if isinstance(node, ast.Raise) and node.exc]
    except SyntaxError:
        return f'raise NotImplementedError("exercise {number}")' in source
    return any(ast.unparse(error) == f"NotImplementedError('exercise {number}')" for error in raised)


class _Index:
    """An index of the reference cells, used to find the one that a learner's cell is a version of."""

    def __init__(self, reference: list[Cell]):
        self.cells = code_cells(reference)
        self.by_id = {cell.id: cell for cell in reference}
        self.by_source = {_plain(cell.source): cell for cell in self.cells if cell.source.strip()}
        self.by_mark = {(role, cell.marks[role]): cell for cell in self.cells for role in _MARKS if role in cell.marks}
        exercises = [cell for cell in self.cells if role_of(cell)[0] == "exercise"]
        self.by_name = {name: cell for cell in exercises for name in names_in(cell.source)}

    def find(self, cell: Cell) -> Cell | None:
        marked = next((self.by_mark[mark] for mark in self.by_mark if cell.marks.get(mark[0]) == mark[1]), None)
        found = self.by_id.get(cell.id) or marked or self.by_source.get(_plain(cell.source)) or self._called(cell)
        if found is None and cell.kind == "code":
            found = next((self.by_name[name] for name in names_in(cell.source) if name in self.by_name), None)
        return found

    def _called(self, cell: Cell) -> Cell | None:
        """Return the check or prediction cell that makes the same call as `cell`, or None.

        Only the fields of a prediction may differ, and a prediction may have more lines.
        """
        if cell.kind != "code":
            return None
        calls = [("check", checked_in(cell.source))]
        with suppress(SyntaxError):
            calls += [("predict", number) for number in predictions_in(cell.source)]
        return next((self.by_mark[call] for call in calls if call in self.by_mark), None)


def find_cells(reference: list[Cell], learner: list[Cell]) -> list[str]:
    """Return, for each of the learner's cells, the id of the reference cell that it's a version of, or ""."""
    index = _Index(reference)
    found = [index.find(cell) for cell in learner]
    return [cell.id if cell else "" for cell in found]


def merge(reference: list[Cell], learner: list[Cell]) -> Merged:
    """Return the reference chapter with the learner's exercise cells, and any cells they added, merged in."""
    index = _Index(reference)
    answers, own, notes = _sort_cells(index, learner)
    merged = Merged([], notes)
    count = 0

    def add_own(sources: list[str]) -> None:
        nonlocal count
        for source in sources:
            count += 1
            merged.pieces.append(Piece("own", f"own-{count}", source))

    add_own(own.get("", []))
    for cell in reference:
        if cell.kind == "code":
            role, number = role_of(cell)
            if role == "exercise":
                sources = answers.get(number) or _by_name(cell, learner)
                if not sources:
                    merged.missing[number] = _why_missing(index, cell, learner)
                for place, source in enumerate(sources, 1):
                    id = cell.id if place == len(sources) else f"{cell.id}-part-{place}"
                    merged.pieces.append(Piece("exercise", id, source, number, cell))
            else:
                merged.pieces.append(Piece(role, cell.id, cell.source, number, cell))
        add_own(own.get(cell.id, []))
    return merged


def _sort_cells(index: _Index, learner: list[Cell]) -> tuple[dict, dict, list[str]]:
    """Return the learner's answers by exercise, their other cells by the reference cell that they follow, and notes."""
    answers: dict[str, list[str]] = {}
    late: dict[str, list[str]] = {}  # answers below their check, only used if there are no others
    own: dict[str, list[str]] = {}
    notes: list[str] = []
    checked: set[str] = set()
    last = ""
    for cell in learner:
        found = index.find(cell)
        if found is not None:
            last = found.id
        if cell.kind != "code" or not cell.source.strip():
            continue
        if found is None or found.kind != "code":
            own.setdefault(last, []).append(cell.source)
            continue
        role, number = role_of(found)
        if role == "exercise":
            (late if number in checked else answers).setdefault(number, []).append(cell.source)
        elif role == "check":
            checked.add(number)
            if _plain(cell.source) != _plain(found.source):
                notes.append(f"The check cell of exercise {number} was changed; the course's own was run.")
        elif _plain(cell.source) != _plain(found.source):
            own.setdefault(last, []).append(cell.source)
    for number, sources in late.items():
        answers.setdefault(number, sources)
    for number, sources in answers.items():
        written = [source for source in sources if not is_stub(source, number)]
        answers[number] = written or sources[-1:]
    return answers, own, notes


def _by_name(reference: Cell, learner: list[Cell]) -> list[str]:
    """Return the source of the last cell that defines one of an exercise's names, in a list, or [] if none does.

    It's needed if the learner merged the exercise's cell into a different cell.
    """
    wanted = names_in(reference.source)
    return [cell.source for cell in learner if cell.kind == "code" and wanted & names_in(cell.source)][-1:]


def _why_missing(index: _Index, reference: Cell, learner: list[Cell]) -> str:
    for cell in learner:
        if cell.kind != "code" and index.find(cell) is reference:
            return f"Its cell is a {cell.kind} cell; turn it back into a code cell."
        if cell.kind == "code" and index.find(cell) is reference:
            return "Its cell is empty."
    names = ", ".join(sorted(names_in(reference.source)))
    return f"Its cell is missing from the notebook; add a code cell that defines {names}."
