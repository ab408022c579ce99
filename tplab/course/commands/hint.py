"""`tplab hint 4.2`: show the next of an exercise's three hints. Without a number, it picks the next exercise."""

import argparse

from rich.console import Console

from tplab.course.commands.exercise_status import find_exercise, next_exercise
from tplab.course.feedback import hints
from tplab.course.learn.course_files import add_root, course_of


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("hint", help="the next hint of an exercise", description="One more hint each time.")
    parser.add_argument("exercise", nargs="?", metavar="4.2", help="without it, the next one that you haven't passed")
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    course = course_of(options)
    number = options.exercise or next_exercise(course)
    _, reference = find_exercise(course, number, "tplab hint 4.2")
    hints.show(number, hints.hints_of(reference)[number], course.memory)
    return 0
