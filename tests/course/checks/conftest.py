"""The table of mistakes of exercises in chapter 90."""

import pytest

from tplab.course.checks.trials import Trial
from tplab.course.notebooks.mistakes import Table


@pytest.fixture
def table(chapter, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every exercise has the module's ROWS, if it has any."""
    rows = getattr(request.module, "ROWS", ())
    monkeypatch.setattr(Trial, "table", lambda self, number: Table(number, rows))
