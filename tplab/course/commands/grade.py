"""`tplab grade`: check a folder of students' notebooks in parallel, and write a CSV file and a page per student.

tplab grade submissions                      every chapter that was handed in
tplab grade submissions --chapter 4          only chapter 4; remarks mention notebooks of other chapters
tplab grade submissions --jobs 8 --timeout 600 --memory 4
"""

import argparse
import os
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tplab.course.grade import report
from tplab.course.grade.check_notebook import exercises_of
from tplab.course.grade.many import Outcome, grade
from tplab.course.grade.run import Limits
from tplab.course.grade.submissions import Student, find_students
from tplab.course.learn.course_files import Misuse, add_root, all_chapters, chapter, course_or_material
from tplab.course.notebooks.cells import Cell, read_notebook
from tplab.course.notebooks.numbering import chapter_argument, heading

FOLDERS = """
FOLDER holds a notebook or a folder for each student. A student's folder may hold several chapters, and files that they
need. Nothing in FOLDER is changed, because each notebook runs as a copy. OUT gets grades.csv (a row per student, a
column per exercise), index.html, and a page per student.

A notebook is a program that runs under your account, and the limits only stop one that is broken. If you don't trust
your students, run this command in a container without a network, as docs/teaching.md ("Grade a class") shows.
"""


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "grade",
        help="check a folder of students' notebooks, for teachers",
        description="Check the notebooks of a class.",
        epilog=FOLDERS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the submissions, see below")
    parser.add_argument(
        "--chapter", type=chapter_argument, metavar="N", help="only this chapter (default: all handed in)"
    )
    parser.add_argument("--out", type=Path, metavar="OUT", help="where the results go (default: FOLDER-grades)")
    parser.add_argument("--jobs", type=int, metavar="J", help="notebooks at a time (default: half of the cores)")
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="seconds for a notebook (900)")
    parser.add_argument("--memory", type=float, default=6, metavar="GB", help="memory for a notebook (6)")
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command. Return 0 if every notebook was checked to the end, whatever the verdicts, and 1 if not."""
    folder, out = _folders(options)
    course = course_or_material(options)
    chapters = all_chapters(course)
    if options.chapter is not None:
        chapter(course, options.chapter)  # raises Misuse if there's no such chapter
    students = find_students(folder, {number: files.stem for number, files in chapters.items()}, options.chapter, out)
    if not students:
        raise Misuse(f"{folder} is empty. It should hold one notebook or one folder per student.")
    handed_in = {number for student in students for number in student.notebooks} | {options.chapter} - {None}
    limits = Limits(seconds=options.timeout, memory=int(options.memory * 1e9))
    jobs = options.jobs or max(1, (os.cpu_count() or 1) // 2)
    references = {number: read_notebook(chapters[number].reference) for number in sorted(handed_in)}
    outcomes = _check(students, references, jobs, limits, console)
    grades = [report.Grade(student, outcomes[student.entry]) for student in students]
    numbers = [exercise for reference in references.values() for exercise in exercises_of(reference)]
    out.mkdir(parents=True, exist_ok=True)
    report.write(out, grades, numbers)
    passed = sum(one.passed for one in grades)
    console.print(Text(f"{passed} of {len(grades) * len(numbers)} exercises passed.", style="bold"))
    console.print(f"{out / 'index.html'}\n{out / report.CSV}", soft_wrap=True)
    return int(not all(outcome.is_complete for grade in grades for outcome in grade.outcomes.values()))


def _folders(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return FOLDER and OUT. Raises Misuse if one of them can't be used."""
    folder = options.folder.resolve()
    if not folder.is_dir():
        raise Misuse(f"There is no folder {options.folder}. It should hold one notebook or one folder per student.")
    out = (options.out or folder.with_name(folder.name + "-grades")).resolve()
    if out == folder:
        raise Misuse(f"The results can't go into {options.folder} itself, among the submissions. Choose another --out.")
    if out.exists() and not (out.is_dir() and ((out / report.CSV).exists() or not any(out.iterdir()))):
        raise Misuse(f"{out} holds files that aren't from tplab grade. Choose an --out that is new or empty.")
    return folder, out


def _check(
    students: list[Student], references: dict[int, list[Cell]], jobs: int, limits: Limits, console: Console
) -> dict[str, dict[int, Outcome]]:
    """Check all notebooks, print a line about each, and return their outcomes by student and chapter."""
    outcomes: dict[str, dict[int, Outcome]] = {student.entry: {} for student in students}
    total = sum(len(student.notebooks) for student in students)
    with closing(grade(students, references, jobs, limits)) as stream:
        for place, (student, number, outcome) in enumerate(stream, 1):
            outcomes[student.entry][number] = outcome
            passed = sum(verdict.status == "passed" for verdict in outcome.verdicts)
            told = f"{place} of {total}: {report.short(student.name, 60)}, {heading(number).lower()}, "
            told += f"{passed} of {len(outcome.verdicts)} passed. {outcome.problem}"
            console.print(Text(told.rstrip()))
    return {entry: dict(sorted(by_chapter.items())) for entry, by_chapter in outcomes.items()}
