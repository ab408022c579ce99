"""`show_failure()` runs a program that is broken on purpose, shows its error report, and lets the notebook continue."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tplab.course.feedback.tracebacks import readable_report, readable_traceback
from tplab.course.feedback.verdict import AMBER, RED, CheckFailed, box, display_html, heading, paragraph, preformatted
from tplab.runtime import RankError

NOTHING_FAILED = "Nothing failed, but this cell is supposed to fail. Did you change the broken program?"


@dataclass
class Failure:
    """The exception that `show_failure` caught. `error` is None if nothing failed."""

    error: Exception | None = None


@contextmanager
def show_failure() -> Iterator[Failure]:
    """Context manager that catches any exception raised in the block and shows the error report as normal output.

    with show_failure():
        launch(a_rank_that_skips_the_all_reduce, 4)
    """
    failure = Failure()
    try:
        yield failure
    except Exception as error:
        failure.error = error
    if failure.error is None:
        display_html(box(RED, heading(NOTHING_FAILED)), NOTHING_FAILED)
        return
    head = f"It failed, as it should: {type(failure.error).__name__}"
    if isinstance(failure.error, CheckFailed):
        display_html(box(AMBER, heading(head)) + failure.error.html(), f"{head}\n\n{failure.error}")
        return
    report = (
        readable_report(str(failure.error))
        if isinstance(failure.error, RankError)
        else readable_traceback(failure.error)
    )
    display_html(box(AMBER, heading(head), _hint(), preformatted(report)), f"{head}\n\n{report}")


def _hint() -> str:
    return paragraph("Here is the report that you would see in your own work:")
