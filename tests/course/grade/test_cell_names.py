"""Reports of `tplab check` name the learner's cells by exercise: the numbers there are not the notebook's."""

import sys
import tempfile
from types import SimpleNamespace

import pytest

from tplab.course.feedback.tracebacks import readable_traceback
from tplab.runtime import failures

CELL, OTHER = (f"{tempfile.gettempdir()}/ipykernel_123/{number}.py" for number in (456, 789))


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
