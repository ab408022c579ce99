"""The symptoms in a table of mistakes."""

import pytest

from tplab.course.checks.choose import fits
from tplab.course.checks.differences import Difference, Differences

WRONG = Differences(3, [Difference("out", 0, "sum of x[1]", "it's a sum"), Difference("dx", 1, "1/p", "too small")])


@pytest.mark.parametrize(
    ("symptom", "expected"),
    [
        ("out: sum of x[1]", True),
        ("out: sum of x.*", True),
        ("out: sum of", False),
        ("out: zeros / sum of .*", True),
        ("dx: 1/p", True),
        ("dx: p times / 1/p and p = 3", True),
        ("p = 3", True),
        ("p = 1", False),
        ("out and not p = 30", True),
    ],
)
def test_a_kind_of_difference_is_given_by_its_words_or_a_pattern(symptom, expected):
    assert fits(symptom, WRONG) is expected
