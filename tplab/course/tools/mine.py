"""`tplab mine`: your library, my_tp, with what is in each of its modules. It grows with each exercise that you pass."""

import argparse

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tplab.course.learner.course_files import add_root, course_of
from tplab.course.learner.library import PACKAGE, modules


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
    found = modules(course)
    if not found:
        console.print(
            f"Your library is still empty. Each exercise that passes `tplab check` puts your code into {PACKAGE}/."
        )
        return 0
    table = Table("module", "lines", "written and checked", "borrowed from the course", box=None, padding=(0, 2, 0, 0))
    for module in found:
        lacking = ", ".join(f"{' '.join(names)} ({exercise})" for exercise, names in module.borrowed.items())
        edited = Text(" edited since", style="yellow") if module.edited else Text("")
        table.add_row(module.name, str(module.lines), Text(", ".join(module.written)) + edited, Text(lacking))
    console.print(table)
    lines, exercises = sum(module.lines for module in found), sum(len(module.written) for module in found)
    console.print(
        Text(f"\n{lines} lines of your own from {exercises} exercises, in {course.folder / PACKAGE}.", style="bold")
    )
    if any(module.edited for module in found):
        console.print(
            "What you edited in the package isn't what was checked. Edit it in the notebook, and check it there."
        )
    return 0
