"""Reports of `tplab check` name the learner's cells by exercise: the numbers there are not the notebook's."""

import sys
import tempfile
from types import SimpleNamespace

import pytest

from tests.course import tiny
from tplab.course.feedback.tracebacks import readable_traceback
from tplab.course.grade.check_notebook import check_notebook
from tplab.course.notebooks.cells import read_notebook
from tplab.runtime import failures

pytestmark = pytest.mark.share(2)

CELL, OTHER = (f"{tempfile.gettempdir()}/ipykernel_123/{number}.py" for number in (456, 789))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        tiny.make_unexecuted(folder, tiny.source(2))
    return folder


def test_check_names_the_exercise_and_the_line_of_its_cell(root, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(root))
    mine = tiny.Learner(root / "chapters" / "90_tiny.ipynb")
    mine.answer(1, "return x + None")
    mine.answer(2, "y = 2\n    return helper(x)")
    mine.insert(mine.place("exercise-90-2"), "def helper(x):\n    return x + None")
    path = mine.save(root / "chapters" / "mine.ipynb")
    said = check_notebook(read_notebook(root / "solutions" / "90_tiny.ipynb"), path)
    first, second = [" ".join(verdict.text.split()) for verdict in said if getattr(verdict, "status", "") == "failed"]
    assert "your cell of exercise 90.1, line 2, in double_1 return x + None" in first
    assert "your cell of exercise 90.2, line 3, in double_2 return helper(x)" in second
    assert "another cell, line 2, in helper" in second
    assert "ipykernel" not in first + second


@pytest.fixture
def notebook(monkeypatch):
    """A kernel in which cell 7 was run."""
    shell = SimpleNamespace(compile=SimpleNamespace(_filename_map={CELL: 7}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(failures, "_cell_names", {})


def test_in_the_learners_own_notebook_a_cell_has_its_number(notebook) -> None:
    assert failures.cell_of(CELL) == "cell [7]"
    try:
        exec(compile("\n\n1 / 0", CELL, "exec"))
    except ZeroDivisionError as error:
        told = readable_traceback(error)
    assert "  cell [7], line 3, in <module>" in told
    assert "ZeroDivisionError: division by zero" in told
    assert "ipykernel" not in told


def test_a_named_cell_goes_by_its_name_and_the_others_by_none(notebook) -> None:
    failures.name_cell(CELL, "your cell of exercise 4.2")
    assert failures.cell_of(CELL) == "your cell of exercise 4.2"
    assert failures.cell_of(OTHER) == "another cell"
    assert failures.cell_of("model.py") is None
