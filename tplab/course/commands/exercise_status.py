"""Find the status of every exercise, from the learner's notebooks and from the verdicts of `tplab check`.

passed, failed    `tplab check` reached this verdict on exactly this code (see state.py), or else the check cell in the
                  saved notebook shows it
to do             the stub is still there, the code has changed since it was checked, or it was never checked
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tplab.course.commands import state
from tplab.course.grade.answers import is_stub, merge
from tplab.course.grade.check_notebook import exercises_of
from tplab.course.learn.course_files import ChapterFiles, Course, Misuse, all_chapters, chapter
from tplab.course.notebooks.cells import Cell, Unreadable, read_notebook
from tplab.course.notebooks.numbering import EXERCISE, argument, chapter_of

AS_SHOWN = "as your notebook shows"


@dataclass(frozen=True)
class Standing:
    """The status of one exercise."""

    number: str
    title: str
    status: str  # "passed", "failed" or "to do"
    note: str = ""  # how we know


@dataclass(frozen=True)
class ChapterStanding:
    number: int
    title: str
    path: Path
    exercises: tuple[Standing, ...]
    problem: str = ""  # why the notebook can't be read

    @property
    def passed(self) -> int:
        return sum(exercise.status == "passed" for exercise in self.exercises)

    @property
    def following(self) -> Standing | None:
        """The first exercise that doesn't pass, or None if all of them do."""
        return next((exercise for exercise in self.exercises if exercise.status != "passed"), None)

    @property
    def begun(self) -> bool:
        """Whether some of the exercises were tried, but not all of them pass."""
        return self.following is not None and any(one.status != "to do" or one.note for one in self.exercises)


def find_exercise(course: Course, number: str, command: str) -> tuple[ChapterFiles, list[Cell]]:
    """Return the files of the chapter that an exercise is in, and the cells of its solution. Raises Misuse if none is.

    command: how the user should have written the command, such as "tplab solution 4.2"
    """
    if not re.fullmatch(EXERCISE, number):
        raise Misuse(f"There is no exercise {number} here. Write it like this: {command}")
    files = chapter(course, chapter_of(number))
    reference = read_notebook(files.reference)
    if number not in exercises_of(reference):
        there = ", ".join(exercises_of(reference))
        raise Misuse(f"There is no exercise {number} in chapter {files.stem}. There are: {there}.")
    return files, reference


def next_exercise(course: Course) -> str:
    """Return the number of the first exercise that doesn't pass. Raises Misuse if all of them do."""
    for one in standings(course):
        if one.following:
            return one.following.number
    raise Misuse("You have passed every exercise. To see one of them again, add its number: 4.2")


def standings(course: Course) -> list[ChapterStanding]:
    """Return the status of every chapter. This runs no cells."""
    entries = state.load(course.memory)
    return [standing(files, entries) for files in all_chapters(course).values()]


def standing(files: ChapterFiles, entries: dict[str, state.Entry]) -> ChapterStanding:
    """Return the status of one chapter. Raises Unreadable if the course's solution notebook can't be read."""
    reference = read_notebook(files.reference)
    titles, problem = exercises_of(reference), ""
    try:
        judged = _judge_all(reference, read_notebook(files.learner), files.learner.parent, entries)
    except Unreadable as error:
        judged = dict.fromkeys(titles, ("to do", ""))
        problem = f"{error} To begin anew: tplab reset {argument(files.number)} (it keeps a copy)"
    exercises = tuple(Standing(number, title, *judged[number]) for number, title in titles.items())
    return ChapterStanding(files.number, files.title(reference), files.learner, exercises, problem)


def _judge_all(
    reference: list[Cell], learner: list[Cell], folder: Path, entries: dict[str, state.Entry]
) -> dict[str, tuple[str, str]]:
    """Return the status of each exercise in the learner's notebook, and a note."""
    merged = merge(reference, learner)
    judged = {number: ("to do", why) for number, why in merged.missing.items()}
    answers = {piece.number: piece.source for piece in merged.pieces if piece.role == "exercise"}
    for number, now in state.fingerprints(reference, learner, folder).items():
        entry = entries.get(number)
        is_old = entry is not None and entry.output == now.output  # it was there when different code was checked
        if entry and entry.code == now.code:
            judged[number] = entry.status, f"checked {entry.checked}"
        elif is_stub(answers[number], number):
            judged[number] = "to do", ""
        elif status := "" if is_old else state.shown(learner, number):
            judged[number] = status, AS_SHOWN
        else:
            judged[number] = "to do", "changed since it was checked" if entry else "not checked yet"
    return judged
