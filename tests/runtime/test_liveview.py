"""The live view: what it says about each rank, and that it shows only long runs. (In a notebook: test_notebook.py.)"""

import io
import re
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tplab
from tests.runtime.page import Page
from tplab.runtime import liveview
from tplab.runtime.board import Entry
from tplab.runtime.liveview import LiveView, Now, StatusLine, WidgetView, look, to_html, to_line


def board(pages: list[str | Entry], entered: dict[int, int]) -> SimpleNamespace:
    """A board with each rank's state, or the entry it waits in, and with how many of its collectives it has entered."""
    return SimpleNamespace(
        world_size=len(pages),
        state=lambda rank: "running" if isinstance(pages[rank], Entry) else pages[rank],
        waits=lambda rank: [pages[rank]] if isinstance(pages[rank], Entry) else [],
        has_entered=lambda rank, entry: entered.get(rank, 0) >= entry.number,
    )


def entry(kind: str, number: int, members: tuple[int, ...], peer: int = -1) -> Entry:
    return Entry("0", number, kind, "[4] float32", members, "cell", peer)


STATES = ["starting", "running", "returned", "raised"]
THIRD, BOTH, FIRST = (
    entry("all_reduce", 3, tuple(range(6))),
    entry("all_gather", 2, (0, 1)),
    entry("broadcast", 1, (0, 2)),
)
SEND, RECEIVE = entry("send", 1, (0, 1), peer=1), entry("recv", 1, (0, 1), peer=0)


@pytest.mark.parametrize(
    ("pages", "entered", "words"),
    [
        (STATES, {}, ["starting", "computing", "finished", "failed"]),
        ([THIRD, *["running"] * 5], {0: 3, 1: 2, 2: 3, 3: 3, 4: 3, 5: 3}, ["waits in all_reduce #3 for rank 1"]),
        ([THIRD, *["running"] * 5], {0: 3, 2: 3, 4: 3}, ["waits in all_reduce #3 for ranks 1, 3, 5"]),
        ([THIRD, *["running"] * 5], {0: 3}, ["waits in all_reduce #3 for ranks 1, 2, 3, 4, 5"]),
        ([BOTH, BOTH], {0: 2, 1: 2}, ["in all_gather #2", "in all_gather #2"]),
        ([FIRST, "running", "running"], {0: 1}, ["waits in broadcast #1 for rank 2"]),  # rank 1 is no member
        ([SEND, RECEIVE], {}, ["waits in send to rank 1", "waits in recv from rank 0"]),
        ([entry("recv", 0, (0,))], {}, ["waits in recv from any rank"]),
    ],
)
def test_what_ranks_do_is_put_into_words(pages: list[str | Entry], entered: dict[int, int], words: list[str]) -> None:
    assert [now.words for now in look(board(pages, entered))][: len(words)] == words
    assert [now.doing for now in look(board(STATES, {}), dead=[1, 2])] == ["starting", "failed", "finished", "failed"]


RANKS = [
    Now(0, "waiting", "waits in all_reduce #3 for rank 2"),
    Now(1, "waiting", "waits in all_reduce #3 for rank 2"),
    Now(2, "computing", "computing"),
    Now(3, "finished", "finished"),
]


def test_html_has_a_box_for_every_rank_and_a_line_puts_ranks_that_do_the_same_together() -> None:
    page = Page(to_html([*RANKS, Now(4, "waiting", "waits in <b>bold #1")], 4.24))
    assert page.texts[:9] == [
        "rank 0", "○ waits in all_reduce #3 for rank 2", "rank 1", "○ waits in all_reduce #3 for rank 2",
        "rank 2", "● computing", "rank 3", "✓ finished", "rank 4",
    ]  # fmt: skip
    assert page.texts[-1] == "4.2 s"
    assert any("<b>bold #1" in text for text in page.texts), "what a backend may be called is escaped"
    colors = {style for style in page.values("style") if "border-left" in style}
    assert len(colors) == 3, "a colour for each kind of doing"
    whole = "4.2 s  ranks 0, 1 ○ waits in all_reduce #3 for rank 2  rank 2 ● computing  rank 3 ✓ finished"
    assert to_line(RANKS, 4.24, 200) == whole
    assert to_line(RANKS, 4.24, 40) == whole[:39] + "…"  # it keeps its width
    assert (
        to_line([Now(rank, "computing", "computing") for rank in range(64)], 1, 80) == "1.0 s  ranks 0-63 ● computing"
    )


