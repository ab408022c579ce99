"""`tplab progress`: list every chapter's exercises as passed, failed or to do, from the learner's notebooks.

    tplab progress            every chapter, with the exercises of the chapters that you are in
    tplab progress 4          the exercises of one chapter
    tplab progress --all      every exercise

In a notebook, call `progress()` from `tplab.course` to see the same as a page.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tplab.course.grade.terminal import LOOK
from tplab.course.learner.course_files import add_root, chapter, course_of, find_course
from tplab.course.notebooks.numbering import chapter_argument, two_digits
from tplab.course.tools import page
from tplab.course.tools.exercise_status import ChapterStanding, Standing, standings


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "progress",
        help="what you have done, and what is to do",
        description="Every exercise: passed, failed or to do. Runs nothing: what it knows was found by `tplab check`.",
    )
    parser.add_argument(
        "chapters", nargs="*", type=chapter_argument, metavar="N", help="chapter numbers; without one, every chapter"
    )
    parser.add_argument("--all", action="store_true", help="also the exercises of chapters that are done or not begun")
    parser.add_argument("--json", action="store_true", help="for another program")
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    course = course_of(options)
    chapters = standings(course, [chapter(course, number).number for number in options.chapters])
    if options.json:
        print(as_json(chapters))
        return 0
    console.print(Text(page.summary(chapters), style="bold"))
    following = next((one for one in chapters if one.minutes_left), None)
    for one in chapters:
        opened = bool(options.chapters) or options.all or one is following or one.begun
        if opened:
            console.print()
        show(console, one, opened)
    if footnote := page.footnote(chapters):
        console.print()
        console.print(Text(footnote, style="dim"))
    return 0


def show(console: Console, chapter: ChapterStanding, opened: bool = True) -> None:
    """Print one chapter's progress in the terminal, including its exercises if `opened` is true."""
    heading = Table.grid(expand=True, padding=(0, 1))
    heading.add_column(ratio=1)
    heading.add_column(no_wrap=True, justify="right")
    heading.add_row(
        Text(f"{two_digits(chapter.number)} {chapter.title}", style="bold"),
        Text(page.chapter_summary(chapter), style="dim"),
    )
    console.print(heading)
    if chapter.problem:
        console.print(Padding(Text(chapter.problem, style="red"), (0, 0, 0, 2)))
    for exercise in chapter.exercises if opened else ():
        mark, colour = LOOK[exercise.status]
        line = Table.grid(expand=True, padding=(0, 1))
        line.add_column(width=2, justify="right")
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        line.add_column(width=6, justify="right")
        line.add_row(
            Text(mark, style=colour),
            exercise.number,
            Text(exercise.title),
            _status(exercise),
            Text(f"{exercise.minutes} min", style="dim"),
        )
        console.print(line)
        if exercise.note and not exercise.verified:
            console.print(Padding(Text(exercise.note, style="dim"), (0, 0, 0, 7)))


def _status(exercise: Standing) -> Text:
    colour = LOOK[exercise.status][1]
    doubtful = exercise.status != "to do" and not exercise.verified
    return Text(exercise.status + ("?" if doubtful else ""), style=colour if doubtful else f"bold {colour}")


def as_json(chapters: list[ChapterStanding]) -> str:
    """Return the chapters' progress as JSON, with the same counts as in the table."""
    told = [
        asdict(one)
        | {"path": str(one.path), "passed": one.passed, "not_verified": one.shown, "minutes_left": one.minutes_left}
        for one in chapters
    ]
    return json.dumps({"chapters": told}, indent=1, ensure_ascii=False)


def progress() -> page.ProgressPage:
    """Return your progress as a page. A notebook displays it with links and tables, and anything else as text."""
    return page.ProgressPage(standings(find_course(Path.cwd())), Path.cwd())
