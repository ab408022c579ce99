"""`tplab progress`: list every chapter's exercises as passed, failed or to do, from the learner's notebooks.

    tplab progress            every chapter, with the exercises of the chapters that you are in
    tplab progress 4          the exercises of one chapter

In a notebook, call `progress()` from `tplab.course` to see the same as a page.
"""

import argparse
import os
from html import escape
from pathlib import Path
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from tplab.course.commands.exercise_status import ChapterStanding, Standing, standings
from tplab.course.feedback.verdict import AMBER, GREEN, RED
from tplab.course.grade.terminal import LOOK
from tplab.course.learn.course_files import add_root, course_of, find_course
from tplab.course.notebooks.numbering import START_NUMBER, argument, chapter_argument

_COLORS = {"passed": GREEN, "failed": RED, "to do": AMBER}
_FONT = "font-family: var(--jp-content-font-family, sans-serif); color: var(--jp-ui-font-color1, inherit);"
_CELL = "text-align: left; padding: 0.1em 1em 0.1em 0; border: none; background: none; vertical-align: top;"
_BAR = (
    "display: inline-block; vertical-align: middle; width: 7em; height: 0.6em; margin: 0 0.8em; "
    "background-color: var(--jp-layout-color3, #bdbdbd);"
)
_FAINT = "opacity: 0.75; font-size: 88%;"
_BUTTON = (
    "display: inline-block; padding: 0.5em 1.2em; margin: 0.2em 0 0.8em 0; border-radius: 4px; font-weight: 600; "
    "text-decoration: none; color: white; background-color: #1565c0;"
)


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "progress",
        help="what you have done, and what is to do",
        description="Every exercise: passed, failed or to do, as `tplab check` found or your notebooks show.",
    )
    parser.add_argument(
        "chapters", nargs="*", type=chapter_argument, metavar="N", help="chapter numbers; without one, every chapter"
    )
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    chapters = standings(course_of(options), options.chapters)
    console.print(as_text(chapters, unfolded=bool(options.chapters)))
    return 0


def chapter_summary(chapter: ChapterStanding) -> str:
    """Return a chapter's counts in words: "2 of 4 passed, about 25 of 50 min left"."""
    of = f"{chapter.minutes_left} of " if chapter.minutes_left < chapter.minutes else ""
    left = f", about {of}{chapter.minutes} min left" if chapter.minutes_left else ""
    return f"{chapter.passed} of {len(chapter.exercises)} passed{left}"


def summary(chapters: list[ChapterStanding]) -> str:
    """Return the counts over all chapters in words, and the next exercise to do."""
    passed, minutes = sum(one.passed for one in chapters), sum(one.minutes_left for one in chapters)
    told = f"{passed} of {sum(len(one.exercises) for one in chapters)} exercises passed."
    following = next((e for one in chapters for e in one.exercises if e.status != "passed"), None)
    return told + (f" Next: {following.number}. About {_time(minutes)} left." if following else "")


def _time(minutes: int) -> str:
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.0f} hours"


def as_text(chapters: list[ChapterStanding], unfolded: bool = False) -> Text:
    """Return the progress as colored text.

    It lists the exercises of the chapters that were begun and of the next one, or of all chapters if `unfolded`.
    """
    lines = [Text(summary(chapters), style="bold")]
    following = next((chapter for chapter in chapters if chapter.minutes_left), None)
    for chapter in chapters:
        lines.append(
            Text(f"{argument(chapter.number).zfill(2)} {chapter.title}: {chapter_summary(chapter)}", style="bold")
        )
        if chapter.problem:
            lines.append(Text(f"   {chapter.problem}", style="red"))
        for one in chapter.exercises if unfolded or chapter is following or chapter.begun else ():
            mark, color = LOOK[one.status]
            told = Text(_told(one), style=color)
            lines.append(
                Text.assemble("   ", (mark, color), f" {one.number} {one.title}: ", told, f", {one.minutes} min")
            )
    return Text("\n").join(lines)


class ProgressPage:
    """The learner's progress as HTML and as text. Links are relative to `folder`, where the notebook is."""

    def __init__(self, chapters: list[ChapterStanding], folder: Path) -> None:
        self.chapters, self.folder = chapters, folder

    def __repr__(self) -> str:
        return as_text(self.chapters).plain

    def _repr_html_(self) -> str:
        following = next((chapter for chapter in self.chapters if chapter.minutes_left), None)
        shown = [one for one in self.chapters if one.begun or one.problem or one is following]
        told = f'<p style="font-size: 115%;"><b>{escape(summary(self.chapters))}</b></p>{self._button()}'
        told += "".join(map(self._chapter, shown))
        if others := [one for one in self.chapters if one not in shown]:
            told += f"<details><summary>the other chapters</summary>{''.join(map(self._chapter, others))}</details>"
        return f'<div style="{_FONT} max-width: 62em;">{told}</div>'

    def _button(self) -> str:
        """Return the HTML for the button that opens the chapter of the next exercise, or "" if there is none."""
        chapter = next((one for one in self.chapters if one.minutes_left and not one.problem), None)
        if not chapter:
            return ""
        called = "the start page" if chapter.number == START_NUMBER else f"chapter {chapter.number:02d}"
        text = escape(f"Open {called}: {chapter.title} →")
        return f'<a style="{_BUTTON}" href="{escape(self._link(chapter))}">{text}</a>'

    def _link(self, chapter: ChapterStanding) -> str:
        return quote(os.path.relpath(chapter.path, self.folder).replace(os.sep, "/"))

    def _chapter(self, chapter: ChapterStanding) -> str:
        """Return the HTML for a chapter: a line with a progress bar, which unfolds to show the exercises."""
        width = f"{100 * chapter.passed / max(1, len(chapter.exercises)):.0f}%"
        filled = f'<span style="display: block; width: {width}; height: 100%; background-color: {GREEN};"></span>'
        title = escape(f"{argument(chapter.number).zfill(2)} · {chapter.title}")
        name = f'<a style="display: inline-block; width: 22em;" href="{escape(self._link(chapter))}">{title}</a>'
        told = f'<span style="{_FAINT}">{escape(chapter_summary(chapter))}</span>'
        problem = f'<div style="color: {RED};">{escape(chapter.problem)}</div>' if chapter.problem else ""
        rows = "".join(_row(exercise) for exercise in chapter.exercises)
        table = f'<table style="margin: 0.2em 0 0.6em 1.2em; border: none; font-size: inherit;">{rows}</table>'
        opened = " open" if chapter.begun or chapter.problem else ""
        line = f'<b>{name}</b><span style="{_BAR}">{filled}</span>{told}'
        return f'<details{opened} style="margin: 0.3em 0;"><summary>{line}</summary>{problem}{table}</details>'


def _row(exercise: Standing) -> str:
    told = f"{LOOK[exercise.status][0]} {escape(_told(exercise))}"
    told = f'<span style="color: {_COLORS[exercise.status]};">{told}</span>'
    cells = [exercise.number, escape(exercise.title), told, f'<span style="{_FAINT}">{exercise.minutes} min</span>']
    return "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"


def _told(exercise: Standing) -> str:
    return exercise.status + (f", {exercise.note}" if exercise.note else "")


def progress() -> ProgressPage:
    """Return a page that shows your progress: links and tables in a notebook, and plain text in a terminal."""
    return ProgressPage(standings(find_course(Path.cwd())), Path.cwd())
