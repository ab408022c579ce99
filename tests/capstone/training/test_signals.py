"""Asked to stop: by a signal, by a file; a second signal means it, but not one that came with the first."""

import os
import signal
import time

import pytest

from tplab.capstone.training import signals
from tplab.capstone.training.signals import hand_on, stop_file, stop_requests
from tplab.runtime import hooks, inside
from tplab.runtime.recorder import Recorder


def test_a_second_signal_ends_the_process_unless_torchrun_forwarded_it_right_after_the_first(monkeypatch):
    """In copies of this process, which end with status 7 if they go on."""
    for impatient, ends in ((-1.0, -signal.SIGTERM), (60.0, 7)):
        monkeypatch.setattr(signals, "IMPATIENT", impatient)
        child = os.fork()
        if child == 0:
            try:
                with stop_requests(None) as stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                    os.kill(os.getpid(), signal.SIGTERM)
                    os._exit(7 if stop.asked else 1)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ends


def test_a_file_asks_too_unless_it_is_of_an_earlier_run(tmp_path):
    stop_file(tmp_path).touch()
    an_hour_before = time.time() - 3600
    os.utime(stop_file(tmp_path), (an_hour_before, an_hour_before))
    with stop_requests(tmp_path) as stop:
        stop._began = time.time() - 60
        assert not stop.asked
        stop_file(tmp_path).touch()
        assert stop.asked
    assert not stop_file(tmp_path).exists()


def test_in_a_launched_rank_an_earlier_run_is_one_before_the_launch(tmp_path, monkeypatch):
    """Its process may have been there before: this one has been for more than two seconds."""
    monkeypatch.setattr(inside, "is_rank", lambda: True)
    monkeypatch.setattr(hooks, "active", Recorder(0, origin=time.monotonic() - 1))
    stop_file(tmp_path).touch()
    before = time.time() - 2
    os.utime(stop_file(tmp_path), (before, before))
    with stop_requests(tmp_path) as stop:
        assert not stop.asked
        stop_file(tmp_path).touch()
        assert stop.asked


def test_a_program_that_waits_for_its_ranks_hands_the_signal_on(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(signals, "IMPATIENT", 0.0)
    with hand_on(tmp_path / "run"):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_file(tmp_path / "run").exists()
        monkeypatch.setattr(os, "kill", lambda *what: ended.append(what))
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        handler(signal.SIGTERM, None)
    assert ended == [(os.getpid(), signal.SIGTERM)]


def test_ctrl_c_is_handed_on_too_and_a_second_one_interrupts(tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    with hand_on(tmp_path / "run"):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_file(tmp_path / "run").exists()
        assert "Press Ctrl-C again to quit now" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_before_the_launch_reaches_its_ranks_but_a_file_of_an_earlier_run_does_not(tmp_path, monkeypatch):
    stop_file(tmp_path).touch()
    with hand_on(tmp_path):
        with stop_requests(tmp_path) as stop:
            assert not stop.asked
        os.kill(os.getpid(), signal.SIGTERM)
        an_hour_before = time.time() - 3600
        os.utime(stop_file(tmp_path), (an_hour_before, an_hour_before))
        monkeypatch.setattr(hooks, "active", Recorder(0, origin=time.monotonic()))
        with stop_requests(tmp_path) as stop:
            assert stop.asked
