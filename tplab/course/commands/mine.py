"""`tplab mine`: show your library, my_tp, and what is in each module. It grows with each exercise that you pass.

In a notebook, `library(5)` shows the same, plus what your library can do since chapter 5.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tplab.common.units import count
from tplab.course.feedback.verdict import BLUE, box, heading, paragraph, table
from tplab.course.learn.course_files import Course, add_root, course_of, own_course
from tplab.course.learn.library import PACKAGE, SCRIPT, edited, modules, waiting
from tplab.course.learn.my_tp import FOR_THE_DEMO, Module
from tplab.course.notebooks.numbering import parse_chapter

EMPTY = (
    f"Your library is still empty. In JupyterLab, each exercise that passes puts your code into {PACKAGE}/. If you "
    "work in another editor, save the notebook and run `tplab check` in a terminal."
)
NOT_STARTED = (
    "Your library grows in your own copies of the chapters, which `make lab` or `tplab start` makes, and this notebook "
    "isn't one of them. In your own copy, this cell shows a table of your library's modules."
)
EDITED = "What you edited in the package isn't what was checked. Edit it in the notebook, and check it there."
HEAD = ("module", "lines", "yours", "borrowed from the course")


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "mine",
        help="your own library: what's in it, and what it still borrows",
        description=f"Show your library, {PACKAGE}: the answers that passed, as a plain Python package.",
    )
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    console.print(Text(repr(page(course_of(options)))))
    return 0


def notes(course: Course, found: list[Module], since: int | None = None) -> list[str]:
    """Return sentences on what the library can do, and on modules that were edited.

    If `since` is the number of a chapter, they only mention the abilities that the library has since that chapter.
    """
    there = {exercise for module in found for exercise in module.answers}
    told = []
    if there >= {*FOR_THE_DEMO} and since in (None, 13):
        told.append(
            f"In a terminal, in {course.folder.name}/, `python -m {PACKAGE} pipeline` trains a model in two stages, "
            "and compares it with the full model."
        )
    if (course.folder / SCRIPT).exists() and since in (None, 15):
        told.append(
            f"It trains a GPT, even where tplab isn't installed: `torchrun --standalone --nproc-per-node 2 {SCRIPT}`."
        )
    if late := waiting(course, found):
        told.append(
            f"{', '.join(late)} passed, but will be here once the earlier answers that they use have passed, too."
        )
    return told + [EDITED] * bool(edited(course))


@dataclass(frozen=True)
class LibraryPage:
    """The learner's library as HTML and as text."""

    title: str
    rows: list[tuple[str, str, str, str]]
    notes: list[str]

    def __repr__(self) -> str:
        rows = [
            f"{name}: {lines} lines, {yours}" + f"; {HEAD[-1]}: {lent}" * bool(lent)
            for name, lines, yours, lent in self.rows
        ]
        return "\n".join([self.title, *rows, *self.notes])

    def _repr_html_(self) -> str:
        return box(BLUE, heading(self.title), table(self.rows, HEAD) if self.rows else "", *map(paragraph, self.notes))


def page(course: Course, since: int | None = None) -> LibraryPage:
    """Return a page about the library in the learner's folder. See `notes` for `since`."""
    found = modules(course)
    if not found:
        return LibraryPage("Your library", [], [EMPTY])
    rows, changed = [], edited(course)
    for module in found:
        written = ", ".join(module.answers) + " (edited since)" * (module.name in changed)
        lacking = ", ".join(f"{' '.join(names)} ({exercise})" for exercise, names in module.borrowed.items())
        rows.append((module.name, str(module.lines), written, lacking))
    lines, exercises = sum(module.lines for module in found), sum(len(module.answers) for module in found)
    title = f"{lines} lines of your own from {count(exercises, 'exercise')}, in {course.folder / PACKAGE}."
    return LibraryPage(title, rows, notes(course, found, since))


def library(chapter: int | str | None = None) -> LibraryPage:
    """Return a page about your library. If `chapter` is given, it shows only the abilities that this chapter added."""
    since = parse_chapter(chapter) if isinstance(chapter, str) else chapter
    course = own_course(Path.cwd())
    if course is None:
        return LibraryPage("Your library", [], [NOT_STARTED])
    return page(course, since)
