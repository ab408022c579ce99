"""The status of a learner's answers in one chapter, and checks for the answers whose status is unknown."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tplab.course.grading.cell_dependencies import select
from tplab.course.grading.check_notebook import Verdict, check_notebook, exercises_of
from tplab.course.grading.merge import Merged, Piece, is_stub, merge
from tplab.course.learner.course_files import ChapterFiles
from tplab.course.notebooks.cells import Cell, Unreadable, read_notebook
from tplab.course.tools import state
from tplab.course.tools.fingerprint import Fingerprint, fingerprints

TO_DO = "is still to do"


@dataclass
class Found:
    """The answers in one chapter. Each exercise in `exercises` is in `passed`, in `problems`, or in `unknown`."""

    files: ChapterFiles
    path: Path  # the learner's notebook
    exercises: list[str]
    reference: list[Cell]
    learner: list[Cell]
    merged: Merged
    titles: dict[str, str]
    passed: dict[str, str] = field(default_factory=dict)  # exercise -> "its check passed"
    problems: dict[str, str] = field(default_factory=dict)  # exercise -> "is still to do"

    @property
    def solutions(self) -> dict[str, str]:
        """The course's solutions by exercise."""
        return {cell.marks["exercise"]: cell.source for cell in self.reference if "exercise" in cell.marks}

    def is_the_courses(self, exercise: str) -> bool:
        """Return True if all of the learner's cells that this answer needs are identical to the course's solution."""
        pieces = select(self.merged, [exercise], whole=False)
        return all(piece.role in ("setup", "given", "check") or self._is_solution(piece) for piece in pieces)

    def is_copied(self, exercise: str) -> bool:
        """Return True if the exercise's cell is identical to the course's solution."""
        pieces = [piece for piece in self.merged.pieces if (piece.role, piece.number) == ("exercise", exercise)]
        return all(self._is_solution(piece) for piece in pieces)

    def _is_solution(self, piece: Piece) -> bool:
        return piece.role == "exercise" and piece.source == self.solutions[piece.number]

    @property
    def unknown(self) -> list[str]:
        return [exercise for exercise in self.exercises if not {exercise} & (self.passed.keys() | self.problems.keys())]

    @property
    def is_in_the_course(self) -> bool:
        """True if this is the notebook that `tplab check` checks and stores verdicts for."""
        return self.path.resolve() == self.files.learner.resolve()

    def run_checks(self, say: Callable[[str], None]) -> None:
        """Run the checks of the unknown answers, one after another, and store the verdicts for `tplab progress`."""
        if not self.unknown:
            return
        say(f"chapter {self.files.number:02d}: checking your answers to {', '.join(self.unknown)} ...")
        verdicts = [
            said
            for said in check_notebook(self.reference, self.path, learner=self.learner, exercises=self.unknown)
            if isinstance(said, Verdict)
        ]
        for verdict in verdicts:
            if verdict.status == "passed":
                self.passed[verdict.number] = "its check passed"
            else:
                self.problems[verdict.number] = _problem(verdict)
        if self.is_in_the_course:
            state.record(self.files.course.memory, verdicts, self.fingerprints())

    def fingerprints(self) -> dict[str, Fingerprint]:
        return fingerprints(self.reference, self.learner, self.files)


def look_at(files: ChapterFiles, folder: Path, exercises: list[str]) -> Found:
    """Determine the status of the answers in a folder's notebook as far as possible without running anything."""
    path, reference = folder / f"{files.stem}.ipynb", read_notebook(files.reference)
    titles = exercises_of(reference)
    try:
        learner = read_notebook(path)
    except Unreadable as error:
        nothing = Found(files, path, exercises, reference, [], merge(reference, []), titles)
        nothing.problems = dict.fromkeys(exercises, f"can't be read. {error}")
        return nothing
    found = Found(files, path, exercises, reference, learner, merge(reference, learner), titles)
    entries = state.load(files.course.memory) if found.is_in_the_course else {}
    prints = found.fingerprints() if entries else {}
    answers = {piece.number: piece.source for piece in found.merged.pieces if piece.role == "exercise"}
    for exercise in exercises:
        entry, now = entries.get(exercise), prints.get(exercise)
        if exercise in found.merged.missing:
            found.problems[exercise] = f"is missing. {found.merged.missing[exercise]}"
        elif is_stub(answers[exercise], exercise):
            found.problems[exercise] = TO_DO
        elif found.is_the_courses(exercise):
            found.passed[exercise] = "the course's own, letter by letter"
        elif entry and now and (entry.answer, entry.check) == (now.answer, now.check):
            if entry.status == "passed":
                found.passed[exercise] = f"its check passed on {entry.checked}"
            else:
                found.problems[exercise] = f"did not pass its check on {entry.checked}"
    return found


def _problem(verdict: Verdict) -> str:
    if verdict.status == "to do":
        return TO_DO
    if verdict.status == "waiting":
        return f"waits for exercise {verdict.text}"
    first = verdict.text.strip().split("\n")[0]
    return f"does not pass its check. {first}" if verdict.status == "failed" else f"could not be checked. {first}"
