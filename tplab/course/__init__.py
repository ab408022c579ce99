"""The machinery behind every chapter: notebooks, checks, hints, and the `tplab` command.

notebooks   from a chapter's source to its two notebooks
checks      what a check is made of: cases, observations, comparisons, questions
feedback    how a verdict is shown, and hints
chapters    the checks, predictions and symptoms of each chapter
grading     `tplab check`: the learner's answers in the reference chapter, run by nbval
tools       the command `tplab`

A notebook uses five functions:

    check("4.1", answer)         run an exercise's check
    predict("4.a", calls=1)      compare a prediction
    show_failure()               run a program that is wrong on purpose
    symptoms(4)                  what you see, what it is
    progress()                   how far you are, in every chapter
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tplab.course.checks.exercises import check
    from tplab.course.checks.failures import show_failure
    from tplab.course.checks.predictions import predict
    from tplab.course.checks.symptoms import symptoms
    from tplab.course.tools.progress import progress

__all__ = ["check", "predict", "progress", "show_failure", "symptoms"]

_HOMES = {
    "check": "checks.exercises",
    "predict": "checks.predictions",
    "progress": "tools.progress",
    "show_failure": "checks.failures",
    "symptoms": "checks.symptoms",
}


def __getattr__(name: str) -> Any:
    """Import torch only for those who need it: `tplab check` reads and merges notebooks without."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
