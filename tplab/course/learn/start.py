"""Make the learner's folder, and move into it what they did in chapters/ before the folder existed.

Nothing is lost if this is killed at any moment, because whatever is going to change is first copied to kept/ in the
learner's folder, and every file is replaced atomically. Running it again continues where it stopped.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field

import tplab
from tplab.common.files import locked, replace
from tplab.course.learn import library, moved_answers
from tplab.course.learn.course_files import MARKER, ChapterFiles, Course, Misuse, all_chapters, has_exercises_of
from tplab.course.learn.pristine import KEPT, first_state, keep
from tplab.course.learn.update_notebook import Changes, as_text, update_notebook
from tplab.course.notebooks.cells import Unreadable, load_notebook
from tplab.course.notebooks.numbering import INDEX, argument
from tplab.course.notebooks.pictures import FOLDER as PICTURES
from tplab.course.notebooks.reference import SHIPPED

PAGES = ("how_close.md", "AGENTS.md")  # about rounding, and for the learner's AI assistant
RENAMED = {"start.ipynb": "00_start.ipynb"}  # pages that the course has renamed: old name -> new name
OTHERS = "Other files that you've put into chapters/ stay there. Move those that you need to your folder."


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
            replace(marker, json.dumps({"tplab": tplab.__version__}).encode())
        shared = course.material / "chapters"
        separate = course.material != SHIPPED and shared.resolve() != course.folder.resolve()
        _rename_pages(course, report)
        for files in pages(course):
            blank = blank_of(files)
            if separate and files.blank.read_bytes() != blank:
                _move_in(files, blank, report)
            if not files.learner.exists():
                _begin(files, blank)
                report.new.append(files.learner.name)
        _bring_pictures(course)
        _bring_pages(course)
    return report


def _rename_pages(course: Course, report: Report) -> None:
    """Give the learner's notebooks the names that their pages have now. Other notebooks keep theirs."""
    for old, new in RENAMED.items():
        before, now = course.folder / old, course.folder / new
        files = ChapterFiles(course, now.stem)
        if files.learner == before:
            before.rename(now)
            report.moved.append(
                f"{old} is now called {new}. If you have the old one open in JupyterLab, close it and open the new one."
            )
        elif now.exists() and before.exists() and has_exercises_of(files, before):
            report.moved.append(
                f"You have both {old} and {new}. The page is called {new} now, and the commands only look at that "
                f"file. Copy what you need from {old}, and then delete {old}."
            )


def _begin(files: ChapterFiles, blank: bytes, notebook: bytes | None = None) -> None:
    files.base.parent.mkdir(exist_ok=True)
    replace(files.base, blank)
    replace(files.course.folder / f"{files.stem}.ipynb", blank if notebook is None else notebook)


def _move_in(files: ChapterFiles, blank: bytes, report: Report) -> None:
    """Move the work that the learner did in the repository's blank chapter to their own notebook.

    If they've already written something in their own notebook, it stays, and the other work is only kept as a copy.
    """
    copy = keep(files.blank, files.blank.read_bytes(), files.course.folder)
    where = f"chapters/{files.blank.name}"
    try:
        theirs, new = load_notebook(files.blank), json.loads(blank)
        if not files.learner.exists() or load_notebook(files.base)["cells"] == load_notebook(files.learner)["cells"]:
            _begin(files, blank, as_text(update_notebook(new, theirs, new)[0]).encode())
            report.moved.append(f"Your work in {where} is in {files.learner.name} now. {OTHERS}")
        else:
            report.moved.append(
                f"You worked in {where} and in {files.learner.name}, which stays as it is. Your work in {where} is "
                f"kept as {KEPT}/{copy.name}. Copy what you need from it into {files.learner.name}."
            )
    except Unreadable as error:
        report.problems.append(f"Your work in {where} is kept as {KEPT}/{copy.name}. {error}")
    replace(files.blank, blank)


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
        unchanged = [new, base.read_bytes()] if base.exists() else [new]
        if not copy.exists() or copy.read_bytes() in unchanged:
            replace(copy, new)
            base.parent.mkdir(exist_ok=True)
            replace(base, new)


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
        moves = moved_answers.plan(there, map(json.loads, blanks.values()))
        if chapters := library.forget(course, moves.anew):
            numbers = " ".join(map(argument, chapters))
            report.moved.append(f"Exercises have changed. To have your answers in your library: tplab check {numbers}")
        # Pages that get answers from others come first. So if this is killed, no answer is only in kept/
        for files in sorted(pages(course), key=lambda files: not moves.go_to(json.loads(blanks[files.stem]))):
            _update_page(files, blanks[files.stem], moves, report)
    return report


def _update_page(files: ChapterFiles, blank: bytes, moves: moved_answers.Moves, report: Report) -> None:
    """Bring a new version of a chapter into the learner's notebook, and the answers that move there."""
    path, new = files.learner, json.loads(blank)
    before = files.base.read_bytes() if files.base.exists() else None
    try:
        mine = load_notebook(path)
    except Unreadable as error:
        if before != blank:
            again = "" if files.stem == INDEX else f" To begin it anew: tplab reset {argument(files.number)}"
            report.problems.append(f"{path.name} was left as it is. {error}{again}")
        return
    notebook = deepcopy(mine)
    if before != blank:
        base = json.loads(before) if before else None
        notebook, changes = update_notebook(base, mine, new, moves.changed, moves.carried)
        if notebook["cells"] != mine["cells"]:
            keep(path, path.read_bytes(), files.course.folder)
            report.updated[path.name] = changes
    report.moved += moved_answers.fill_in(notebook, new, moves, path.name)
    if notebook["cells"] != mine["cells"]:
        replace(path, as_text(notebook).encode())
    if before != blank:
        files.base.parent.mkdir(exist_ok=True)
        replace(files.base, blank)
