"""`tplab mine`: show your library, my_tp, and what is in each module. It grows with each exercise that you pass.

In a notebook, `library(5)` shows the same, plus what your library can do since chapter 5.
"""

import argparse
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tplab.common.units import count
from tplab.course.feedback.verdict import code_html, table
from tplab.course.grade.check_notebook import exercises_of
from tplab.course.learn.course_files import Course, add_root, all_chapters, course_of, own_course
from tplab.course.learn.library import PACKAGE, SCRIPT, Module, load, modules, restore
from tplab.course.learn.my_tp import DEMOS
from tplab.course.notebooks.cells import read_notebook
from tplab.course.notebooks.numbering import argument, chapter_of, parse_chapter

EMPTY = (
    f"Your library is still empty. In JupyterLab, each exercise that passes puts your code into {PACKAGE}/. If you "
    "work in another editor, save the notebook and run `tplab check` in a terminal."
)
NOT_STARTED = (
    "Your library grows in your own copies of the chapters, and this notebook isn't one of them. `make lab` or "
    "`tplab start` makes them."
)
EDITED = "What you edited in the package isn't what was checked. Edit it in the notebook, and check it there."
MESSAGE = re.compile(r"\bdist\.(?:all_|broadcast|gather|i?recv|i?send|reduce|scatter)\w*\(")
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
    course = course_of(options)
    if course.started:
        restore(course)
    console.print(Text(repr(page(course))))
    return 0


def notes(course: Course, found: list[Module], since: int | None = None) -> list[str]:
    """Return sentences on what the library can do, and on code in it that `tplab check` hasn't checked.

    If `since` is the number of a chapter, they only mention the abilities that the library has since that chapter.
    """
    written = {exercise for module in found for exercise in module.written}
    told = [
        f"In a terminal, in {course.folder.name}/, `python -m {PACKAGE} {name}` {what}."
        for name, (needed, what) in DEMOS.items()
        if written >= {*needed} and since in (None, chapter_of(needed[0]))
    ]
    if (course.folder / SCRIPT).exists() and since in (None, 15):
        told.append(
            f"It trains a GPT, even where tplab isn't installed: `torchrun --standalone --nproc-per-node 2 {SCRIPT}`."
        )
    if since == 15:
        told.append(achievements(course))
    shown = sorted({module.chapter for module in found if module.shown})
    if shown:
        chapters = " ".join(map(argument, shown))
        told.append(f"?: passed in the notebook. `tplab check {chapters}` checks it again in a clean process.")
    return told + [EDITED] * any(module.edited for module in found)


def achievements(course: Course) -> str:
    """Return a sentence on how often the learner's code communicates, and how many bugs they've fixed."""
    written = load(course)
    text = "\n".join(piece for one in written.values() for piece in (*one.passage.helpers, *one.passage.code))
    titles: dict[str, str] = {}
    for files in all_chapters(course).values():
        titles |= exercises_of(read_notebook(files.reference))
    fixed = sum(titles.get(exercise, "").startswith("Fix") for exercise in written)
    return (
        f"Your code sends messages or enters collectives in {count(len(MESSAGE.findall(text)), 'place')}, and you've "
        f"fixed {count(fixed, 'bug')} that weren't yours."
    )


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
        shown = [row if any(row[-1] for row in self.rows) else row[:-1] for row in self.rows]
        rows = table(shown, HEAD[: len(shown[0])]) if shown else ""
        told = "".join(f'<div style="margin-top: 0.5em;">{code_html(note)}</div>' for note in self.notes)
        font = "font-family: var(--jp-content-font-family, sans-serif); color: var(--jp-ui-font-color1, inherit);"
        return f'<div style="{font} max-width: 62em;"><b>{escape(self.title)}</b>{rows}{told}</div>'


def page(course: Course, since: int | None = None) -> LibraryPage:
    """Return a page about the library in the learner's folder. See `notes` for `since`."""
    found = modules(course)
    if not found:
        return LibraryPage("Your library", [], [EMPTY])
    rows = []
    for module in found:
        written = ", ".join(f"{exercise}{'?' * (exercise in module.shown)}" for exercise in module.written)
        lacking = ", ".join(f"{' '.join(names)} ({exercise})" for exercise, names in module.borrowed.items())
        rows.append((module.name, str(module.lines), written + " (edited since)" * module.edited, lacking))
    lines, count = sum(module.lines for module in found), sum(len(module.written) for module in found)
    exercises = "1 exercise" if count == 1 else f"{count} exercises"
    title = f"{lines} lines of your own from {exercises}, in {course.folder / PACKAGE}."
    return LibraryPage(title, rows, notes(course, found, since))


def library(chapter: int | str | None = None) -> LibraryPage:
    """Return a page about your library. If `chapter` is given, it shows only the abilities that this chapter added."""
    since = parse_chapter(chapter) if isinstance(chapter, str) else chapter
    course = own_course(Path.cwd())
    return page(course, since) if course else LibraryPage("Your library", [], [NOT_STARTED])
