"""Slow work says how far it is: one line in a terminal that goes away, lines now and then elsewhere."""

import io
import sys
import threading
import time
from contextlib import suppress

import pytest

from tests.runtime.test_liveview import Terminal
from tplab.capstone import progress as module
from tplab.capstone.progress import progress


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OFTEN", "SELDOM"):
        monkeypatch.setattr(module, name, 0.01)


def wait_for(text: str, stream: io.StringIO) -> None:
    end = time.monotonic() + 30
    while text not in stream.getvalue():
        assert time.monotonic() < end, f"{text!r} is not in {stream.getvalue()!r}"
        time.sleep(0.01)


def test_in_a_terminal_it_is_a_line_that_goes_away(quickly, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress() as show:
        show("reading")
        wait_for("reading  0 s", sys.stderr)
        show("encoding", 0.5)
        wait_for("encoding ██████░░░░░░ 50%  0 s", sys.stderr)
    assert sys.stderr.getvalue().endswith("\r\x1b[K")
    assert "\n" not in sys.stderr.getvalue()


def test_elsewhere_it_is_a_line_now_and_then_until_it_fails(quickly, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    threads = threading.active_count()
    with suppress(OSError), progress() as show:
        show("encoding", 0.25)
        wait_for("encoding ███░░░░░░░░░ 25%  0 s\n", sys.stderr)
        raise OSError("no room")
    assert threading.active_count() == threads, "nothing is said afterwards"


def test_quick_work_says_nothing(capsys: pytest.CaptureFixture[str]):
    with progress() as show:
        show("reading")
    assert capsys.readouterr() == ("", "")
