"""`tplab reset`: restore a chapter or one of its exercises to the original state. Your version is kept as a dated copy.

    tplab reset 4                  the full chapter, even if its notebook can no longer be read
    tplab reset --exercise 4.2     one exercise and its check; every other cell stays as it is

Copies go to chapters/kept/ and are never overwritten. The original state is rebuilt from the chapter's source.
"""

import argparse
import json
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tplab.common.files import replace
from tplab.course.grading.check_notebook import exercises_of
from tplab.course.notebooks.cells import Unreadable, read_notebook
from tplab.course.tools.confirm import agreed
from tplab.course.tools.course_files import (
    ChapterFiles,
    Misuse,
    add_root,
    chapter,
    chapter_of_exercise,
    no_such_exercise,
    root_of,
)
from tplab.course.tools.restore import restore

KEPT = "kept"  # folder inside chapters/
RELOAD = "Is it open in JupyterLab? Then: File, Reload Notebook from Disk."


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "reset",
        help="begin a chapter or an exercise anew; your file is kept",
        description="Begin a chapter or an exercise anew. Your notebook is first kept in chapters/kept/.",
    )
    parser.add_argument("chapter", nargs="?", type=int, metavar="N", help="the chapter")
    parser.add_argument("--exercise", metavar="4.2", help="only this exercise")
    parser.add_argument("--yes", action="store_true", help="don't ask first")
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    root, number = root_of(options), options.exercise
    if (options.chapter is None) == (number is None):
        raise Misuse("Say what to begin anew: tplab reset 4, or tplab reset --exercise 4.2")
    if number is None:
        files, what = chapter(root, options.chapter), f"Chapter {options.chapter}"
    else:
        files, what = chapter_of_exercise(root, number, "tplab reset --exercise 4.2"), f"Exercise {number}"
        there = list(exercises_of(read_notebook(files.reference)))
        if number not in there:
            raise no_such_exercise(number, files, there)
    first = first_state(files)
    if _contents(files.learner) == _wanted(files, first, number).encode():
        console.print(f"{what} is as it was at first; there is nothing to reset.")
        return 0
    is_there = files.learner.exists()
    keeps = f" Your notebook is kept in chapters/{KEPT}/." if is_there else ""
    if not agreed(f"Reset {what.lower()}?{keeps}", options.yes, console):
        return 0
    try:
        before, text = (
            _contents(files.learner),
            _wanted(files, first, number),
        )  # again, since it may have been saved meanwhile
        copy = keep(files.learner, before) if before is not None else None
        replace(files.learner, text.encode())
    except OSError as error:
        raise Misuse(f"Your notebook was not changed: {error.strerror} ({error.filename}).") from error
    console.print(Text(f"{what} is as it was at first.", style="bold"))
    if copy:
        console.print(Text(f"Your notebook of before: {copy.relative_to(root)}"))
        console.print(Text(RELOAD, style="dim"))
    return 0


def _contents(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Misuse(f"{path} can't be read: {error.strerror}. Nothing was changed.") from error


def _wanted(files: ChapterFiles, first: str, number: str | None) -> str:
    """Return the notebook's text after the reset. Raises Unreadable for an exercise in a broken notebook."""
    if number is None:
        return first
    try:
        learner = read_notebook(files.learner)
    except Unreadable as error:
        whole = f"The whole chapter can be reset: tplab reset {files.number} (it keeps a copy of the file)."
        raise Unreadable(f"{error} Nothing was changed. {whole}") from error
    raw = json.loads(files.learner.read_text(encoding="utf-8-sig"))
    restore(raw, learner, json.loads(first), read_notebook(files.reference), number)
    return json.dumps(raw, indent=1, ensure_ascii=False) + "\n"


def first_state(files: ChapterFiles) -> str:
    """Build the learner's notebook in its original state from the chapter's source. Raises Misuse."""
    from tplab.course.notebooks.build import blank_chapter, load, skeleton, to_text  # slow to import
    from tplab.course.notebooks.source import SourceError, read

    try:
        source, solution = read(files.source), load(files.reference)
    except (OSError, SourceError) as error:
        raise Misuse(f"{files.source} can't be read: {error}. Bring the course up to date: git pull") from error
    ids = [cell.id for cell in skeleton(source, blank=True).cells]
    if solution is None or [cell.id for cell in solution.cells] != ids:
        raise Misuse(f"solutions/{files.stem}.ipynb is not what its source says. Build it: tplab build {files.number}")
    return to_text(blank_chapter(source, solution))


def keep(path: Path, data: bytes) -> Path:
    """Save `data` as a time-stamped copy of the file and return its path. Existing copies are never overwritten."""
    folder = path.parent / KEPT
    folder.mkdir(exist_ok=True)
    stem = f"{path.stem}-{time.strftime('%Y-%m-%d-%H%M%S')}"
    count = 1
    while True:
        copy = folder / (f"{stem}.ipynb" if count == 1 else f"{stem}-{count}.ipynb")
        try:
            with open(copy, "xb") as file:
                file.write(data)
            return copy
        except FileExistsError:
            count += 1
