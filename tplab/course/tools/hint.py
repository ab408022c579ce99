"""`tplab hint 4.2`: show the next of an exercise's three hints."""

import argparse

from rich.console import Console

from tplab.course.feedback import hints
from tplab.course.learner.course_files import add_root, course_of


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("hint", help="the next hint of an exercise", description="One more hint each time.")
    parser.add_argument("exercise", metavar="4.2")
    parser.add_argument("--step", type=int, metavar="N", help="this hint, whichever you have seen")
    parser.add_argument("--all", action="store_true", help="all of them")
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    course = course_of(options)
    return hints.show(options.exercise, course.material, course.memory, step=options.step, everything=options.all)
