"""A chapter of our own, number 90, for tests of the machinery. A file may have a `root` of its own."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.course import tiny
from tplab.course.checks import exercises, predictions, trials


@pytest.fixture
def chapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An empty `tplab.course.exercises.ch90`; put PREDICTIONS into it.

    The exercises of one test are forgotten before the next.
    """
    module = ModuleType("tplab.course.exercises.ch90")
    monkeypatch.setitem(sys.modules, "tplab.course.exercises.ch90", module)
    monkeypatch.setattr(predictions, "_tried", {})
    monkeypatch.setattr(exercises, "_failed", {})
    registered = dict(trials.EXERCISES)
    yield module
    trials.EXERCISES.clear()
    trials.EXERCISES.update(registered)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A course of one chapter, number 90, with three exercises, whose solution was never executed."""
    tiny.make_unexecuted(tmp_path, tiny.source(3))
    return tmp_path


@pytest.fixture
def learner(root: Path) -> tiny.Learner:
    return tiny.Learner(root / "chapters" / "90_tiny.ipynb")
