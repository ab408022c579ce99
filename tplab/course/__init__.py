"""The machinery behind every chapter: notebooks, checks, hints, and the `tplab` command.

notebooks   build a chapter's two notebooks from its source
checks      provide the building blocks of a check: cases, observations, comparisons, and questions
feedback    show the learner the verdict, tracebacks, and hints after a check
exercises   define the checks, predictions, and symptoms of each chapter
learn       manage the learner's copies of the chapters, and the library that collects their answers
grade       judge the answers in a notebook, or in those of a class, by running nbval on the reference
commands    implement the `tplab` commands

Notebooks call six functions:

    check("4.1", answer)         run an exercise's check
    predict("4.a", calls=1)      compare a prediction with the answer
    show_failure()               run a program that is broken on purpose
    symptoms(4)                  show a table of symptoms and their causes
    progress()                   show your progress in every chapter
    library(4)                   show what you've written so far, and what your code can do since chapter 4
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tplab.course.checks.exercises import check
    from tplab.course.checks.failures import show_failure
    from tplab.course.checks.predictions import predict, symptoms
    from tplab.course.commands.mine import library
    from tplab.course.commands.progress import progress

__all__ = ["check", "library", "predict", "progress", "show_failure", "symptoms"]

_HOMES = {
    "check": "checks.exercises",
    "library": "commands.mine",
    "predict": "checks.predictions",
    "progress": "commands.progress",
    "show_failure": "checks.failures",
    "symptoms": "checks.predictions",
}


def __getattr__(name: str) -> Any:
    """Import each function on first use, so that `tplab check` can read and merge notebooks without importing torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    if name == "check":
        # Every chapter's first cell imports `check`. From then on, answers that pass go into the learner's library.
        from tplab.course.learn import from_page

        from_page.watch()
    return getattr(home, name)
