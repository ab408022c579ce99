"""Carry a learner's answers over when the course has renumbered their exercises, or merged them.

We recognize an exercise by the classes and functions that it asks for, including the functions' arguments. If the old
and the new version of the course ask for the same ones under different numbers, the learner's definitions go into the
new exercise, along with everything else in their cells. RENAMED lists the functions that the course has renamed. An
answer that defines one is carried over under the new name. REWORDED lists the functions of which the course
has renamed an argument, or of which it doesn't pass an optional one anymore. Their answers stay as they are. If the
learner has written something in the new exercise already, the old answer goes into a cell above it.

Before any answer moves, the plan is written to `.tplab/moving.json`, so that an update that was killed can finish the
next time.

    {"S.2": {"was": ["2.2"], "whole": true, "source": "def column_product(x, a_shard): ..."}}
"""

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

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
class Moves:
    """The answers that an update has to move.

    changed:  exercises whose number now belongs to a different task
    sources:  exercise -> its new cell, in which the learner's answers from other numbers are already filled in
    was:      exercise -> the numbers that these answers had before
    whole:    those of these exercises for which the learner has written everything that they ask for now
    carried:  the sources of the learner's cells whose whole text is in `sources`, or none if a notebook that may have
              to receive them can't be read
    """

    changed: set[str]
    sources: dict[str, str]
    was: dict[str, list[str]]
    whole: set[str] = field(default_factory=set)
    carried: set[str] = field(default_factory=set)


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
    found = Moves(changed, {}, {})
    for number in new:
        wanted = new[number].values() if old.get(number) != new[number] else ()
        moved = [answers[each] for each in wanted if each in answers and answers[each][1] in changed]
        filled = _filled(stubs[number], {name: renamed(source) for name, _, source in moved}) if moved else ""
        if filled:
            found.carried |= set() if unreadable else {source for _, _, source in moved}
            found.sources[number] = filled
            found.was[number] = sorted({exercise for _, exercise, _ in moved}, key=place)
            found.whole |= {number} if len(moved) == len(wanted) else set()
    _remember(course, found)
    return found


def fill_in(course: Course, pages: Iterable[ChapterFiles], moves: Moves) -> list[str]:
    """Put the moved answers into the exercises that they answer now, and return sentences about them."""
    told = []
    left = dict(moves.sources)
    for page in pages:
        try:
            notebook = load_notebook(page.learner)
            stubs = {cell.marks.get("exercise"): cell.source for cell in read_notebook(page.base)}
        except Unreadable:
            continue
        before = as_text(notebook)
        filled = [
            number
            for number in moves.sources
            if number in stubs and put_answer(notebook, number, moves.sources[number], stubs[number])
        ]
        if as_text(notebook) != before:
            replace(page.learner, as_text(notebook).encode())
        for number in filled:
            left.pop(number, None)
            told.append(_where_it_is(moves.was[number], number, page.learner.name))
    _store(course, Moves(moves.changed, left, moves.was, moves.whole))
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


def _remember(course: Course, found: Moves) -> None:
    path = course.memory / PLAN
    try:
        for number, move in json.loads(path.read_text(encoding="utf-8")).items():
            found.sources.setdefault(number, str(move["source"]))
            found.was.setdefault(number, [str(each) for each in move["was"]])
            found.whole |= {number} if move["whole"] else set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # no earlier update left anything behind
    _store(course, found)


def _store(course: Course, found: Moves) -> None:
    path = course.memory / PLAN
    if not found.sources:
        path.unlink(missing_ok=True)
    else:
        moving = {
            number: {"was": found.was[number], "whole": number in found.whole, "source": source}
            for number, source in found.sources.items()
        }
        replace(path, json.dumps(moving, indent=1).encode())


def _filled(stub: str, sources: dict[str, str]) -> str:
    """Return the new cell with the learner's definitions of these names in place of its own, or "" on a syntax error.

    No line of the learner's cells is lost. What follows a definition still follows it, and what comes before all of
    them goes to the top.
    """
    lines = stub.split("\n")
    tops: list[str] = []
    try:
        texts: dict[str, str] = {}
        for source in dict.fromkeys(sources.values()):
            top, parts = _split(source, {name for name in sources if sources[name] == source})
            tops += [top] if top else []
            texts |= parts
        for node in reversed([node for node in parse_code(stub).body if getattr(node, "name", "") in sources]):
            lines[_first(node) - 1 : node.end_lineno] = texts[node.name].split("\n")  # type: ignore[attr-defined]
    except SyntaxError:
        return ""
    return "\n\n\n".join([*tops, "\n".join(lines)])


def _split(source: str, names: set[str]) -> tuple[str, dict[str, str]]:
    """Split a cell above the last definition of each name. Return the text above all of them, and each one's text.

    Raises SyntaxError if the cell can't be parsed, or if its lines aren't those of its Python code.
    """
    lines = source.split("\n")
    starts: dict[str, int] = {}
    end = 0
    for node in parse_code(source).body:
        start = _first(node) - 1
        named = isinstance(node, DEFINITIONS) and node.name in names
        if named and not lines[start].lstrip().startswith(("def", "async", "class", "@")):
            raise SyntaxError(f"line {start + 1} isn't the one that IPython runs as line {start + 1}")
        while start > end and lines[start - 1].startswith("#"):
            start -= 1
        end = node.end_lineno or end
        starts |= {node.name: start} if named else {}  # type: ignore[attr-defined]
    if starts.keys() != names:
        raise SyntaxError(f"the cell doesn't define {names - starts.keys()}")
    order = sorted(starts, key=starts.__getitem__)
    ends = [*(starts[name] for name in order[1:]), len(lines)]
    parts = {name: "\n".join(lines[starts[name] : end]).rstrip() for name, end in zip(order, ends, strict=True)}
    return "\n".join(lines[: starts[order[0]]]).strip("\n").rstrip(), parts


def _first(node: ast.AST) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])  # type: ignore[attr-defined]
