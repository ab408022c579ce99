"""Check the notebooks of a class in parallel, each one as a copy and in processes of its own (see run.py).

Limits keep a submission that is merely broken from holding up the others. They don't stop one that means harm.
"""

import tempfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from tplab.course.grade.answers import merge
from tplab.course.grade.check_notebook import Verdict, check_notebook, exercises_of
from tplab.course.grade.run import Limits
from tplab.course.grade.submissions import Student, copy
from tplab.course.notebooks.cells import Cell, Unreadable, read_notebook


@dataclass
class Outcome:
    """The outcome of checking a notebook: a verdict on each exercise, and the student's code by exercise.

    problem: why the notebook can't be checked
    """

    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def is_complete(self) -> bool:
        return not self.problem and all(verdict.status != "not run" for verdict in self.verdicts)


def grade(
    students: list[Student], references: dict[int, list[Cell]], jobs: int, limits: Limits
) -> Generator[tuple[Student, int, Outcome], None, None]:
    """Check the students' notebooks, `jobs` at a time, and yield the outcome of each as soon as it is known.

    If the generator is closed, the checks that run are stopped.

    references: the executed solutions of the chapters that were handed in
    """
    with ThreadPoolExecutor(jobs) as pool:
        checks = {
            pool.submit(check, student, number, references[number], limits): (student, number)
            for student in students
            for number in student.notebooks
        }
        try:
            for done in as_completed(checks):
                yield *checks[done], done.result()
        finally:
            limits.stop.set()
            pool.shutdown(cancel_futures=True)


def check(student: Student, number: int, reference: list[Cell], limits: Limits) -> Outcome:
    """Check a copy of a student's notebook of a chapter."""
    outcome = Outcome()
    notebook = student.notebooks[number]
    with tempfile.TemporaryDirectory(prefix="tplab-grade-", ignore_cleanup_errors=True) as scratch:
        try:
            path = copy(notebook, Path(scratch, "copy"), beside=student.folder)
            learner = read_notebook(path)
            for piece in merge(reference, learner).pieces:
                if piece.role == "exercise":
                    outcome.answers[piece.number] = outcome.answers.get(piece.number, "") + piece.source.rstrip() + "\n"
            for said in check_notebook(reference, learner, path.parent, limits=limits):
                if isinstance(said, str):
                    outcome.notes.append(said)
                else:
                    outcome.verdicts.append(said)
        except Unreadable as error:
            outcome.problem = str(error).replace(str(path), "The notebook")
        except Exception as error:  # whatever is wrong with this notebook, the others get their verdicts
            outcome.problem = f"The notebook can't be checked. {type(error).__name__}: {error}"
    said_of = {verdict.number for verdict in outcome.verdicts}
    for exercise, title in exercises_of(reference).items():
        if exercise not in said_of:
            outcome.verdicts.append(Verdict(exercise, title, "not run", outcome.problem))
    return outcome
