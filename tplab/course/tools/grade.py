"""`tplab grade`: check a folder of students' notebooks in parallel, and write a CSV file and a page per student.

tplab grade submissions                      every chapter that was handed in
tplab grade submissions --chapter 4          only chapter 4; remarks mention notebooks of other chapters
tplab grade submissions --jobs 8 --timeout 600 --memory 4
"""

import argparse
import hashlib
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path

import psutil
from filelock import FileLock, Timeout
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tplab.course.grading.check_notebook import exercises_of
from tplab.course.grading.check_output import LOOK
from tplab.course.learner.course_files import ChapterFiles, Misuse, add_root, all_chapters, chapter, course_or_material
from tplab.course.notebooks.cells import read_notebook
from tplab.course.notebooks.kernels import CELL_TIMEOUT
from tplab.course.notebooks.numbering import chapter_argument, heading
from tplab.course.tools.grading_many import jobs, report
from tplab.course.tools.grading_many.limits import Limits, namespace, protection
from tplab.course.tools.grading_many.store import TRIES, Store, checks_hash, key
from tplab.course.tools.grading_many.submissions import Notebook, Student, find_students

GB = 1e9

FOLDERS = """
FOLDER holds one file or one folder per student:

  Ann.ipynb                       the cells say which chapter it is, so any name will do
  Ann_04_parallel_linear.ipynb    one of Ann's chapters; others may be next to it
  Ben/04_parallel_linear.ipynb    one of Ben's chapters; files that it needs may be next to it

Nothing in FOLDER is changed: each notebook runs as a copy, in processes of its own, with limits. OUT gets grades.csv
(a row per student, a column per exercise), index.html, and a page per student. Run the command again after adding or
replacing submissions, or if it was interrupted, and it only checks what it hasn't yet.

This isn't a container. CONTRIBUTING.md ("Grade a class") says what a submission can still do, and how to prevent it.
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
    parser.add_argument(
        "--cell-timeout", type=float, default=CELL_TIMEOUT, metavar="S", help=f"seconds for a cell ({CELL_TIMEOUT:g})"
    )
    parser.add_argument("--memory", type=float, default=6, metavar="GB", help="memory for a notebook (6)")
    parser.add_argument("--disk", type=float, default=2, metavar="GB", help="files that a notebook may write (2)")
    parser.add_argument("--processes", type=int, default=256, metavar="P", help="processes of a notebook (256)")
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command. Return 0 if every notebook was checked to the end, whatever the verdicts, and 1 if not."""
    folder, out = _folders(options)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / "lock", timeout=0):
            return _grade(options, console, folder, out)
    except Timeout:
        raise Misuse(f"Another tplab grade is writing to {out}. Wait for it, or choose a different --out.") from None
    except OSError as error:
        told = f"{error.strerror or error} ({error.filename or out})"
        raise Misuse(f"Grading had to stop: {told}. Once that's mended, the same command goes on.") from error


