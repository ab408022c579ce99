"""`tplab reset`: restore a chapter or one of its exercises to the original state. Your version is kept as a dated copy.

    tplab reset 4                  the full chapter, even if its notebook can no longer be read
    tplab reset --exercise 4.2     one exercise and its check; every other cell stays as it is

Copies go to kept/ in your folder and are never overwritten. The original state is rebuilt from the chapter's source.
"""

import argparse
import copy
import json
import sys

from rich.console import Console
from rich.prompt import Confirm
from rich.text import Text

from tplab.common.files import replace
from tplab.course.commands.exercise_status import find_exercise
from tplab.course.grade.answers import find_cells
from tplab.course.learn.course_files import ChapterFiles, Misuse, add_root, chapter, course_of
from tplab.course.learn.pristine import KEPT, first_state, keep
from tplab.course.learn.update_notebook import as_text
from tplab.course.notebooks.cells import Unreadable, load_notebook, parse_cells, read_notebook
from tplab.course.notebooks.numbering import argument, chapter_argument, heading

RELOAD = "Is it open in JupyterLab? Then: File, Reload Notebook from Disk."


def agreed(question: str, yes: bool, console: Console) -> bool:
    """Ask `question` and return whether the answer is yes. If `yes`, don't ask. Raises Misuse without a terminal."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise Misuse(f"{question} There's no terminal to ask in, so add --yes.")
    return Confirm.ask(Text(question, style="bold"), console=console, default=False)


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
        files, what = find_exercise(course, number, "tplab reset --exercise 4.2")[0], f"Exercise {number}"
    first = first_state(files)
    keeps = f" Your notebook is kept in {KEPT}/." if files.learner.exists() else ""
    if not agreed(f"Reset {what.lower()}?{keeps}", options.yes, console):
        return 0
    wanted = _wanted(files, first, number)
    kept = keep(files.learner, files.learner.read_bytes(), course.folder) if files.learner.exists() else None
    replace(files.learner, wanted)
    console.print(Text(f"{what} is as it was at first.", style="bold"))
    if kept:
        console.print(Text(f"Your notebook of before: {kept.relative_to(course.folder)}"))
        console.print(Text(RELOAD, style="dim"))
    return 0


def _wanted(files: ChapterFiles, first: str, number: str | None) -> bytes:
    """Return what the notebook's file contains after the reset.

    Raises Unreadable if only an exercise is to be reset and the notebook can't be read.
    """
    if number is None:
        return first.encode()
    try:
        mine = load_notebook(files.learner)
    except Unreadable as error:
        whole = f"The whole chapter can be reset: tplab reset {argument(files.number)} (it keeps a copy of the file)."
        raise Unreadable(f"{error} Nothing was changed. {whole}") from error
    owners = find_cells(read_notebook(files.reference), parse_cells(mine))
    _restore(mine, owners, json.loads(first), number)
    return as_text(mine).encode()


def _restore(mine: dict, owners: list[str], first: dict, number: str) -> None:
    """Replace an exercise's cell and its check cell in `mine`, a notebook's JSON, with those of `first`, in place.

    owners: for each cell of `mine`, the id of the chapter's cell that it is a version of, or ""

    If there are several versions, the first is replaced, and the others are removed. If there are none, the cell is
    inserted below the cells that precede it in the chapter.
    """
    cells = list(zip(owners, mine["cells"], strict=True))
    order = [cell["id"] for cell in first["cells"]]
    for part in ("exercise", "check"):
        id = f"{part}-{number.replace('.', '-')}"
        place = order.index(id)
        blank = copy.deepcopy(first["cells"][place])
        if mine.get("nbformat_minor", 0) < 5:
            del blank["id"]  # this format has no cell ids
        versions = [at for at, (owner, _) in enumerate(cells) if owner == id]
        above = [at for at, (owner, _) in enumerate(cells) if owner in order[:place]]
        at = versions[0] if versions else max(above, default=-1) + 1
        others = [cell for cell in cells[at:] if cell[0] != id]
        cells = [*cells[:at], (id, blank), *others]
    mine["cells"] = [cell for _, cell in cells]
