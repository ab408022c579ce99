"""`show_failure()` runs a program that is broken on purpose, shows its error report, and lets the notebook continue."""

from collections.abc import Iterator
from contextlib import contextmanager

from tplab.course.feedback.tracebacks import readable_report, readable_traceback
from tplab.course.feedback.verdict import AMBER, RED, CheckFailed, box, display_html, heading, paragraph, preformatted
from tplab.course.feedback.waiting import asks_for
from tplab.runtime import RankError

NOTHING_FAILED = "Nothing failed, but this cell is supposed to fail. Did you change the broken program?"


@contextmanager
def show_failure() -> Iterator[None]:
    """Context manager that catches an exception raised in the block and shows the error report as normal output.

    The exception of an exercise's stub is raised again.

    with show_failure():
        launch(a_rank_that_skips_the_all_reduce, 4)
    """
    try:
        yield
    except Exception as error:
        if asks_for(error):  # the program never ran, because it needs an answer that isn't written yet
            raise
        _show(error)
    else:
        display_html(box(RED, heading(NOTHING_FAILED)), NOTHING_FAILED)


def _show(error: Exception) -> None:
    head = f"It failed, as it should: {type(error).__name__}"
    if isinstance(error, CheckFailed):
        display_html(box(AMBER, heading(head)) + error.html(), f"{head}\n\n{error}")
        return
    report = readable_report(str(error)) if isinstance(error, RankError) else readable_traceback(error)
    hint = paragraph("Here is the report that you would see in your own work:")
    display_html(box(AMBER, heading(head), hint, preformatted(report)), f"{head}\n\n{report}")
