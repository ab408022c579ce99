"""A chapter of our own, number 90, for tests of the machinery. A file may have a `root` of its own."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.course import tiny
from tplab.course.checks import predictions


@pytest.fixture
def chapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An empty `tplab.course.exercises.ch90`; put PREDICTIONS into it."""
    module = ModuleType("tplab.course.exercises.ch90")
    monkeypatch.setitem(sys.modules, "tplab.course.exercises.ch90", module)
    monkeypatch.setattr(predictions, "_tried", {})
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A course of one chapter, number 90, with three exercises, whose solution was never executed."""
    tiny.make_unexecuted(tmp_path, tiny.source(3))
    return tmp_path


@pytest.fixture
def learner(root: Path) -> tiny.Learner:
    return tiny.Learner(root / "chapters" / "90_tiny.ipynb")