def _folders(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return FOLDER and OUT. Raises Misuse if one of them can't be used, or if another option makes no sense."""
    folder = options.folder.resolve()
    if not folder.is_dir():
        raise Misuse(f"There is no folder {options.folder}. It should hold one notebook or one folder per student.")
    out = (options.out or folder.with_name(folder.name + "-grades")).resolve()
    if out == folder:
        raise Misuse(f"The results can't go into {options.folder} itself, among the submissions. Choose another --out.")
    if out.exists() and any(out.iterdir()) and not (out / "outcomes").is_dir():
        raise Misuse(f"{out} holds files that aren't from tplab grade. Choose an --out that is new or empty.")
    for name in ("jobs", "timeout", "cell_timeout", "memory", "disk", "processes"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise Misuse(f"--{name.replace('_', '-')} {value:g} can't be. Give a number above 0.")
    return folder, out


def _grade(options: argparse.Namespace, console: Console, folder: Path, out: Path) -> int:
    course = course_or_material(options)
    chapters = all_chapters(course)
    if options.chapter is not None:
        chapter(course, options.chapter)  # raises Misuse if there's no such chapter
    limits = Limits(
        options.timeout, options.cell_timeout, int(options.memory * GB), int(options.disk * GB), options.processes
    )
    students = find_students(folder, chapters, options.chapter, out)
    if not students:
        raise Misuse(f"{folder} is empty. It should hold one notebook or one folder per student.")
    handed_in = {number for student in students for number in student.notebooks}
    if options.chapter is not None:
        handed_in.add(options.chapter)
    plan = Plan(Store(out), students, {number: chapters[number] for number in sorted(handed_in)}, limits)
    prefix = namespace()
    safe = protection(prefix)
    before = f"{len(plan.outcomes)} notebooks were checked before, and {len(plan.works)} are to be checked."
    for told in (*safe, before):
        console.print(Text(told, style="dim"))
    if not _check(plan, options.jobs or _default_jobs(limits.memory), limits, prefix, out, console):
        console.print("Stopped. To go on, run the same command again.")
        return 130
    grades = plan.grades()
    report.write(out, grades, plan.titles, safe)
    _show(console, grades, sum(map(len, plan.titles.values())))
    console.print(f"{out / 'index.html'}\n{out / 'grades.csv'}", soft_wrap=True)
    return int(any(outcome.ended or outcome.problem for outcome in plan.outcomes.values()))


class Plan:
    """What is known about the students' notebooks (`outcomes`), and what is still to be checked (`works`), by key.

    The key of a notebook is a hash of everything that its verdicts depend on (see grading_many/store.py).
    """

    def __init__(self, store: Store, students: list[Student], chapters: dict[int, ChapterFiles], limits: Limits):
        self.store, self.students = store, students
        self.titles = {number: exercises_of(read_notebook(files.reference)) for number, files in chapters.items()}
        self.outcomes: dict[str, jobs.Outcome] = {}
        self.works: dict[str, jobs.Work] = {}
        self.names: dict[str, list[str]] = {}
        self._checks = {number: checks_hash(files, limits) for number, files in chapters.items()}
        for student in students:
            for number, notebook in student.notebooks.items():
                self._add(student, notebook, chapters[number])

    def _add(self, student: Student, notebook: Notebook, files: ChapterFiles) -> None:
        name = self._key(notebook)
        self.names.setdefault(name, []).append(student.name)
        if known := self.store.load(name):
            self.outcomes[name] = known
        elif name not in self.works:
            tries = self.store.tries(name)
            work = jobs.Work(notebook, files.reference, self.titles[notebook.chapter], name, alone=tries > 0)
            if tries >= TRIES:
                self.outcomes[name] = jobs.not_run(work, self.store.given_up(name))
            else:
                self.works[name] = work

    def _key(self, notebook: Notebook) -> str:
        return key(notebook, self._checks[notebook.chapter])

    def grades(self) -> list[report.Grade]:
        return [
            report.Grade(student, {n: self.outcomes[self._key(book)] for n, book in sorted(student.notebooks.items())})
            for student in self.students
        ]


def _check(plan: Plan, count: int, limits: Limits, prefix: list[str], out: Path, console: Console) -> bool:
    """Check the notebooks in `plan.works`, and print a line about each. Return False if the teacher has stopped it."""
    scratch = Path(tempfile.gettempdir(), "tplab-grade-" + hashlib.sha256(bytes(out)).hexdigest()[:8])
    for left in scratch.parent.glob(f"{scratch.name}-*"):
        jobs.remove(left)  # an earlier run that was killed left it
    begun: set[str] = set()

    def starts(work: jobs.Work) -> None:
        if work.key not in begun:  # a check starts a second time if another submission may have ended it
            begun.add(work.key)
            plan.store.start(work.key)

    start = time.monotonic()
    works = list(plan.works.values())
    stream = jobs.run(works, jobs=count, limits=limits, prefix=prefix, scratch=scratch, starts=starts)
    with closing(stream):
        try:
            for place, (work, outcome) in enumerate(stream, 1):
                plan.outcomes[work.key] = outcome
                plan.store.save(work.key, outcome)
                begun.discard(work.key)
                passed = sum(verdict.status == "passed" for verdict in outcome.verdicts)
                names = plan.names[work.key]
                who = report.short(names[0], 60) + (f" and {len(names) - 1} with the same file" if names[1:] else "")
                told = f"{place} of {len(works)}, {time.monotonic() - start:.0f} s: {who}"
                told += f", {heading(work.notebook.chapter).lower()}, {passed} of {len(work.exercises)} passed. "
                told += outcome.problem or outcome.ended
                console.print(Text(told.rstrip()))
        except KeyboardInterrupt:
            for name in begun:
                plan.store.forget(name)
            return False
    return True


def _default_jobs(memory: int) -> int:
    """Return how many notebooks to check at a time. Each check runs several ranks and may use up its memory limit."""
    return max(1, min((os.cpu_count() or 1) // 2, psutil.virtual_memory().total // memory))


def _show(console: Console, grades: list[report.Grade], total: int) -> None:
    """Print a table with a row per student."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("student", overflow="fold")
    for status in LOOK:
        table.add_column(status, justify="right")
    table.add_column("remarks", overflow="fold")
    for grade in grades:
        statuses = list(grade.statuses.values())
        counts = [str(statuses.count(status) or "") for status in LOOK]
        remarks = report.short(" ".join(grade.remarks), 160)
        table.add_row(Text(report.visible(grade.student.name)), *counts, Text(report.visible(remarks)))
    console.print(table)
    passed = sum(grade.passed for grade in grades)
    console.print(Text(f"{passed} of {len(grades) * total} exercises passed.", style="bold"))
