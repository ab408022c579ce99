"""The machinery of the course: checks, predictions, tables of symptoms, the build of the notebooks, `tplab check`.

A notebook uses five of them:

    check("4.1", answer)         run an exercise's check
    predict("4.a", calls=1)      compare a prediction
    show_failure()               run a program that is wrong on purpose
    symptoms(4)                  what you see, what it is
    progress()                   how far you are, in every chapter
"""

import importlib
from typing import TYPE_CHECKING, Any

from tplab.course.symptoms import symptoms  # at once: the module has the function's name

if TYPE_CHECKING:
    from tplab.course.checking import check
    from tplab.course.failures import show_failure
    from tplab.course.predictions import predict
    from tplab.course.tools.progress import progress

__all__ = ["check", "predict", "progress", "show_failure", "symptoms"]

_HOMES = {
    "check": "checking",
    "predict": "predictions",
    "progress": "tools.progress",
    "show_failure": "failures",
}


def __getattr__(name: str) -> Any:
    """Import torch only for those who need it: `tplab check` reads and merges notebooks without."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
