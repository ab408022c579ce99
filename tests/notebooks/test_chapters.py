"""Every cell of every chapter runs: with its answers, all of it passes, and without them, it's to do and nothing else.

`make test-notebooks` runs these, because they take minutes. `make notebooks` has run every cell, too, and `make stale`
says whether it has done so since a chapter changed.
"""

from collections.abc import Collection

import pytest

from tests import ROOT
from tests.course.chapter_cells import that_need_answers, with_what_they_need
from tests.course.test_chapters import STEMS, spread
from tests.wrong_answers import chapter
from tplab.course.grading.cell_dependencies import has_side_effects
from tplab.course.grading.check_notebook import Note, Verdict, check_notebook
from tplab.course.notebooks.cells import read_notebook
from tplab.course.notebooks.numbering import number_of

pytestmark = pytest.mark.timeout(900)


def results(stem: str, folder: str, only: Collection[str] = ()) -> tuple[dict[str, str], list[str]]:
    """What `tplab check` says about a notebook: status by exercise, and notes. Every cell is run, or `only` these."""
    reference = [cell for cell in read_notebook(ROOT / "solutions" / f"{stem}.ipynb") if not only or cell.id in only]
    path = ROOT / folder / f"{stem}.ipynb"
    learner = [cell for cell in read_notebook(path) if not only or cell.id in only]
    stream = list(check_notebook(reference, path, learner=learner, everything=True))
    statuses = {said.number: f"{said.status} {said.text}".strip() for said in stream if isinstance(said, Verdict)}
    return statuses, [said.text for said in stream if isinstance(said, Note)]


@pytest.mark.parametrize("stem", spread(STEMS))
def test_solution_passes(stem):
    """And every cell runs that needs an answer. The others run the same in the blank chapter, below."""
    answered = that_need_answers(stem)
    only = with_what_they_need(
        stem, lambda cell: cell.role in ("exercise", "check") or cell.id in answered or has_side_effects(cell.source)
    )
    statuses, notes = results(stem, "solutions", only)
    assert statuses == dict.fromkeys(chapter(number_of(stem)).of_role("exercise"), "passed")
    assert notes == []


@pytest.mark.parametrize("stem", spread(STEMS))
def test_blank_chapter_is_to_do_and_nothing_else_fails(stem):
    statuses, notes = results(stem, "chapters")
    exercises = list(chapter(number_of(stem)).of_role("exercise"))
    assert list(statuses) == exercises
    for place, (exercise, status) in enumerate(statuses.items()):
        assert status in ["to do", *(f"waiting {earlier}" for earlier in exercises[:place])], exercise
    assert notes == []
