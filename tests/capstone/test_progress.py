"""Slow work says how far it is: one line in a terminal that goes away, lines now and then elsewhere."""

import io
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.capstone.small import small, write_text
from tplab.capstone import progress as module
from tplab.capstone.data import prepare as tokens
from tplab.capstone.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
    with suppress(OSError), progress() as show:
        show("encoding", 0.25)
        wait_for("encoding ███░░░░░░░░░ 25%  0 s\n", sys.stderr)
        raise OSError("no room")
    said = sys.stderr.getvalue()
    time.sleep(0.05)
    assert sys.stderr.getvalue() == said, "nothing is said afterwards"


def test_quick_work_says_nothing(capsys: pytest.CaptureFixture[str]):
    with progress() as show:
        show("reading")
    assert capsys.readouterr() == ("", "")


def test_tokens_are_made_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[tuple] = []

    class Said:
        def __enter__(self):
            return lambda *what: said.append(what)

        def __exit__(self, *error):
            said.append(("over",))

    monkeypatch.setattr(tokens, "progress", Said)
    monkeypatch.setattr(tokens, "_AT_ONCE", 1)
    tokens.prepare(small(write_text(tmp_path / "text"), "run"))
    steps = [what for what, *_ in said]
    order = ("reading", "waiting", "training", "encoding", "over")
    places = [min(place for place, step in enumerate(steps) if word in step) for word in order]
    assert places == sorted(places)
    shares = [share for what, share in (one for one in said if len(one) == 2)]
    assert len(shares) > 10
    assert shares[:5] == sorted(shares[:5])
    assert shares[-1] == 1.0
