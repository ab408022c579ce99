"""A message that its sender starts and forgets may get lost: the run ends with a report, and the check asks why."""

import pytest

from tplab.course.exercises.ch01 import rings
from tplab.course.feedback.verdict import CheckFailed
from tplab.runtime import Deadlock


@pytest.mark.parametrize(
    ("report", "question"),
    [  # tests/runtime/test_failures.py has these words from real runs
        ("not finished after 60 s (timeout=60). Where the ranks were:", rings.LOST),
        ("a message was lost:\nrank 0 began to send message #1 to rank 1", rings.LOST),
        ("the ranks are waiting for something that will never happen:", rings.STUCK),
    ],
)
def test_the_question_where_ranks_wait_tells_a_lost_message_from_a_missing_one(report, question):
    failure = CheckFailed("the ranks are waiting for each other.", report=report)
    failure.__cause__ = Deadlock(report)
    assert rings.about_messages(failure) == question
