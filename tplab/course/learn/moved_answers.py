"""Carry a learner's answers over when the course has renumbered their exercises, or merged them.

We recognize an exercise by the classes and functions that it asks for, including the functions' arguments. If the old
and the new version of the course ask for the same ones under different numbers, the learner's whole cells go into the
new exercise, in place of its own definitions. RENAMED lists the functions that the course has renamed. An answer that
defines one is carried over under the new name. REWORDED lists the functions of which the course has renamed an
argument, or of which it doesn't pass an optional one anymore. Their answers stay as they are. If the learner has
written something in the new exercise already, the old answer goes into a cell above it.

Before any answer moves, the plan is written to `.tplab/moving.json`, so that an update that was killed can finish the
next time.

    {"S.2": {"was": ["2.2"], "whole": true, "source": "def column_product(x, a_shard): ..."}}
"""

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from tplab.common.files import replace
from tplab.course.grade.answers import is_stub, names_in
from tplab.course.learn.course_files import ChapterFiles, Course
from tplab.course.learn.update_notebook import as_text, put_answer
from tplab.course.notebooks.cells import Unreadable, load_notebook, parse_cells, read_notebook
from tplab.course.notebooks.numbering import place
from tplab.course.notebooks.source import DEFINITIONS, parse_code

PLAN = "moving.json"
RENAMED = {
    "init_from_master": "init_shard",
    "one_f_one_b": "schedule",
}  # names that exercises ask for: old name -> new name
REWORDED = {  # functions of which the course has only renamed arguments, or doesn't pass one anymore
    "scatter(out: torch.Tensor, parts: list[torch.Tensor] | None, src: int)": (
        "scatter(out: torch.Tensor, chunks: list[torch.Tensor] | None, src: int)"
    ),
    "ring_all_gather(part: torch.Tensor)": "ring_all_gather(chunk: torch.Tensor)",
    "vocab_parallel_loss(logits, target, *, vocab_size, ignore_index=-100, label_smoothing=0.0, group=None)": (
        "vocab_parallel_loss(logits, target, *, vocab_size, ignore_index=-100, group=None)"
    ),
}
Asked = dict[str, dict[str, str]]  # exercise -> {name that it asks for: that name with its arguments}


@dataclass
class Move:
    """What an exercise of the new version gets from the learner's answers.

    source:  its new cell, with the learner's cells filled in
    was:     the numbers that these answers had before
    whole:   whether the learner has written everything that the exercise asks for now
    """

    source: str
    was: list[str]
    whole: bool


@dataclass
class Moves:
    """The answers that an update has to move.

    changed:  exercises whose number now belongs to a different task
    filled:   exercise of the new version -> what it gets
    carried:  the sources of the learner's cells whose whole text is in `filled`, or none if a notebook that may have
              to receive them can't be read
    """

    changed: set[str]
    filled: dict[str, Move]
    carried: set[str]


def plan(course: Course, pages: Iterable[ChapterFiles], blanks: dict[str, bytes]) -> Moves:
    """Find, store and return the answers that have to move, including what an earlier, unfinished update left behind.

    pages:  the pages that the learner had before the update
    blanks: the new blank chapters, by file name without the suffix
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
        old |= _asked(base)
        for cell in mine:
            number = str(cell.marks.get("exercise", ""))
            if number in old and not is_stub(cell.source, number):
                there = names_in(cell.source)
                answers |= {
                    renamed(as_): (renamed(name), number, cell.source)
                    for name, as_ in old[number].items()
                    if name in there
                }
    stubs = {
        str(cell.marks["exercise"]): cell.source
        for text in blanks.values()
        for cell in parse_cells(json.loads(text))
        if "exercise" in cell.marks
    }
    new: Asked = {number: _definitions(stub) for number, stub in stubs.items()}
    changed = {number for number in old if old[number] != new.get(number)}
    found = Moves(changed, {}, set())
    for number in new:
        wanted = new[number].values() if old.get(number) != new[number] else ()
        moved = [answers[each] for each in wanted if each in answers and answers[each][1] in changed]
        if moved:
            was = sorted({exercise for _, exercise, _ in moved}, key=place)
            sources = list(dict.fromkeys(source for _, _, source in sorted(moved, key=lambda one: place(one[1]))))
            found.carried |= set() if unreadable else {*sources}
            text = _filled(stubs[number], {name for name, _, _ in moved}, list(map(renamed, sources)))
            found.filled[number] = Move(text, was, len(moved) == len(wanted))
    found.filled = _left_behind(course) | found.filled
    _store(course, found.filled)
    return found


def fill_in(course: Course, pages: Iterable[ChapterFiles], moves: Moves) -> list[str]:
    """Put the moved answers into the exercises that they answer now, and return sentences about them."""
    told = []
    left = dict(moves.filled)
    for page in pages:
        try:
            notebook = load_notebook(page.learner)
            stubs = {cell.marks.get("exercise"): cell.source for cell in read_notebook(page.base)}
        except Unreadable:
            continue
        before = as_text(notebook)
        filled = [
            number
            for number, move in moves.filled.items()
            if number in stubs and put_answer(notebook, number, move.source, stubs[number])
        ]
        if as_text(notebook) != before:
            replace(page.learner, as_text(notebook).encode())
        for number in filled:
            left.pop(number, None)
            told.append(_where_it_is(moves.filled[number].was, number, page.learner.name))
    _store(course, left)
    return told


def _where_it_is(was: list[str], number: str, file: str) -> str:
    if was == [number]:
        return f"Exercise {number} in {file} has changed. Your answer is in its new version."
    answer, verb = ("answer", "is") if len(was) == 1 else ("answers", "are")
    return f"Your {answer} to {' and '.join(was)} {verb} now in exercise {number} in {file}."


def renamed(source: str) -> str:
    """Return an answer's source with the new names of functions that the course has renamed."""
    for old, new in RENAMED.items():
        source = re.sub(rf"\b{old}\b", new, source)
    return source


def _asked(cells: list) -> Asked:
    return {str(cell.marks["exercise"]): _definitions(cell.source) for cell in cells if "exercise" in cell.marks}


def _definitions(source: str) -> dict[str, str]:
    """Return what a cell defines: {"shard": "shard(tensor, dim, rank, world_size)", "Layer": "Layer"}."""
    found = {
        node.name: node.name if isinstance(node, ast.ClassDef) else f"{node.name}({ast.unparse(node.args)})"
        for node in ast.parse(source).body
        if isinstance(node, DEFINITIONS)
    }
    return {name: REWORDED.get(asked, asked) for name, asked in found.items()}


def _left_behind(course: Course) -> dict[str, Move]:
    """Return what an earlier update planned but didn't finish."""
    try:
        stored = json.loads((course.memory / PLAN).read_text(encoding="utf-8"))
        return {number: Move(str(raw["source"]), list(raw["was"]), raw["whole"]) for number, raw in stored.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _store(course: Course, filled: dict[str, Move]) -> None:
    path = course.memory / PLAN
    if filled:
        stored = {number: asdict(move) for number, move in filled.items()}
        replace(path, json.dumps(stored, indent=1).encode())
    else:
        path.unlink(missing_ok=True)


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
