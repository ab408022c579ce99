"""`tplab update`: bring new versions of the chapters into your notebooks. Your answers, notes and own cells stay.

A notebook that changes is first copied to kept/. In a clone of the repository, run `git pull` first.
"""

import argparse

from rich.console import Console
from rich.text import Text

from tplab.course.commands.reset import RELOAD
from tplab.course.commands.start import show
from tplab.course.learn.course_files import Misuse, add_root, course_of
from tplab.course.learn.start import update


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "update",
        help="bring new versions of the chapters into your notebooks",
        description="Bring new versions of the chapters into your notebooks. Your answers, notes and own cells stay, "
        "and a copy of each notebook that changes is kept in kept/.",
    )
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    course = course_of(options)
    if not course.started:
        raise Misuse(
            "There is nothing to update: you have no copies of the chapters here yet. To make them: tplab start"
        )
    report = update(course)
    show(console, report)
    if report.updated:
        console.print(Text(RELOAD, style="dim"))
    elif not (report.new or report.moved or report.problems):
        console.print("Your notebooks are up to date.")
    return int(bool(report.problems))
