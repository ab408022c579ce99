"""`tplab progress`: list every chapter's exercises as passed, failed or to do, from the learner's notebooks.

It unfolds the chapters that you are in. In a notebook, call `progress()` from `tplab.course` to see the same as a page.
"""

import argparse
import os
from html import escape
from pathlib import Path
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from tplab.course.commands.exercise_status import ChapterStanding, Standing, standings
from tplab.course.feedback.verdict import BLUE, GREEN, RED, box, heading, table
from tplab.course.grade.terminal import LOOK
from tplab.course.learn.course_files import add_root, course_of, find_course
from tplab.course.notebooks.numbering import argument

_BAR = (
    "display: inline-block; vertical-align: middle; width: 7em; height: 0.6em; margin: 0 0.8em; "
    "background-color: var(--jp-layout-color3, #bdbdbd);"
)
_BUTTON = (
    "display: inline-block; padding: 0.5em 1.2em; margin: 0.4em 0 0.6em 0; border-radius: 4px; font-weight: 600; "
    "text-decoration: none; color: white; background-color: #1565c0;"
)


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "progress",
        help="what you have done, and what is to do",
        description="Every exercise: passed, failed or to do, as `tplab check` found or your notebooks show.",
    )
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    console.print(as_text(standings(course_of(options))))
    return 0


def name(chapter: ChapterStanding) -> str:
    return f"{argument(chapter.number).zfill(2)} {chapter.title}"


def chapter_summary(chapter: ChapterStanding) -> str:
    """Return a chapter's counts in words: "2 of 4 passed"."""
    return f"{chapter.passed} of {len(chapter.exercises)} passed"


def summary(chapters: list[ChapterStanding]) -> str:
    """Return the counts over all chapters in words, and the next exercise to do."""
    told = f"{sum(one.passed for one in chapters)} of {sum(len(one.exercises) for one in chapters)} exercises passed."
    following = next((one.following for one in chapters if one.following), None)
    return told + (f" Next: {following.number}." if following else "")


def is_unfolded(chapter: ChapterStanding, chapters: list[ChapterStanding]) -> bool:
    """Return whether a chapter is shown with its exercises: it was begun, it's the next one, or it can't be read."""
    following = next((one for one in chapters if one.following), None)
    return chapter.begun or chapter is following or bool(chapter.problem)


def as_text(chapters: list[ChapterStanding]) -> Text:
    """Return the progress as colored text."""
    lines = [Text(summary(chapters), style="bold")]
    for chapter in chapters:
        lines.append(Text(f"{name(chapter)}: {chapter_summary(chapter)}", style="bold"))
        if chapter.problem:
            lines.append(Text(f"   {chapter.problem}", style="red"))
        for one in chapter.exercises if is_unfolded(chapter, chapters) else ():
            mark, color = LOOK[one.status]
            lines.append(Text.assemble("   ", (mark, color), f" {one.number} {one.title}: ", (_told(one), color)))
    return Text("\n").join(lines)


class ProgressPage:
    """The learner's progress as HTML and as text. Links are relative to `folder`, where the notebook is."""

    def __init__(self, chapters: list[ChapterStanding], folder: Path) -> None:
        self.chapters, self.folder = chapters, folder

    def __repr__(self) -> str:
        return as_text(self.chapters).plain

    def _repr_html_(self) -> str:
        following = next((one for one in self.chapters if one.following and not one.problem), None)
        button = self._link(following, f"Open {following.title} →", _BUTTON) if following else ""
        return box(BLUE, heading(summary(self.chapters)), button, *map(self._chapter, self.chapters))

    def _link(self, chapter: ChapterStanding, text: str, style: str) -> str:
        path = os.path.relpath(chapter.path, self.folder).replace(os.sep, "/")
        return f'<a style="{style}" href="{escape(quote(path))}">{escape(text)}</a>'

    def _chapter(self, chapter: ChapterStanding) -> str:
        """Return the HTML for a chapter: a line with a bar, which unfolds to show the exercises."""
        rows = [(one.number, one.title, f"{LOOK[one.status][0]} {_told(one)}") for one in chapter.exercises]
        opened = " open" if is_unfolded(chapter, self.chapters) else ""
        problem = f'<div style="color: {RED};">{escape(chapter.problem)}</div>' if chapter.problem else ""
        width = f"{100 * chapter.passed / max(1, len(chapter.exercises)):.0f}%"
        filled = f'<span style="display: block; width: {width}; height: 100%; background-color: {GREEN};"></span>'
        link = self._link(chapter, name(chapter), "display: inline-block; width: 22em;")
        line = f'{link}<span style="{_BAR}">{filled}</span>{chapter_summary(chapter)}'
        return f"<details{opened}><summary>{line}</summary>{problem}{table(rows)}</details>"


def _told(exercise: Standing) -> str:
    return exercise.status + (f", {exercise.note}" if exercise.note else "")


def progress() -> ProgressPage:
    """Return a page that shows your progress: links and tables in a notebook, and plain text in a terminal."""
    return ProgressPage(standings(find_course(Path.cwd())), Path.cwd())