class Recorder(LiveView):
    """Keeps when a view would have drawn, and can't do it."""

    def __init__(self) -> None:
        super().__init__(list)
        self.drawn: list[float] = []

    def _draw(self, seconds: float) -> None:
        self.drawn.append(seconds)

    def _remove(self) -> None:
        raise RuntimeError("no page")


class Broken(Recorder):
    def _draw(self, seconds: float) -> None:
        super()._draw(seconds)
        raise RuntimeError("no page")


@pytest.mark.parametrize(("view", "drawn"), [(Recorder, [1.0, 1.5]), (Broken, [1.0])])
def test_a_view_is_drawn_after_a_second_and_not_too_often_and_gives_up_where_it_cannot(
    view: type[Recorder], drawn: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 0.9, 1.0, 1.1, 1.5])
    monkeypatch.setattr(liveview, "time", SimpleNamespace(monotonic=lambda: next(now)))
    made = view()
    for _ in range(4):
        made.refresh()
    made.close()
    assert made.drawn == drawn


# In a terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def prints_early_and_late(seen: Path) -> None:
    """Rank 0 waits for a file, which the parent makes once it has shown what the test looks for."""
    if dist.get_rank() == 0:
        print("early words", flush=True)
        while not seen.exists():
            time.sleep(0.05)
        print("late words", flush=True)
    dist.all_reduce(torch.ones(2))


def screen(received: str) -> list[str]:
    """The lines that stand on the screen after all of it."""
    return [line.rpartition("\r\x1b[K")[2] for line in received.split("\n")]


def test_a_terminal_has_a_status_line_that_makes_room_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = re.compile(r"\d\.\d s  rank 0 ● computing  rank 1 ○ waits in all_reduce #1 for rank( 0|…)")
    seen = tmp_path / "seen"

    class Watched(Terminal):
        def write(self, text: str) -> int:
            if status.search(text):
                seen.touch()
            return super().write(text)

    terminal = Watched()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "70")
    tplab.launch(prints_early_and_late, 2, args=(seen,), timeout=200)
    received = terminal.getvalue()
    assert status.search(received)
    assert screen(received)[-3:] == ["[rank 0] early words", "[rank 0] late words", ""]
    assert all(len(part) < 70 for part in re.findall(r"\x1b\[K(\d\.\d s[^\r\n]*)", received))


SESSION, COLAB = {"JPY_SESSION_NAME": "chapters/04_parallel_linear.ipynb"}, {"google.colab": ModuleType("google.colab")}
# fmt: off
PLACES = {  # stderr, environment variables, IPython's kernel, other modules, and the view
    "a terminal":                       (Terminal,    {"TERM": "xterm"}, None, {},    StatusLine),
    "a dumb terminal":                  (Terminal,    {"TERM": "dumb"},  None, {},    LiveView),
    "a pipe":                           (io.StringIO, {"TERM": "xterm"}, None, {},    LiveView),
    "JupyterLab":                       (io.StringIO, SESSION,           7,    {},    WidgetView),
    "nbclient, nbval and VS Code":      (io.StringIO, {},                7,    {},    LiveView),
    "Colab, which has no such widgets": (io.StringIO, SESSION,           7,    COLAB, LiveView),
}
# fmt: on


@pytest.mark.parametrize(("stderr", "variables", "kernel", "modules", "view"), PLACES.values(), ids=PLACES)
def test_a_view_is_shown_on_a_page_and_in_a_terminal_and_nowhere_else(
    stderr, variables, kernel, modules, view, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr())
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=kernel))
    for name, module in ({"IPython": shell} | modules).items():
        monkeypatch.setitem(sys.modules, name, module)
    assert type(liveview.live_view(board([], {}), list)) is view
