"""Ctrl-C and SIGTERM become a `stop` file, and a second one interrupts."""

import os
import signal

import pytest

from tplab.capstone.training.stopping import stop_file, stops_on_signal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop_and_the_second_one_interrupts(number, tmp_path, capsys):
    before, stop = signal.getsignal(number), stop_file(tmp_path / "run")
    stop.parent.mkdir()
    stop.touch()
    with stops_on_signal(tmp_path / "run"):
        assert not stop.exists(), "an earlier run was asked"
        os.kill(os.getpid(), number)
        assert stop.exists()
        assert "Press Ctrl-C again to quit now" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
