"""A message that its sender starts and forgets gets lost: no diagnosis can tell, so the check of 1.1 asks for it."""

from functools import partial

import pytest

from tests.wrong_answers import load_chapter_namespace, run_check
from tests.wrong_answers.ch01 import GATHER, SCATTER
from tplab.course import trying
from tplab.course.verdict import CheckFailed


def test_a_send_that_nobody_waits_for_is_asked_for_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(trying, "launch", partial(trying.launch, timeout=5))
    forgotten = SCATTER.replace("dist.send(", "dist.isend(") + GATHER
    with pytest.raises(CheckFailed) as failure:
        run_check("1.1", load_chapter_namespace("1.1", {"1.1": forgotten}))
    assert "wait()" in failure.value.question or "only start a message" in failure.value.question
