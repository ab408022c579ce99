"""Make the learner's folder, and move into it what they did in chapters/ before the folder existed.

Nothing is lost if this is killed at any moment, because whatever is going to change is first copied to kept/ in the
learner's folder, and every file is replaced atomically. Running it again continues where it stopped.
"""

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import tplab
from tplab.common.files import locked, replace
from tplab.course.grade.answers import is_stub
from tplab.course.learn import library, moved_answers
from tplab.course.learn.course_files import MARKER, MEMORY, ChapterFiles, Course, Misuse, all_chapters
from tplab.course.learn.pristine import KEPT, first_state, keep
from tplab.course.learn.update_notebook import Changes, as_text, put_answer, update_notebook
from tplab.course.notebooks.cells import Unreadable, load_notebook, parse_cells, read_notebook
from tplab.course.notebooks.numbering import INDEX, argument
from tplab.course.notebooks.pictures import FOLDER as PICTURES
from tplab.course.notebooks.reference import SHIPPED

PAGES = ("how_close.md", "AGENTS.md")  # about rounding, and for the learner's AI assistant
LEFTOVERS = (".ipynb_checkpoints", "__pycache__", MEMORY)  # these may be in chapters/, but they aren't worth moving


@dataclass
class Report:
    """A report of what `start` or `update` did."""

    new: list[str] = field(default_factory=list)  # file names
    moved: list[str] = field(default_factory=list)  # sentences about work that was moved
    updated: dict[str, Changes] = field(default_factory=dict)  # file name -> what changed
    problems: list[str] = field(default_factory=list)  # sentences about what went wrong


def pages(course: Course) -> list[ChapterFiles]:
    """Return the files of the index, if there is one, and of every chapter."""
    index = ChapterFiles(course, INDEX)
    return [*([index] if index.blank.exists() else []), *all_chapters(course).values()]


def blank_of(files: ChapterFiles) -> bytes:
    """Return the blank chapter. If somebody may have edited it in the repository, it's rebuilt from its source."""
    data = files.blank.read_bytes()
    if files.course.material == SHIPPED or (files.base.exists() and files.base.read_bytes() == data):
        return data
    try:
        return first_state(files).encode()
    except Misuse:  # somebody is working on the course's own notebooks
        return data


def start(course: Course) -> Report:
    """Add every missing chapter to the learner's folder. Raises OSError if a file can't be read or written."""
    report = Report()
    course.memory.mkdir(parents=True, exist_ok=True)
    with locked(course.memory / "start.lock"):
        marker = course.memory / MARKER
        if not marker.exists():
            now = {"tplab": tplab.__version__, "started": time.strftime("%Y-%m-%d %H:%M")}
            replace(marker, json.dumps(now).encode())
        shared = course.material / "chapters"
        separate = course.material != SHIPPED and shared.resolve() != course.folder.resolve()
        for files in pages(course):
            blank = blank_of(files)
            if separate and files.blank.read_bytes() != blank:
                _move_in(files, blank, report)
            if not files.learner.exists():
                _begin(files, blank)
                report.new.append(files.learner.name)
        if separate:
            _move_the_rest(course, report)
        _bring_pictures(course)
        _bring_pages(course)
    return report


def _begin(files: ChapterFiles, blank: bytes, notebook: bytes | None = None) -> None:
    files.base.parent.mkdir(exist_ok=True)
    replace(files.base, blank)
    replace(files.course.folder / f"{files.stem}.ipynb", blank if notebook is None else notebook)


def _move_in(files: ChapterFiles, blank: bytes, report: Report) -> None:
    """Move the work that the learner did in the repository's blank chapter to their own notebook."""
    folder, data = files.course.folder, files.blank.read_bytes()
    copy = keep(files.blank, data, folder)
    where = f"chapters/{files.blank.name}"
    try:
        theirs = load_notebook(files.blank)
    except Unreadable as error:
        report.problems.append(f"{where} can't be read, so only a copy of it was made, {KEPT}/{copy.name}. {error}")
    else:
        new = json.loads(blank)
        if not files.learner.exists() or _is_untouched(files):
            _begin(files, blank, as_text(update_notebook(new, theirs, new)[0]).encode())
            report.moved.append(f"Your work in {where} is in {files.learner.name} now.")
        else:
            try:
                report.moved.append(_fill_in(files, blank, theirs, where, f"{KEPT}/{copy.name}"))
            except Unreadable as error:
                report.problems.append(f"Your work in {where} is kept as {KEPT}/{copy.name}. {error}")
    replace(files.blank, blank)


def _is_untouched(files: ChapterFiles) -> bool:
    try:
        return load_notebook(files.base)["cells"] == load_notebook(files.learner)["cells"]
    except Unreadable:
        return False


def _fill_in(files: ChapterFiles, blank: bytes, theirs: dict, where: str, copy: str) -> str:
    """Copy the answers that only `theirs` has into the learner's own notebook, and return sentences about them."""
    mine = load_notebook(files.learner)
    answers = {
        str(cell.marks["exercise"]): cell.source
        for cell in parse_cells(theirs)
        if "exercise" in cell.marks and not is_stub(cell.source, str(cell.marks["exercise"]))
    }
    first = read_notebook(files.base) if files.base.exists() else parse_cells(json.loads(blank))
    stubs = {str(cell.marks.get("exercise", "")): cell.source for cell in first}
    taken, left = [], []
    for cell in parse_cells(mine):
        number = str(cell.marks.get("exercise", ""))
        if number in answers and is_stub(cell.source, number):
            put_answer(mine, number, answers[number], stubs.get(number, ""))
            taken.append(number)
        elif number in answers and cell.source != answers[number]:
            left.append(number)
    if taken:
        keep(files.learner, files.learner.read_bytes(), files.course.folder)
        replace(files.learner, as_text(mine).encode())
    told = [f"Your answers to {', '.join(taken)} in {where} are in {files.learner.name} now."] if taken else []
    if left:
        told.append(f"Of {', '.join(left)}, you have another answer in {files.learner.name}, which stays.")
    return " ".join([*told, f"A copy of {where}, as it was, is {copy}."])


