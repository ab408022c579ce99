"""`tplab reset`: restore a chapter or one of its exercises to the original state. Your version is kept as a dated copy.

    tplab reset 4                  the full chapter, even if its notebook can no longer be read
    tplab reset --exercise 4.2     one exercise and its check; every other cell stays as it is

Copies go to kept/ in your folder and are never overwritten. The original state is rebuilt from the chapter's source.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tplab.common.files import replace
from tplab.course.commands.confirm import agreed
from tplab.course.commands.exercise_status import find_exercise
from tplab.course.grade.answers import find_cells
from tplab.course.learn.course_files import ChapterFiles, Misuse, add_root, chapter, course_of
from tplab.course.learn.pristine import KEPT, first_state, keep
from tplab.course.notebooks.cells import Cell, Unreadable, read_notebook
from tplab.course.notebooks.numbering import argument, chapter_argument, heading

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
        files, what = find_exercise(course, number, "tplab reset --exercise 4.2")[0], f"Exercise {number}"
    first = first_state(files)
    before = _contents(files.learner)
    if before == _wanted(files, first, number):
        console.print(f"{what} is as it was at first; there is nothing to reset.")
        return 0
    keeps = "" if before is None else f" Your notebook is kept in {KEPT}/."
    if not agreed(f"Reset {what.lower()}?{keeps}", options.yes, console):
        return 0
    # Read again, because the notebook may have been saved in the meantime
    before, wanted = _contents(files.learner), _wanted(files, first, number)
    kept = None if before is None else keep(files.learner, before, course.folder)
    replace(files.learner, wanted)
    console.print(Text(f"{what} is as it was at first.", style="bold"))
    if kept:
        console.print(Text(f"Your notebook of before: {kept.relative_to(course.folder)}"))
        console.print(Text(RELOAD, style="dim"))
    return 0


def _contents(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _wanted(files: ChapterFiles, first: str, number: str | None) -> bytes:
    """Return what the notebook's file contains after the reset.

    Raises Unreadable if only an exercise is to be reset and the notebook can't be read.
    """
    if number is None:
        return first.encode()
    try:
        learner = read_notebook(files.learner)
    except Unreadable as error:
        whole = f"The whole chapter can be reset: tplab reset {argument(files.number)} (it keeps a copy of the file)."
        raise Unreadable(f"{error} Nothing was changed. {whole}") from error
    raw = json.loads(files.learner.read_text(encoding="utf-8-sig"))
    restore(raw, learner, json.loads(first), read_notebook(files.reference), number)
    return (json.dumps(raw, indent=1, ensure_ascii=False) + "\n").encode()


def restore(raw: dict, learner: list[Cell], first: dict, reference: list[Cell], number: str) -> None:
    """Replace the exercise cell and its check cell in `raw`, the notebook's JSON, with those of `first`, in place.

    learner:    the same notebook, parsed into cells
    first:      the JSON of the blank chapter
    reference:  the cells of the solution, used to find the learner's cells

    Cells are found even if they have lost their ids, or were turned into text, split or duplicated. The first match is
    replaced, and the others are removed. A missing cell is inserted after the cells that precede it in the chapter.
    """
    owners = find_cells(reference, learner)  # for each of the learner's cells, the id of its reference cell
    cells: list[tuple[str, Any]] = list(zip(owners, raw["cells"], strict=True))
    order = [cell["id"] for cell in first["cells"]]
    for part in ("exercise", "check"):
        id = f"{part}-{number.replace('.', '-')}"
        pristine = copy.deepcopy(first["cells"][order.index(id)])
        if isinstance(raw.get("nbformat_minor"), int) and raw["nbformat_minor"] < 5:
            del pristine["id"]  # the notebook's format predates cell ids
        places = [place for place, (owner, _) in enumerate(cells) if owner == id]
        if places:
            cells[places[0]] = (id, pristine)
            cells = [cell for place, cell in enumerate(cells) if place not in places[1:]]
        else:
            above = set(order[: order.index(id)])
            last = max((place for place, (owner, _) in enumerate(cells) if owner in above), default=-1)
            cells.insert(last + 1, (id, pristine))
    raw["cells"] = [cell for _, cell in cells]
