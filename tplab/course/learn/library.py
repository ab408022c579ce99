"""The learner's library, a package `my_tp` in their folder that grows with each exercise they pass.

    my_tp/linear.py     chapter 04: ColumnParallelLinear and RowParallelLinear, as the learner wrote them
    train.py            trains a GPT with the package, even on machines without tplab

Each module contains the answers to the exercises of one chapter (my_tp.py writes their text). If an answer uses one of
an earlier chapter that isn't written yet, the library borrows that one from tplab. The files are generated from
`.tplab/library.json`. If the learner has edited one by hand, it's copied to kept/ before it's generated again.
"""

import hashlib
import json
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tplab.common.files import locked, replace
from tplab.course.grade.answers import merge
from tplab.course.learn.course_files import Course
from tplab.course.learn.given_code import PACKAGE, TEMPLATES
from tplab.course.learn.my_tp import Module, chapters_of, files, is_enough_to_train, module_name, modules_of
from tplab.course.learn.passages import Passage, extract_from
from tplab.course.learn.pristine import keep
from tplab.course.notebooks.cells import Cell
from tplab.course.notebooks.numbering import chapter_of, place

STORE = "library.json"
HASHES = "library_files.json"
SCRIPT = "train.py"


@dataclass(frozen=True)
class Written:
    """A passed answer: its code, with the imports and helpers that it uses, and the time when it passed."""

    passage: Passage
    passed: str


def load(course: Course) -> dict[str, Written]:
    """Return the passed answers by exercise. A missing or damaged store counts as empty until answers pass again."""
    try:
        stored = json.loads((course.memory / STORE).read_text(encoding="utf-8"))["exercises"]
        return {number: Written(Passage(**raw["passage"]), raw["passed"]) for number, raw in stored.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def add_passed(
    course: Course, reference: list[Cell], learner: list[Cell], exercises: list[str]
) -> tuple[list[str], list[str]]:
    """Add the answers to exercises that passed `tplab check` to the library. See `add`.

    Returns the exercises whose answers are new or have changed, and a sentence about each answer that can't be added.
    """
    merged = merge(reference, learner)
    passages, refused = {}, []
    for number in exercises:
        try:
            passages[number] = extract_from(merged, number)
        except SyntaxError as error:
            refused.append(f"Your answer to {number} can't go into your library: {error}")
    return add(course, passages), refused


def add(course: Course, passages: dict[str, Passage]) -> list[str]:
    """Add passed answers to the library, and return the exercises whose answers are new or have changed in it.

    An answer that uses one of the same chapter waits until that one has passed. Raises OSError if the library can't be
    written.
    """
    now = time.strftime("%Y-%m-%d %H:%M")
    with locked(course.memory / "library.lock"):
        written = load(course)
        if not written:  # the package may have the only copy of answers, so its files count as edited by hand
            (course.memory / HASHES).unlink(missing_ok=True)
        new = {
            number: Written(passage, now)
            for number, passage in passages.items()
            if number not in written or written[number].passage != passage
        }
        if new:
            _store(course, written | new)
        package = write(course, written | new)
    return [exercise for module in package for exercise in module.answers if exercise in new]


def forget(course: Course, exercises: Collection[str]) -> list[int]:
    """Take the answers to exercises that now ask for something else out of the library, with their whole chapters.

    The other answers of these chapters may use them. The files stay as they are until an answer passes again. Returns
    the numbers of the chapters. Raises OSError if the library can't be written.
    """
    with locked(course.memory / "library.lock"):
        written = load(course)
        chapters = chapters_of(written.keys() & {*exercises})
        if chapters:
            _store(course, {number: one for number, one in written.items() if chapter_of(number) not in chapters})
    return chapters


def _store(course: Course, written: dict[str, Written]) -> None:
    stored = {number: asdict(written[number]) for number in sorted(written, key=place)}
    replace(course.memory / STORE, json.dumps({"exercises": stored}, indent=1).encode())


def write(course: Course, written: dict[str, Written]) -> list[Module]:
    """Write the files of the package, and return its modules. If a file was edited by hand, copy it to kept/ first.

    As soon as the package has everything that train.py needs, train.py is written, too. After that, the file belongs to
    the learner. Raises OSError if a file can't be written.
    """
    folder = course.folder / PACKAGE
    folder.mkdir(exist_ok=True)
    package = modules_of(course, {number: one.passage for number, one in written.items()})
    texts = files(course, package, {number: one.passed for number, one in written.items()})
    ours = _hashes(course)
    for name, text in texts.items():
        path, data = folder / name, text.encode()
        path.parent.mkdir(exist_ok=True)
        there = path.read_bytes() if path.exists() else None
        if there == data and _hash(data) == ours.get(name):
            continue
        if there not in (None, data) and _hash(there) != ours.get(name):
            keep(path, there, course.folder)
        replace(path, data)
        ours[name] = _hash(data)
        replace(course.memory / HASHES, json.dumps(ours).encode())
    script = course.folder / SCRIPT
    if not script.exists() and is_enough_to_train(package):
        replace(script, (TEMPLATES / SCRIPT).read_bytes())
    return package


def _hashes(course: Course) -> dict[str, str]:
    """Return the hash that each file of the package had when it was last written."""
    try:
        stored = json.loads((course.memory / HASHES).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def modules(course: Course) -> list[Module]:
    """Return the modules of the library that contain the learner's answers, in the order of the chapters."""
    return modules_of(course, {number: one.passage for number, one in load(course).items()})


def waiting(course: Course, modules: Iterable[Module]) -> list[str]:
    """Return the exercises whose answers have passed, but use an answer of the same chapter that hasn't."""
    there = {exercise for module in modules for exercise in module.answers}
    return sorted(load(course).keys() - there, key=place)


def edited(course: Course) -> list[str]:
    """Return the names of the modules that were edited since they were written, so they may not be what was checked."""
    ours, folder = _hashes(course), course.folder / PACKAGE
    paths = [folder / module_name(number) for number in chapters_of(load(course))]
    return [path.name for path in paths if path.exists() and _hash(path.read_bytes()) != ours.get(path.name)]


def path_of(course: Course, exercise: str) -> Path:
    """Return the path of the module that the answer to an exercise is written to."""
    return course.folder / PACKAGE / module_name(chapter_of(exercise))
