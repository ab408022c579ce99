"""Find the status of every exercise, from the learner's notebooks and from the verdicts of `tplab check`.

passed, failed    the status is verified if `tplab check` reached this verdict on exactly this code (see fingerprint.py)
                  and not verified if only the check cell in the saved notebook shows it
to do             the stub is still there, the code was edited since it was checked, or it was never checked
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tplab.course.grade.answers import is_stub, merge
from tplab.course.grade.check_notebook import exercises_of
from tplab.course.learner.course_files import ChapterFiles, Course, Misuse, all_chapters
from tplab.course.notebooks.cells import Cell, Unreadable, read_notebook
from tplab.course.notebooks.numbering import argument
from tplab.course.tools import state
from tplab.course.tools.fingerprint import Fingerprint, fingerprints
from tplab.course.tools.saved_outputs import shown

AS_SHOWN = "as your notebook shows"


@dataclass(frozen=True)
class Standing:
    """The status of one exercise. `minutes` is the chapter's estimate of how long the exercise takes."""

    number: str
    title: str
    minutes: int
    status: str  # "passed", "failed" or "to do"
    verified: bool = False
    note: str = ""


@dataclass(frozen=True)
class ChapterStanding:
    number: int
    title: str
    path: Path
    exercises: tuple[Standing, ...]
    problem: str = ""  # why the notebook can't be read
    stated: int = 0  # minutes for the whole chapter, according to its first page

    @property
    def passed(self) -> int:
        return sum(exercise.status == "passed" for exercise in self.exercises)

    @property
    def shown(self) -> int:
        """How many of the passed exercises pass according to the saved notebook but aren't verified."""
        return sum(exercise.status == "passed" and not exercise.verified for exercise in self.exercises)

    @property
    def begun(self) -> bool:
        """Whether some of the exercises were tried, but not all of them pass."""
        return self.minutes_left > 0 and any(one.status != "to do" or one.note for one in self.exercises)

    @property
    def minutes(self) -> int:
        """How many minutes the chapter takes with its text, or its exercises alone if the chapter doesn't say."""
        return self.stated or sum(exercise.minutes for exercise in self.exercises)

    @property
    def minutes_left(self) -> int:
        """The share of `minutes` that belongs to exercises that don't pass yet."""
        left = sum(exercise.minutes for exercise in self.exercises if exercise.status != "passed")
        return round(self.minutes * left / max(1, sum(exercise.minutes for exercise in self.exercises)))


def standings(course: Course, numbers: list[int] | None = None) -> list[ChapterStanding]:
    """Return the status of every chapter, or of the chapters in `numbers`. This runs no cells."""
    known = all_chapters(course)
    entries = state.load(course.memory)
    return [standing(known[number], entries) for number in numbers or known]


def next_exercise(course: Course) -> str:
    """Return the number of the first exercise that doesn't pass. Raises Misuse if all of them do."""
    found = (one.number for chapter in standings(course) for one in chapter.exercises if one.status != "passed")
    number = next(found, "")
    if not number:
        raise Misuse("You have passed every exercise. To see one of them again, add its number: 4.2")
    return number


def standing(files: ChapterFiles, entries: dict[str, state.Entry]) -> ChapterStanding:
    """Return the status of one chapter. Raises Unreadable if the course's solution notebook can't be read."""
    reference = read_notebook(files.reference)
    titles = exercises_of(reference)
    minutes = {str(cell.marks["task"]): int(cell.marks.get("minutes", 0)) for cell in reference if "task" in cell.marks}

    def chapter(exercises: list[Standing], problem: str = "") -> ChapterStanding:
        return ChapterStanding(
            files.number, files.title(reference), files.learner, tuple(exercises), problem, stated_minutes(reference)
        )

    try:
        learner = read_notebook(files.learner)
    except Unreadable as error:
        blank = [Standing(number, title, minutes.get(number, 0), "to do") for number, title in titles.items()]
        return chapter(blank, f"{error} To begin anew: tplab reset {argument(files.number)} (it keeps a copy)")
    merged = merge(reference, learner)
    answers = {piece.number: piece.source for piece in merged.pieces if piece.role == "exercise"}
    prints = fingerprints(reference, learner, files)
    found = []
    for number, title in titles.items():
        if number in merged.missing:
            judged = "to do", False, merged.missing[number]
        else:
            judged = _judge(number, answers[number], prints[number], entries.get(number), learner)
        found.append(Standing(number, title, minutes.get(number, 0), *judged))
    return chapter(found)


def stated_minutes(reference: list[Cell]) -> int:
    """Return how many minutes a chapter takes without optional sections, as its first page says (0: it doesn't)."""
    texts = (cell.source for cell in reference[:6] if cell.kind == "markdown")
    found = next(filter(None, (re.search(r"About (\d+) minutes", text) for text in texts)), None)
    return int(found[1]) if found else 0


def _judge(
    number: str, answer: str, now: Fingerprint, entry: state.Entry | None, learner: list[Cell]
) -> tuple[str, bool, str]:
    """Return the status of an exercise that has an answer, whether the status is verified, and a note."""
    if is_stub(answer, number):
        return "to do", False, ""
    if entry and (entry.answer, entry.check) == (now.answer, now.check):
        return entry.status, True, f"checked {entry.checked}"
    if entry and entry.answer == now.answer:
        return "to do", False, "the course's check has changed since; check it again"
    is_old = entry is not None and entry.output == now.output  # it was there when different code was checked
    told = "" if is_old else shown(learner, number)
    if told:
        return told, False, AS_SHOWN
    return "to do", False, "edited since it was checked" if entry else "not checked yet"
