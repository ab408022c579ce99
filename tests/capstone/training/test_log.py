"""The log: every row is there at once, a kill costs the last line at most, and a run that goes on appends."""

import os
from functools import partial
from typing import Any

import pytest

from tests.capstone.made_up import SETTINGS, step_row
from tplab.capstone.training.console import ConsoleLog
from tplab.capstone.training.log import Log, read_log, steps_of

step = partial(step_row, SETTINGS)


def start(number: int) -> dict[str, Any]:
    return {"kind": "start", "step": number}


EVALUATION = {"kind": "evaluation", "step": 1, "loss": 3.0}


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [start(1), step(1, 2.0), EVALUATION, {"kind": "end", "step": 1, "why": "done"}]
    log = Log(tmp_path)
    for number, row in enumerate(rows, 1):
        log.write(row)
        assert read_log(tmp_path) == rows[:number]


def test_a_line_that_a_kill_cut_off_is_dropped_and_the_log_goes_on(tmp_path):
    log = Log(tmp_path)
    log.write(step(1, 2.0))
    log.write(step(2, 2.0))
    os.truncate(tmp_path / "log.jsonl", (tmp_path / "log.jsonl").stat().st_size - 5)
    assert read_log(tmp_path) == [step(1, 2.0)]
    log = Log(tmp_path)
    log.write(step(3, 2.0))
    assert read_log(tmp_path) == [step(1, 2.0), step(3, 2.0)]
    (tmp_path / "log.jsonl").write_text('{"kind": "st')
    Log(tmp_path)
    assert (tmp_path / "log.jsonl").read_bytes() == b""


def test_of_steps_that_were_done_twice_the_later_count(tmp_path):
    rows = [start(1), step(1, 5.0), step(2, 4.0), step(3, 3.0), start(2), step(2, 4.5)]
    assert [(row["step"], row["loss"]) for row in steps_of(rows)] == [(1, 5.0), (2, 4.5)]
    assert steps_of(rows, "evaluation") == []


def test_a_number_that_is_none_and_a_log_that_can_not_be_written_are_errors(tmp_path):
    log = Log(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        log.write(step(1, float("nan")))
    assert read_log(tmp_path) == []
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(OSError, match=r"couldn't write to .*log.jsonl: Is a directory.*checkpoints are intact"):
        log.write(step(1, 2.0))


def test_in_a_terminal_a_step_is_shown_only_every_few_seconds_and_the_last_one_always(capsys):
    show = ConsoleLog(600)
    for row in (step(41, 2.0), step(42, 2.0), EVALUATION, step(600, 2.0)):
        show(row)
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(line[1], line[3]) for line in words] == [("41", "2.0000"), ("1", "3.0000"), ("600", "2.0000")]
    assert {"2,327", "30%"} <= {*words[0]}, "tokens per second, and the largest share of communication"
