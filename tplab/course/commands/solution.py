"""`tplab solution 4.2`: show and explain the answer to an exercise. It asks first, and changes no file.

It shows the exercise's cell from the chapter's solution. Then come the three hints as an explanation.
"""

import argparse

from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from tplab.course.commands.exercise_status import find_exercise, next_exercise
from tplab.course.commands.reset import agreed
from tplab.course.feedback import hints
from tplab.course.grade.check_notebook import exercises_of
from tplab.course.learn.course_files import add_root, course_or_material


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "solution",
        help="the explained answer to an exercise",
        description="Show the explained answer to an exercise. Your notebook stays as it is.",
    )
    parser.add_argument("exercise", nargs="?", metavar="4.2", help="without it, the next one that you haven't passed")
    parser.add_argument("--yes", action="store_true", help="don't ask first")
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    course = course_or_material(options)
    number = options.exercise or next_exercise(course)
    _, reference = find_exercise(course, number, "tplab solution 4.2")
    title = exercises_of(reference)[number]
    question = f"Show the answer to exercise {number} ({title})? A hint may do: tplab hint {number}."
    if not agreed(question, options.yes, console):
        return 0
    answer = next(cell.source for cell in reference if cell.marks.get("exercise") == number)
    console.print(Text(f"Exercise {number} · {title}\n", style="bold"))
    console.print(Syntax("", "python", theme="ansi_dark").highlight(answer), soft_wrap=True)
    console.print(Text("\nHow to get there", style="bold"))
    for step, text in enumerate(hints.hints_of(reference).get(number, []), 1):
        console.print(f"{step}.")
        console.print(Padding(Markdown(text), (0, 0, 0, 3)))
    console.print(Text("\nYour notebook stays as it is. Write it there in your own words, then:", style="dim"))
    console.print(f"tplab check --exercise {number}")
    return 0
