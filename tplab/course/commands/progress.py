"""`tplab progress`: list every chapter's exercises as passed, failed or to do, from the learner's notebooks.

    tplab progress            every chapter, with the exercises of the chapters that you are in
    tplab progress 4          the exercises of one chapter

In a notebook, call `progress()` from `tplab.course` to see the same as a page.
"""

import argparse
from pathlib import Path

from rich.console import Console

from tplab.course.commands.exercise_status import standings
from tplab.course.commands.page import ProgressPage, as_text
from tplab.course.learn.course_files import add_root, chapter, course_of, find_course
from tplab.course.notebooks.numbering import chapter_argument


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
    course = course_of(options)
    chapters = standings(course, [chapter(course, number).number for number in options.chapters])
    console.print(as_text(chapters, unfolded=bool(options.chapters)))
    return 0


def progress() -> ProgressPage:
    """Return a page that shows your progress: links and tables in a notebook, and plain text in a terminal."""
    return ProgressPage(standings(find_course(Path.cwd())), Path.cwd())