def _move_the_rest(course: Course, report: Report) -> None:
    """Move the learner's other files, and the data that commands stored, out of the repository's own folders."""
    shared = course.material / "chapters"
    known = {PICTURES, *PAGES, *(path.name for path in (course.material / "solutions").glob("*.ipynb"))}
    for path in sorted(shared.iterdir()):
        if path.name in LEFTOVERS or path.name in known:
            continue
        if path.name == KEPT and path.is_dir():
            for copy in sorted(path.iterdir()):
                _move(copy, course.folder / KEPT / copy.name)
            with suppress(OSError):
                path.rmdir()
            continue
        report.moved.append(f"chapters/{path.name} is {_move(path, course.folder / path.name)} now.")
    for memory in (shared / MEMORY, course.material / MEMORY):
        for name in ("progress.json", "hints.json"):
            if (memory / name).exists():
                _move(memory / name, course.memory / name)
        with suppress(OSError):
            shutil.rmtree(memory)


def _bring_pictures(course: Course) -> None:
    """Copy the pictures that the chapters show into the learner's folder, where the notebooks look for them."""
    for path in sorted((course.material / "chapters" / PICTURES).glob("*")):
        copy, data = course.folder / PICTURES / path.name, path.read_bytes()
        if not copy.exists() or copy.read_bytes() != data:
            copy.parent.mkdir(exist_ok=True)
            replace(copy, data)


def _bring_pages(course: Course) -> None:
    """Copy the pages that aren't notebooks into the learner's folder. A page that the learner changed stays theirs.

    The base is written last. If this is killed before that, the next run finds the new page and writes its base.
    """
    for page in PAGES:
        path, copy, base = (folder / page for folder in (course.material / "chapters", course.folder, course.bases))
        if not path.exists():
            continue
        new = path.read_bytes()
        unchanged = {new} | ({base.read_bytes()} if base.exists() else set())
        if not copy.exists() or copy.read_bytes() in unchanged:
            replace(copy, new)
            base.parent.mkdir(exist_ok=True)
            replace(base, new)


def _move(source: Path, target: Path) -> str:
    """Move a file or folder, and return its new name.

    The new name differs from the target's if there is already a different file or folder with that name.
    """
    if not _same(source, target):
        target = _free(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            copy = target.with_name(f".{target.name}-moving")
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(source, copy, symlinks=True)
            copy.rename(target)
        else:
            replace(target, source.read_bytes())
    shutil.rmtree(source) if source.is_dir() else source.unlink()
    return target.name


def _same(a: Path, b: Path) -> bool:
    """Return whether `b` already has all of `a`, as after an earlier move that was killed before it deleted `a`."""
    if a.is_dir() and b.is_dir():
        names = {path.name for path in a.iterdir()}
        return names <= {path.name for path in b.iterdir()} and all(_same(a / name, b / name) for name in names)
    return a.is_file() and b.is_file() and a.read_bytes() == b.read_bytes()


def _free(path: Path) -> Path:
    names = (path.with_name(f"{path.stem}-{count}{path.suffix}") for count in itertools.count(2))
    return path if not path.exists() else next(name for name in names if not name.exists())


def newer(course: Course) -> Iterator[ChapterFiles]:
    """Yield the pages whose version in the course differs from the one in the learner's notebook."""
    for files in pages(course):
        if not files.learner.exists() or not files.base.exists() or files.base.read_bytes() != blank_of(files):
            yield files


def update(course: Course) -> Report:
    """Bring newer chapters into the learner's notebooks. Raises OSError if a file can't be read or written."""
    there = [files for files in pages(course) if files.learner.exists()]
    report = start(course)
    with locked(course.memory / "start.lock"):
        blanks = {files.stem: blank_of(files) for files in pages(course)}
        moves = moved_answers.plan(course, there, blanks)
        for files in newer(course):
            path, blank = files.learner, blank_of(files)
            base = json.loads(files.base.read_bytes()) if files.base.exists() else None
            try:
                merged, changes = update_notebook(
                    base, load_notebook(path), json.loads(blank), moves.changed, moves.carried
                )
            except Unreadable as error:
                again = "" if files.stem == INDEX else f" To begin it anew: tplab reset {argument(files.number)}"
                report.problems.append(f"{path.name} was left as it is. {error}{again}")
                continue
            if changes:
                keep(path, path.read_bytes(), course.folder)
                replace(path, as_text(merged).encode())
                report.updated[path.name] = changes
            files.base.parent.mkdir(exist_ok=True)
            replace(files.base, blank)
        report.moved += moved_answers.fill_in(course, pages(course), moves)
        moved = {was[0]: number for number, was in moves.was.items() if len(was) == 1 and number in moves.whole}
        library.renumber(course, moved, moves.changed)
    return report
