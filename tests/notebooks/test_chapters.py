"""Every cell of every chapter runs with the reference answers, and the checks say what the stored notebook shows.

`make test-notebooks` runs these, because they take minutes. `make notebooks` has run every cell, too, and `make stale`
says whether it has done so since a chapter changed.
"""

import nbformat
import pytest

from tests import ROOT
from tests.chapter_runner import chapter
from tests.course.test_chapters import STEMS, spread
from tplab.course.notebooks.build import skeleton
from tplab.course.notebooks.numbering import number_of
from tplab.course.notebooks.outputs import execute

pytestmark = pytest.mark.timeout(900)


def verdicts(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """The text of each check's result."""
    checks = [cell for cell in notebook.cells if "check" in cell.metadata.get("tplab", {})]
    return {cell.metadata["tplab"]["check"]: cell.outputs[-1]["data"]["text/plain"] for cell in checks}


@pytest.mark.parametrize("stem", spread(STEMS))
def test_every_cell_runs_and_the_checks_show_the_stored_results(stem):
    stored = nbformat.read(ROOT / "solutions" / f"{stem}.ipynb", as_version=4)
    executed = execute(skeleton(chapter(number_of(stem)), blank=False), ROOT / "solutions")
    assert verdicts(executed) == verdicts(stored)
    assert len(verdicts(stored)) == len(chapter(number_of(stem)).of_role("exercise"))
