"""What a run measures, agrees on, logs and is asked: each step's figures are the same on every rank, a kill costs the
last line of the log at most, and Ctrl-C becomes a `stop` file.
"""

import os
import signal
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.capstone.made_up import SETTINGS, step_row
from tests.capstone.small import SMALL
from tplab import launch, record
from tplab.capstone.training import meter as meters
from tplab.capstone.training.log import Log, read_log, steps_of
from tplab.capstone.training.meter import Clock, Figures, Meter
from tplab.capstone.training.ranks import join
from tplab.capstone.training.step_summary import StepSummary, summarize
from tplab.capstone.training.stopping import stop_file, stops_on_signal


def test_what_lies_between_steps_does_not_count(monkeypatch):
    now = iter([0.0, 10.0, 15.0, 100.0, 104.0])
    monkeypatch.setattr(meters.time, "perf_counter", lambda: next(now))
    clock = Clock()  # 0
    clock.go_on()  # 10
    clock.count()
    clock.count()
    assert clock.mean() == 2.5  # 15
    clock.go_on()  # 100, after a checkpoint
    clock.count()
    assert clock.mean() == 4.0  # 104


def test_on_a_gpu_the_share_is_that_of_the_newest_step_that_has_ended(monkeypatch):
    steps = [Mock(is_over=False, share=share) for share in (0.1, 0.2, 0.3)]
    monkeypatch.setattr(meters, "StreamWaits", iter(steps).__next__)
    meter, found = Meter(torch.device("cuda", 0)), []
    for ended in (0, 2, 2):  # while steps 1 to 3 are handed out
        for step in steps[:ended]:
            step.is_over = True
        with meter.step():
            pass
        found.append(meter.figures.communication)
    assert found == [None, 0.2, 0.2]


def figures_of(rank: int) -> Figures:
    """With more bytes than float32 can tell exactly. Rank 1 doesn't know its share."""
    return Figures(None if rank == 1 else rank / 10, 10 * rank, 100_000_000_001 * rank)


def _told() -> tuple[StepSummary, int]:
    """Two replicas of two ranks. Rank 3 is asked to stop; nobody but the first of a replica is asked for its loss."""
    ranks, rank = join(replace(SMALL, tp=2, dp=2, batch_size=16)), dist.get_rank()
    loss = {0: 2.0, 2: 5.0}.get(rank, 1000.0)
    with record() as section:
        told = summarize(ranks, torch.tensor(loss), torch.tensor(0.25), rank == 3, figures_of(rank))
    return told, len(section)


def test_all_ranks_are_told_the_same_in_one_message():
    figures = [figures_of(rank) for rank in range(4)]
    for told, messages in launch(_told, 4):
        assert told == StepSummary(3.5, 0.25, True, figures)
        assert messages == 1


step = partial(step_row, SETTINGS)


def start(number: int) -> dict[str, Any]:
    return {"kind": "start", "step": number}


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


def test_a_number_that_is_none_is_an_error(tmp_path):
    log = Log(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        log.write(step(1, float("nan")))
    assert read_log(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop_and_the_second_one_interrupts(number, tmp_path, capsys):
    before, stop = signal.getsignal(number), stop_file(tmp_path / "run")
    stop.parent.mkdir()
    stop.touch()
    with stops_on_signal(tmp_path / "run"):
        assert not stop.exists(), "an earlier run was asked"
        os.kill(os.getpid(), number)
        assert stop.exists()
        assert "Ctrl-C" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
