"""`show_failure` shows the report of what failed and goes on; and is loud when nothing did."""

import pytest
import torch.distributed as dist

from tplab import launch
from tplab.course.checks.failures import NOTHING_FAILED, show_failure


def fails_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the ranks disagree")


def test_a_failed_run_is_shown_and_the_program_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with show_failure():
        launch(fails_on_rank_1, 2)
    shown = capsys.readouterr().out
    assert "RankError" in shown
    assert "ValueError: the ranks disagree" in shown


def test_another_error_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    with show_failure():
        raise KeyError("weight")
    assert "KeyError: 'weight'" in capsys.readouterr().out


def test_a_stub_is_waiting_for_its_answer_and_has_not_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotImplementedError, match="exercise 90.1"), show_failure():
        raise NotImplementedError("exercise 90.1")
    assert capsys.readouterr().out == ""


def test_nothing_failed_is_loud(capsys: pytest.CaptureFixture[str]) -> None:
    with show_failure():
        pass
    assert NOTHING_FAILED in capsys.readouterr().out
