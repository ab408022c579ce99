"""Libraries of learners, written from the reference answers with some of them changed."""

import shutil
from dataclasses import replace
from pathlib import Path

from tests import ROOT
from tests.chapter_runner import wrong_source
from tplab.capstone.own_layers.find import Answers, find_answers
from tplab.course.learn import library
from tplab.course.learn.course_files import MARKER, MEMORY, Course, all_chapters
from tplab.course.learn.my_tp import FOR_A_GPT
from tplab.course.notebooks.cells import Cell, read_notebook
from tplab.course.notebooks.numbering import chapter_files, chapter_of, number_of


class Libraries:
    """Makes the answers of learners in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = Course(ROOT, folder / "base")
        (self.base.memory).mkdir(parents=True)
        (self.base.memory / MARKER).write_text("{}")
        for number, files in all_chapters(self.base).items():
            cells = read_notebook(files.reference)
            mine = [exercise for exercise in FOR_A_GPT if chapter_of(exercise) == number]
            library.add_passed(self.base, cells, cells, mine)

    def course(self, sources: dict[str, str]) -> Course:
        """A learner's folder in which some exercises were answered in other words."""
        made = Course(ROOT, self.folder / f"learner-{len([*self.folder.iterdir()])}")
        shutil.copytree(self.base.folder, made.folder)
        assert (made.folder / MEMORY / MARKER).exists()
        for exercise, source in sources.items():
            reference = read_notebook(all_chapters(made)[chapter_of(exercise)].reference)
            learner = [replace(cell, source=source) if is_answer(cell, exercise) else cell for cell in reference]
            assert learner != reference
            library.add_passed(made, reference, learner, [exercise])
        return made

    def answers(self, sources: dict[str, str] | None = None) -> Answers:
        return find_answers(self.course(sources or {}).folder)


def is_answer(cell: Cell, exercise: str) -> bool:
    return cell.marks.get("exercise") == exercise


def solution(exercise: str) -> str:
    """The source of the course's solution."""
    path = next(
        path for path in chapter_files(ROOT / "solutions", ".ipynb") if number_of(path.stem) == chapter_of(exercise)
    )
    return next(cell.source for cell in read_notebook(path) if is_answer(cell, exercise))


def swapped(exercise: str, *swaps: tuple[str, str], before: str = "") -> dict[str, str]:
    """The solution with parts of it replaced, and with code before it."""
    source = solution(exercise)
    for old, new in swaps:
        assert old in source
        source = source.replace(old, new)
    return {exercise: before + source}


def wrong(exercise: str, name: str) -> dict[str, str]:
    """One of our wrong answers to an exercise."""
    return {exercise: wrong_source(exercise, name)}
