"""Right answers in other forms than the reference answer pass their checks."""

import pytest

from tests.wrong_answers import load_chapter_namespace, run_check
from tests.wrong_answers.accepted import RIGHT


@pytest.mark.parametrize("right", RIGHT, ids=lambda right: f"{right.exercise} {right.name}")
def test_other_right_answer_passes(right):
    namespace = load_chapter_namespace(right.exercise, {right.exercise: right.source})
    assert run_check(right.exercise, namespace, right.seed).exercise == right.exercise
