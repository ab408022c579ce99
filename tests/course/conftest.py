"""A chapter of our own, number 90, for tests of the machinery."""

import sys
from types import ModuleType

import pytest

from tplab.course.checks import predictions


@pytest.fixture
def chapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An empty `tplab.course.exercises.ch90`; put PREDICTIONS and SYMPTOMS into it."""
    module = ModuleType("tplab.course.exercises.ch90")
    monkeypatch.setitem(sys.modules, "tplab.course.exercises.ch90", module)
    monkeypatch.setattr(predictions, "_tried", {})
    return module
