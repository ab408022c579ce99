"""The learner's library: a package `my_tp` in their folder that grows by each exercise they pass.

    my_tp/linear.py     chapter 04: ColumnParallelLinear and RowParallelLinear, in the learner's words

Each module holds the answers to the exercises of one chapter. An answer that isn't written yet, but that another one
uses, is borrowed from the course when the module is imported. The modules are generated from `.tplab/library.json`; one
that the learner edited by hand is copied to kept/ before it is written again.
"""

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tplab.common.files import locked, replace
from tplab.course.grading.cell_dependencies import select
from tplab.course.grading.merge import merge
from tplab.course.learner.course_files import Course, all_chapters, chapter
from tplab.course.learner.passages import Passage, extract
from tplab.course.learner.pristine import keep
from tplab.course.notebooks.cells import Cell, read_notebook
from tplab.course.notebooks.source import passed_names

PACKAGE = "my_tp"
STORE = "library.json"
MODULES = (
    "memory", "collectives", "splitting", "mappings", "linear", "mlp", "attention", "embedding", "cross_entropy",
    "randomness", "transformer", "cost", "sequence", "pipeline", "data_parallel", "training",
)  # fmt: skip

# Names that later chapters import from tplab, and the exercises whose answers can take their place there
ANSWERS_FOR = {
    "ColumnParallelLinear": "4.1",
    "RowParallelLinear": "4.2",
    "VocabParallelEmbedding": "7.3",
    "parallel_logits": "7.4",
    "pad_vocab_size": "7.1",
}


@dataclass(frozen=True)
class Written:
    """A passed answer: its code, and when it passed."""

    passage: Passage
    passed: str


@dataclass(frozen=True)
class Module:
    """A module of the library, as `tplab mine` shows it.

    lines:     of the learner's code, without blank lines
    written:   the exercises whose answers are in it
    borrowed:  exercise -> the names that it borrows from the course
    edited:    whether the file isn't what was written, so that its code isn't what was checked
    """

    name: str
    chapter: int
    lines: int
    written: list[str]
    borrowed: dict[str, list[str]]
    edited: bool


def chapter_number(exercise: str) -> int:
    return int(exercise.partition(".")[0])


def in_order(exercises: Iterable[str]) -> list[str]:
    return sorted(exercises, key=lambda exercise: tuple(map(int, exercise.split("."))))


