"""The measurements that a report shows besides the run itself.

run           runs the study, measuring every missing part within a budget
parts         one function per part, which takes the measurements and summarizes them
programs      the short programs that the ranks run for a part
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tplab.capstone.study.run import Budget, study

__all__ = ["Budget", "study"]


def __getattr__(name: str) -> Any:
    """Import `run` on first use, because ranks need only the predictions, and `run` imports the report's pictures."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tplab.capstone.study import run

    return getattr(run, name)
