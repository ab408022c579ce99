"""Tests of checks. Many of them register an exercise of their own in the made-up chapter 90."""

from typing import Any

import pytest

from tplab.course.checks.exercises import check
from tplab.course.feedback.verdict import CheckFailed


def refused(number: str, *answers: Any, **options: Any) -> CheckFailed:
    """The failure with which the check of an exercise refuses these answers."""
    with pytest.raises(CheckFailed) as failure:
        check(number, *answers, **options)
    return failure.value