def load(course: Course) -> dict[str, Written]:
    """Return the passed answers by exercise. A missing or damaged store counts as empty; passing again restores it."""
    try:
        stored = json.loads((course.memory / STORE).read_text(encoding="utf-8"))["exercises"]
        return {number: Written(Passage(**raw["passage"]), str(raw["passed"])) for number, raw in stored.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def add_passed(course: Course, reference: list[Cell], learner: list[Cell], exercises: list[str]) -> list[str]:
    """Put the answers to passed exercises into the library. Returns those that are new or changed. Raises OSError."""
    merged = merge(reference, learner)
    now = time.strftime("%Y-%m-%d %H:%M")
    changed = []
    with locked(course.memory / "library.lock"):
        written = load(course)
        for number in exercises:
            passage = extract(number, select(merged, [number], whole=False))
            if number not in written or written[number].passage != passage:
                written[number] = Written(passage, now)
                changed.append(number)
        if changed:
            _store(course, written)
        write(course, written)
    return changed


def _store(course: Course, written: dict[str, Written]) -> None:
    stored = {number: asdict(written[number]) for number in in_order(written)}
    replace(course.memory / STORE, json.dumps({"exercises": stored}, indent=1).encode())


def write(course: Course, written: dict[str, Written]) -> None:
    """Write the modules. One that was edited by hand is copied to kept/ first. Raises OSError."""
    folder = course.folder / PACKAGE
    folder.mkdir(exist_ok=True)
    texts = {f"{MODULES[number]}.py": text_of(number, course, written) for number in _begun(written)}
    texts["__init__.py"] = _package_text(written)
    ours = _hashes(course)
    for name, text in texts.items():
        path, data = folder / name, text.encode()
        there = path.read_bytes() if path.exists() else None
        if there == data:
            continue
        if there is not None and _hash(there) != ours.get(name):
            keep(path, there, course.folder)
        replace(path, data)
        ours[name] = _hash(data)
        replace(course.memory / "library_files.json", json.dumps(ours).encode())


def _hashes(course: Course) -> dict[str, str]:
    """Return the hash of each module as it was last written."""
    try:
        stored = json.loads((course.memory / "library_files.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _begun(written: Iterable[str]) -> list[int]:
    """Return the chapters that have a passed exercise."""
    return sorted({chapter_number(number) for number in written})


def names_of(course: Course, number: int) -> dict[str, list[str]]:
    """Return the names that each exercise of a chapter is checked by: {"4.3": ["shard", "unshard"]}."""
    cells = read_notebook(chapter(course, number).reference)
    return {cell.marks["check"]: passed_names(cell.source) for cell in cells if "check" in cell.marks}


def borrowed(course: Course, number: int, written: dict[str, Written]) -> dict[str, list[str]]:
    """Return the exercises of a chapter that passed answers use but that aren't passed, with the names they use."""
    used = {
        name for exercise in written if chapter_number(exercise) == number for name in written[exercise].passage.used
    }
    found = {
        exercise: [name for name in names if name in used]
        for exercise, names in names_of(course, number).items()
        if exercise not in written
    }
    return {exercise: names for exercise, names in found.items() if names}


def text_of(number: int, course: Course, written: dict[str, Written]) -> str:
    """Return the text of a chapter's module."""
    mine = {exercise: written[exercise].passage for exercise in in_order(written) if chapter_number(exercise) == number}
    title = all_chapters(course)[number].title(read_notebook(chapter(course, number).reference))
    lacking = borrowed(course, number, written)
    imports = [text for passage in mine.values() for text in passage.imports]
    imports += ["from tplab.course.learner.borrow import borrow"] if lacking else []
    heading = f'"""Chapter {number:02d}, {title}: written by me, and checked on real ranks."""'
    parts = ["\n\n".join([heading, *_imports(imports, number, written)])]
    for exercise, names in lacking.items():
        comment = f"# Borrowed from the course until exercise {exercise} passes"
        parts.append("\n".join([comment, *(f'{name} = borrow("{exercise}", "{name}")' for name in names)]))
    seen: set[str] = set()
    for exercise, passage in mine.items():
        for helper in passage.helpers:
            if helper not in seen:
                seen.add(helper)
                parts.append(helper)
        parts += [f"# Exercise {exercise}, passed on {written[exercise].passed}", *passage.code]
    return "\n\n\n".join(parts) + "\n"


def _imports(statements: Iterable[str], number: int, written: dict[str, Written]) -> list[str]:
    """Return the import block. Earlier answers take the place of what their chapters import from tplab."""
    blocks: list[set[str]] = [set(), set(), set(), set()]  # __future__, others, the learner's, the course's
    for text in statements:
        imported = text.rpartition("import ")[2]
        exercise = ANSWERS_FOR.get(imported)
        if text.startswith("from __future__"):
            blocks[0].add(text)
        elif not text.startswith(("from tplab", "import tplab")):
            blocks[1].add(text)
        elif exercise in written and chapter_number(exercise) < number:
            blocks[2].add(f"from .{MODULES[chapter_number(exercise)]} import {imported}")
        else:
            blocks[3].add(text)
    text = "\n\n".join("\n".join(_joined(block)) for block in blocks if block)
    return [text] if text else []


def _joined(statements: set[str]) -> list[str]:
    """Return the import statements with one line for each module that names are imported from."""
    plain = sorted(text for text in statements if text.startswith("import"))
    names: dict[str, list[str]] = {}
    for text in sorted(statements - {*plain}):
        module, _, name = text.removeprefix("from ").partition(" import ")
        names.setdefault(module, []).append(name)
    return [*plain, *(f"from {module} import {', '.join(found)}" for module, found in names.items())]


def _package_text(written: dict[str, Written]) -> str:
    lines = ['"""My own library for tensor parallelism, which grows with each exercise that I pass.', ""]
    for number in _begun(written):
        exercises = [exercise for exercise in in_order(written) if chapter_number(exercise) == number]
        lines.append(f"{MODULES[number]:<15} exercises {', '.join(exercises)}")
    return "\n".join([*lines, '"""', ""])


def modules(course: Course) -> list[Module]:
    """Return what the library holds, in the order of the chapters."""
    written, ours = load(course), _hashes(course)
    found = []
    for number in _begun(written):
        name = f"{MODULES[number]}.py"
        path = course.folder / PACKAGE / name
        passages = [written[exercise].passage for exercise in written if chapter_number(exercise) == number]
        lines = [
            line for passage in passages for text in [*passage.helpers, *passage.code] for line in text.split("\n")
        ]
        found.append(
            Module(
                name=name,
                chapter=number,
                lines=sum(bool(line.strip()) for line in lines),
                written=[exercise for exercise in in_order(written) if chapter_number(exercise) == number],
                borrowed=borrowed(course, number, written),
                edited=not path.exists() or _hash(path.read_bytes()) != ours.get(name),
            )
        )
    return found


def path_of(course: Course, exercise: str) -> Path:
    """Return the module that an exercise's answer is written to."""
    return course.folder / PACKAGE / f"{MODULES[chapter_number(exercise)]}.py"
