"""`tplab start`: make your own copies of the chapters, in a folder of your own.

tplab start               makes them in the folder my_course
tplab start FOLDER        makes them anywhere else

In the repository, `tplab lab` does this, too. If you worked in the repository's chapters/ before, your notebooks move
over, and kept/ gets a copy of each.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tplab.common.units import count
from tplab.course.learn.course_files import OWN, Course, Misuse, has_material
from tplab.course.learn.start import Report, start
from tplab.course.notebooks.reference import MATERIAL


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "start",
        help="make your own copies of the chapters",
        description="Make your own copies of the chapters, in a folder of your own. Run it again at any time: it only "
        "adds what is missing.",
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(OWN), help=f"where; else {OWN}/")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    folder = options.folder.resolve()
    material = next((above for above in folder.parents if has_material(above)), MATERIAL)
    if folder in (material / "chapters", material / "solutions"):
        raise Misuse(f"{options.folder} belongs to the course. Choose a folder of your own: tplab start {OWN}")
    if folder.exists() and not folder.is_dir():
        raise Misuse(f"{options.folder} is a file. Choose a folder: tplab start {OWN}")
    report = start(Course(material, folder))
    show(console, report)
    console.print(f"To open your course: cd {options.folder} && tplab lab", soft_wrap=True)  # as one line to copy
    return int(bool(report.problems))


def show(console: Console, report: Report) -> None:
    """Print what `start` or `update` did."""
    if report.new:
        console.print(f"New in your folder: {count(len(report.new), 'notebook')}.")
    for name, changes in report.updated.items():
        console.print(f"{name}: {changes}")
    for told in report.moved:
        console.print(told)
    for told in report.problems:
        console.print(Text(told, style="red"))
