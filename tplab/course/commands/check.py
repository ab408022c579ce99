"""`tplab check`: run the learner's answers inside the reference notebook, and print one line per exercise.

tplab check                   the chapter that you are in
tplab check 4                 chapter 4
tplab check all               every chapter
tplab check --exercise 4.2    one exercise, running only the cells that it needs
tplab check 4 --notebook copy.ipynb
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tplab.course.commands import state
from tplab.course.commands.exercise_status import find_exercise, standings
from tplab.course.grade.check_notebook import Verdict, check_notebook
from tplab.course.grade.run import Limits
from tplab.course.grade.terminal import show_heading, show_note, show_summary, show_verdict
from tplab.course.learn import library
from tplab.course.learn.course_files import ChapterFiles, Course, Misuse, add_root, all_chapters, chapter, course_of
from tplab.course.notebooks.cells import Cell, read_notebook
from tplab.course.notebooks.kernels import CELL_TIMEOUT
from tplab.course.notebooks.numbering import chapter_argument

ALL = "all"
NO_COPIES = (
    "You have no copies of your own here yet, so the blank chapters are checked. To make them: make lab, or tplab start"
)


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("check", help="check your answers", description="Check your answers, as last saved.")
    parser.add_argument(
        "chapters", nargs="*", type=_number_or_all, metavar="N", help="chapter numbers, or all; else the one you are in"
    )
    parser.add_argument("--exercise", metavar="4.2", help="only this exercise, and only what it needs")
    parser.add_argument("--notebook", type=Path, metavar="FILE", help="your notebook, where it isn't in your folder")
    parser.add_argument("--timeout", type=float, default=CELL_TIMEOUT, metavar="S", help="seconds for one cell")
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command. Return 0 if all exercises pass, and 1 if one doesn't."""
    passed = total = 0
    course = course_of(options)
    if not (course.started or options.notebook):
        console.print(Text(NO_COPIES, style="yellow"))
    jobs = _jobs(options, course)
    for place, files in enumerate(jobs):
        if place:
            console.print()
        good, all_of_it = _check_chapter(options, console, files)
        passed, total = passed + good, total + all_of_it
    if len(jobs) > 1:
        console.print(f"\n{passed} of {total} exercises pass in {len(jobs)} chapters.")
    return int(passed < total)


def _jobs(options: argparse.Namespace, course: Course) -> list[ChapterFiles]:
    """Return the files of the chapters to check. Raises Misuse if the options make no sense."""
    wanted = options.chapters
    if options.exercise:
        files, _ = find_exercise(course, options.exercise, "tplab check --exercise 4.2")
        if wanted not in ([], [files.number]):
            raise Misuse("Give either chapters or one exercise: tplab check 4, or tplab check --exercise 4.2")
        return [files]
    if options.notebook and (len(wanted) != 1 or ALL in wanted):
        raise Misuse(f"Say which chapter {options.notebook.name} is: tplab check 4 --notebook {options.notebook}")
    known = all_chapters(course)
    if ALL in wanted:
        return list(known.values())
    return [chapter(course, number) for number in wanted] or [known[_current(course)]]


def _current(course: Course) -> int:
    """Return the begun chapter that was saved last, or, if none is begun, the first one that isn't finished."""
    chapters = standings(course)
    begun = [one for one in chapters if one.begun]
    if begun:
        return max(begun, key=lambda one: one.path.stat().st_mtime).number
    return next((one.number for one in chapters if one.following), chapters[0].number)


def _number_or_all(text: str) -> int | str:
    return ALL if text == ALL else chapter_argument(text)


def _check_chapter(options: argparse.Namespace, console: Console, files: ChapterFiles) -> tuple[int, int]:
    """Check one chapter, print each verdict as it arrives, and return how many exercises pass and how many it has."""
    path = options.notebook or files.learner
    reference = read_notebook(files.reference)
    learner = read_notebook(path)
    only = [options.exercise] if options.exercise else None
    stream = check_notebook(reference, learner, path.parent, exercises=only, limits=Limits(cell=options.timeout))
    show_heading(console, files.stem, files.title(reference), path)
    verdicts: list[Verdict] = []
    notes: list[str] = []
    with console.status("checking"):
        for said in stream:
            if isinstance(said, str):
                notes.append(said)
                continue
            show_verdict(console, said)
            verdicts.append(said)
    if path.resolve() == files.learner.resolve():
        notes += state.record(files.course.memory, verdicts, state.fingerprints(reference, learner, path.parent))
        notes += _into_the_library(files, reference, learner, verdicts)
    for note in notes:
        show_note(console, note)
    show_summary(console, verdicts)
    return sum(verdict.status == "passed" for verdict in verdicts), len(verdicts)


def _into_the_library(
    files: ChapterFiles, reference: list[Cell], learner: list[Cell], verdicts: list[Verdict]
) -> list[str]:
    """Add the answers that passed to the learner's library, and return notes about it."""
    passed = [verdict.number for verdict in verdicts if verdict.status == "passed"]
    if not (passed and files.course.started):
        return []
    try:
        new, notes = library.add_passed(files.course, reference, learner, passed)
    except OSError as error:
        return [f"Your library could not be written: {error.strerror or error} ({error.filename})."]
    path = library.path_of(files.course, passed[0]).relative_to(files.course.folder)
    if new:
        notes.append(f"Your library has your code for {', '.join(new)} now: {path}. To see all of it: tplab mine")
    return notes
