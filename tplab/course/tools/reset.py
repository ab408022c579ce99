"""`tplab reset`: restore a chapter or one of its exercises to the original state. Your version is kept as a dated copy.

    tplab reset 4                  the full chapter, even if its notebook can no longer be read
    tplab reset --exercise 4.2     one exercise and its check; every other cell stays as it is

Copies go to kept/ in your folder and are never overwritten. The original state is rebuilt from the chapter's source.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tplab.common.files import replace
from tplab.course.grade.check_notebook import exercises_of
from tplab.course.learner.course_files import (
    ChapterFiles,
    Misuse,
    add_root,
    chapter,
    chapter_of_exercise,
    course_of,
    no_such_exercise,
)
from tplab.course.learner.pristine import KEPT, first_state, keep
from tplab.course.notebooks.cells import Unreadable, read_notebook
from tplab.course.notebooks.numbering import argument, chapter_argument, heading
from tplab.course.tools.confirm import agreed
from tplab.course.tools.restore import restore

RELOAD = "Is it open in JupyterLab? Then: File, Reload Notebook from Disk."


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "reset",
        help="begin a chapter or an exercise anew; your file is kept",
        description="Begin a chapter or an exercise anew. Your notebook is first kept, in kept/.",
    )
    parser.add_argument("chapter", nargs="?", type=chapter_argument, metavar="N", help="the chapter")
    parser.add_argument("--exercise", metavar="4.2", help="only this exercise")
    parser.add_argument("--yes", action="store_true", help="don't ask first")
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    course, number = course_of(options), options.exercise
    if (options.chapter is None) == (number is None):
        raise Misuse("Say what to begin anew: tplab reset 4, or tplab reset --exercise 4.2")
    if number is None:
        files, what = chapter(course, options.chapter), heading(options.chapter)
    else:
        files, what = chapter_of_exercise(course, number, "tplab reset --exercise 4.2"), f"Exercise {number}"
        there = list(exercises_of(read_notebook(files.reference)))
        if number not in there:
            raise no_such_exercise(number, files, there)
    first = first_state(files)
    if _contents(files.learner) == _wanted(files, first, number).encode():
        console.print(f"{what} is as it was at first; there is nothing to reset.")
        return 0
    is_there = files.learner.exists()
    keeps = f" Your notebook is kept in {KEPT}/." if is_there else ""
    if not agreed(f"Reset {what.lower()}?{keeps}", options.yes, console):
        return 0
    try:
        before, text = (
            _contents(files.learner),
            _wanted(files, first, number),
        )  # read again, since the notebook may have been saved in the meantime
        copy = keep(files.learner, before, course.folder) if before is not None else None
        replace(files.learner, text.encode())
    except OSError as error:
        raise Misuse(f"Your notebook was not changed: {error.strerror} ({error.filename}).") from error
    console.print(Text(f"{what} is as it was at first.", style="bold"))
    if copy:
        console.print(Text(f"Your notebook of before: {copy.relative_to(course.folder)}"))
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
    """Return the notebook's text after the reset.

    Raises Unreadable if only an exercise is to be reset and the notebook can't be read.
    """
    if number is None:
        return first
    try:
        learner = read_notebook(files.learner)
    except Unreadable as error:
        whole = f"The whole chapter can be reset: tplab reset {argument(files.number)} (it keeps a copy of the file)."
        raise Unreadable(f"{error} Nothing was changed. {whole}") from error
    raw = json.loads(files.learner.read_text(encoding="utf-8-sig"))
    restore(raw, learner, json.loads(first), read_notebook(files.reference), number)
    return json.dumps(raw, indent=1, ensure_ascii=False) + "\n"
