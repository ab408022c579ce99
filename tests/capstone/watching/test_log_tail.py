"""What is read of a log while it grows: the newest step, curves, the time that is left, and at no cost."""

import json
import time
from pathlib import Path

import pytest

from tests.capstone.made_up import Log, step_row
from tplab.capstone.watching.log_tail import LogTail, RunStatus, thinned
from tplab.capstone.watching.panel import to_html


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_it_sees_the_newest_step_and_the_curves(log: Log):
    following = LogTail(log.settings)
    assert following.look() == RunStatus(last_step=60)
    log.start()
    assert following.look().started
    log.steps(1, 6)
    seen = following.look()
    assert (seen.step, seen.last_step, seen.done) == (6, 60, 0.1)
    assert seen.loss == pytest.approx(4.94)
    assert seen.losses == [(step, pytest.approx(5.0 - 0.01 * step)) for step in range(1, 7)]
    assert seen.communication == pytest.approx([0.2, 0.3])
    assert seen.memory == [412_000_000] * 2


def test_it_reads_only_what_is_new(log: Log, monkeypatch: pytest.MonkeyPatch):
    following = LogTail(log.settings)
    log.start()
    log.steps(1, 50)
    following.look()
    parsed = []
    monkeypatch.setattr(LogTail, "_take", lambda self, row: parsed.append(row["step"]))
    log.steps(51, 52)
    following.look()
    following.look()
    assert parsed == [51, 52]


def test_half_a_row_waits_for_its_other_half(log: Log):
    following = LogTail(log.settings)
    log.start()
    text = json.dumps(step_row(log.settings, 1, 5.0))
    for part, step in ((text[:40], 0), (text[40:], 0), ("\n", 1)):
        log.write(part)
        assert following.look().step == step


def test_what_a_kill_cut_off_is_passed_over(log: Log):
    log.start()
    log.steps(1, 3)
    log.write('{"kind": "step", "st\n')
    log.start(resumed_from=2, step=3)
    log.steps(3, 4)
    assert LogTail(log.settings).look().step == 4


def test_a_run_taken_up_again_forgets_the_steps_that_are_done_again(log: Log):
    log.start()
    log.steps(1, 30)
    log.add({"kind": "evaluation", "step": 20, "loss": 5.0}, {"kind": "evaluation", "step": 30, "loss": 4.9})
    following = LogTail(log.settings)
    assert not following.look().started, "rows of an earlier run don't start this one"
    log.start(resumed_from=20, step=21)
    seen = following.look()
    assert (seen.started, seen.step, seen.evaluations) == (True, 20, [(20, 5.0)])
    log.steps(21, 22)
    assert [step for step, _ in following.look().losses] == list(range(1, 23))


def test_a_log_that_begins_anew_is_another_run(log: Log):
    log.start()
    log.steps(1, 30)
    following = LogTail(log.settings)
    following.look()
    log.path.unlink()
    log.start()
    log.steps(1, 2)
    seen = following.look()
    assert (seen.started, seen.step, len(seen.losses)) == (True, 2, 2)


def test_a_long_run_stays_cheap(log: Log):
    every, points = thinned([(step, float(step)) for step in range(1, 100_001)])
    assert (every, len(points), points[-1][0]) == (250, 400, 100_000)
    assert points[0] == (250, 125.5)
    log.start()
    line = json.dumps(step_row(log.settings, 1, 5.0)) + "\n"
    log.write("".join(line.replace('"step": 1,', f'"step": {step},') for step in range(1, 20_001)))
    following = LogTail(log.settings)
    following.look()
    log.steps(20_001, 20_001)
    began = time.process_time()
    seen = following.look()
    to_html(seen)
    assert time.process_time() - began < 0.2
    assert seen.step == 20_001


def test_time_left_counts_all_that_happens_between_steps(log: Log, monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("tplab.capstone.watching.log_tail.time.monotonic", lambda: now[0])
    following = LogTail(log.settings)
    log.start()
    log.steps(1, 1)
    assert following.look().seconds_left == pytest.approx(59 * 0.11)  # all that is known: the row's own seconds
    now[0] += 20.0  # 10 steps, an evaluation, a checkpoint
    log.steps(2, 11)
    assert following.look().seconds_left == pytest.approx(2.0 * 49)
