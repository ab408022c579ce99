"""How verdicts and failures look: text, HTML that escapes what it shows, and no launcher frames in IPython."""

import re

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests import saying
from tplab.course.feedback.verdict import CheckFailed, CheckPassed


def failure() -> CheckFailed:
    return CheckFailed(
        "Exercise 4.2, p = 2: wrong on rank 1.",
        rows=[("dx", "rank 1", "exactly 2 times the right one (p = 2)"), ("backward traffic", "every rank", "a < b")],
        right=["out", "dW"],
        question="Who adds up?",
    )


def test_html_escapes_and_holds_everything() -> None:
    html = failure().html()
    for part in ("Exercise 4.2, p = 2", "a &lt; b", "exactly 2 times", "out, dW", "Who adds up?"):
        assert part in html
    assert "a < b" not in html
    verdict = CheckPassed("4.1", "Column", "a <note>", "Right: out.")
    assert re.fullmatch(saying("Exercise 4.1", "Column\n  Right: out.\n  a <note>"), repr(verdict))
    assert "a &lt;note&gt;" in verdict._repr_html_()


def test_ipython_shows_the_explanation_and_no_frames(capsys: pytest.CaptureFixture[str]) -> None:
    shell = InteractiveShell.instance()
    shell.user_ns["failure"] = failure
    shell.run_cell("def check():\n    raise failure()\ncheck()")
    shown = capsys.readouterr().out
    assert "Who adds up?" in shown
    assert "exactly 2 times" in shown
    assert "Traceback" not in shown
    assert "raise failure" not in shown
