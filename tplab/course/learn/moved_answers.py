"""Carry a learner's answers over when the course has renumbered their exercises, or merged them.

We recognize an exercise by the classes and functions that it asks for, including the functions' arguments. If the old
and the new version of the course ask for the same ones under different numbers, the learner's whole cells go into the
new exercise, in place of its own definitions. RENAMED lists the functions that the course has renamed. An answer that
defines one is carried over under the new name. If only arguments have changed, the answer stays where it is. If the
learner has written something in the new exercise already, the old answer goes into a cell above it.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tplab.course.grade.answers import is_stub, names_in
from tplab.course.learn.course_files import ChapterFiles
from tplab.course.learn.update_notebook import put_answer
from tplab.course.notebooks.cells import Cell, Unreadable, parse_cells, read_notebook
from tplab.course.notebooks.numbering import place
from tplab.course.notebooks.source import DEFINITIONS, parse_code

RENAMED = {
    "init_from_master": "init_shard",
    "one_f_one_b": "schedule",
}  # names that exercises ask for: old name -> new name
Asked = dict[str, dict[str, str]]  # exercise -> {name that it asks for: that name with its arguments}


@dataclass
class Moves:
    """The answers that an update has to move.

    changed:  exercises whose number now belongs to a different task
    anew:     these, and exercises whose functions have different arguments now, which have to be checked again
    filled:   exercise of the new version -> its cell with the learner's cells filled in, and their old numbers
    carried:  the sources of the learner's cells whose whole text is in `filled`, or none if a notebook that may have
              to receive them can't be read
    """

    changed: set[str]
    anew: set[str]
    filled: dict[str, tuple[str, list[str]]]
    carried: set[str]

    def go_to(self, blank: dict) -> bool:
        """Return whether a new blank chapter gets some of the answers."""
        return not self.filled.keys().isdisjoint(_exercises(parse_cells(blank)))


def plan(pages: Iterable[ChapterFiles], blanks: Iterable[dict]) -> Moves:
    """Find the answers that have to move.

    pages:  the pages that the learner had before the update
    blanks: the new blank chapters, as JSON
    """
    old: Asked = {}
    unreadable = False
    answers: dict[str, tuple[str, str, str]] = {}  # name with arguments -> name, the exercise it answers, and the cell
    for page in pages:
        try:
            base = read_notebook(page.base) if page.base.exists() else []
            mine = read_notebook(page.learner)
        except Unreadable:
            unreadable = True  # the update reports this
            continue
        old |= {number: _definitions(stub) for number, stub in _exercises(base).items()}
        for cell in mine:
            number = str(cell.marks.get("exercise", ""))
            if number in old and not is_stub(cell.source, number):
                there = names_in(cell.source)
                answers |= {
                    renamed(as_): (renamed(name), number, cell.source)
                    for name, as_ in old[number].items()
                    if name in there
                }
    stubs = {number: stub for blank in blanks for number, stub in _exercises(parse_cells(blank)).items()}
    new: Asked = {number: _definitions(stub) for number, stub in stubs.items()}
    changed = {number for number in old if old[number].keys() != new.get(number, {}).keys()}
    found = Moves(changed, {number for number in old if old[number] != new.get(number)}, {}, set())
    for number in new:
        wanted = new[number].values() if number in changed or number not in old else ()
        moved = [answers[each] for each in wanted if each in answers and answers[each][1] in changed]
        if moved:
            was = sorted({exercise for _, exercise, _ in moved}, key=place)
            sources = list(dict.fromkeys(source for _, _, source in sorted(moved, key=lambda one: place(one[1]))))
            found.carried |= set() if unreadable else {*sources}
            text = _filled(stubs[number], {name for name, _, _ in moved}, list(map(renamed, sources)))
            found.filled[number] = text, was
    return found


def fill_in(notebook: dict, blank: dict, moves: Moves, file: str) -> list[str]:
    """Put the moved answers into the exercises of a notebook, in place, and return sentences about them.

    blank: the same page as the course made it
    file:  the notebook's name
    """
    stubs = _exercises(parse_cells(blank))
    told = []
    for number, (source, was) in moves.filled.items():
        if number in stubs and put_answer(notebook, number, source, stubs[number]):
            told.append(f"Exercise {number} in {file} now has your answer to {' and '.join(was)}.")
    return told


def renamed(source: str) -> str:
    """Return an answer's source with the new names of functions that the course has renamed."""
    for old, new in RENAMED.items():
        source = re.sub(rf"\b{old}\b", new, source)
    return source


def _exercises(cells: list[Cell]) -> dict[str, str]:
    return {str(cell.marks["exercise"]): cell.source for cell in cells if "exercise" in cell.marks}


def _definitions(source: str) -> dict[str, str]:
    """Return what a cell defines: {"shard": "shard(tensor, dim, rank, world_size)", "Layer": "Layer"}."""
    return {
        node.name: node.name if isinstance(node, ast.ClassDef) else f"{node.name}({ast.unparse(node.args)})"
        for node in ast.parse(source).body
        if isinstance(node, DEFINITIONS)
    }


def _filled(stub: str, names: set[str], sources: list[str]) -> str:
    """Return the learner's cells, followed by the new cell without its own definitions of these names."""
    lines = stub.split("\n")
    for node in reversed(parse_code(stub).body):
        if isinstance(node, DEFINITIONS) and node.name in names:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            end = node.end_lineno or first
            while end < len(lines) and not lines[end].strip():
                end += 1
            del lines[first - 1 : end]
    return "\n\n\n".join(filter(None, [*sources, "\n".join(lines).rstrip()]))
