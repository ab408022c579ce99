"""What chapter 00 asks where a number is wrong."""

import pytest

from tplab.course.exercises.ch00.amounts import expect
from tplab.course.feedback.verdict import CheckFailed

SUSPECTS = [(90.0, "Where are the biases?"), (80.0, "Which layers?"), (90.0, "Which heads?"), (90.0, "Which norms?")]


def question(seen: float) -> str | None:
    with pytest.raises(CheckFailed) as failed:
        expect("0.1", "f()", "the number", seen, 100, SUSPECTS, "What else?")
    return failed.value.question


def test_two_mistakes_that_give_the_same_number_are_both_asked_about() -> None:
    assert question(90) == "Where are the biases? Or: Which heads?"
    assert question(80) == "Which layers?"
    assert question(85) == "What else?"
