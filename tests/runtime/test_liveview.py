"""The live view: what it says about each rank, that it shows only long runs, and that nothing of it stays."""

import io
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tplab
from tests.runtime.kernel import Cell, Notebook, notebook
from tests.runtime.page import Page
from tplab.runtime import liveview, watch
from tplab.runtime.board import Entry
from tplab.runtime.liveview import WIDGET_VIEW, LiveView, Now, StatusLine, WidgetView, look, to_html, to_line


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
    """Keeps what a view would have drawn."""

    made: list["Recorder"] = []

    def __init__(self, see) -> None:
        super().__init__(see)
        self.drawn: list[tuple[float, list[Now]]] = []
        self.closed = 0
        self.made.append(self)

    def _draw(self, seconds: float) -> None:
        self.drawn.append((seconds, self._see()))

    def _remove(self) -> None:
        self.closed += 1


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    Recorder.made = []

    def recorder(board, dead):
        return Recorder(lambda: look(board, dead()))

    monkeypatch.setattr(watch, "live_view", recorder)
    return Recorder.made


def wait_for(file: Path) -> None:
    """Wait until the parent has made this file, which it does once it has shown what the test looks for."""
    while not file.exists():
        time.sleep(0.05)


def late(seen: Path) -> None:
    if dist.get_rank() == 1:
        wait_for(seen)
    if dist.get_rank() < 2:
        dist.all_reduce(torch.ones(4), group=dist.group.WORLD)
    elif dist.get_rank() == 2:
        dist.all_reduce(torch.ones(4))


def test_a_real_run_is_seen_as_it_is(views: list[Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, waits, draw = tmp_path / "seen", "waits in all_reduce #1 for rank 1", Recorder._draw

    def draw_and_tell(self: Recorder, seconds: float) -> None:
        draw(self, seconds)
        if [now.words for now in self.drawn[-1][1]] == [waits, "computing", waits]:
            seen.touch()

    monkeypatch.setattr(Recorder, "_draw", draw_and_tell)
    tplab.launch(late, 3, args=(seen,), timeout=200)
    (view,) = views
    assert view.drawn[0][0] >= liveview.SHOWN_AFTER
    assert view.closed == 1


def test_a_quick_run_is_never_drawn(views: list[Recorder]) -> None:
    view = LiveView(list)
    assert view._due - view._started == liveview.SHOWN_AFTER == 1.0
    clock = Recorder(list)
    clock.refresh()
    assert clock.drawn == []
    clock._due = time.monotonic()
    clock.refresh()
    clock.refresh()
    assert len(clock.drawn) == 1, "not more often than every REFRESH_SECONDS"


def test_a_view_is_closed_when_the_run_fails(views: list[Recorder]) -> None:
    with pytest.raises(tplab.RankError):
        tplab.launch(lambda: 1 / 0, 2)
    assert [view.closed for view in views] == [1]


def test_a_view_that_cannot_draw_disturbs_nothing_and_gives_up() -> None:
    class Broken(Recorder):
        def _draw(self, seconds: float) -> None:
            super()._draw(seconds)
            raise RuntimeError("no page")

        def _remove(self) -> None:
            raise RuntimeError("no page")

    view = Broken(list)
    view._due = view._started
    for _ in range(2):
        view.refresh()
    view.close()
    assert len(view.drawn) == 1


# In a terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def prints_early_and_late(seen: Path) -> None:
    if dist.get_rank() == 0:
        print("early words", flush=True)
        wait_for(seen)
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


# In a notebook


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    """A kernel as JupyterLab starts it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JPY_SESSION_NAME", "chapters/04_parallel_linear.ipynb")
        with notebook() as opened:
            yield opened


def shown(cell: Cell) -> list[dict]:
    """The displays that stand in the output area at the end."""
    areas: dict[str, dict] = {}
    for place, message in enumerate(cell.messages):
        content = message["content"]
        if message["msg_type"] in ("display_data", "update_display_data"):
            areas[content.get("transient", {}).get("display_id") or str(place)] = content["data"]
    return list(areas.values())


def kinds(cell: Cell) -> list[str]:
    return [message["msg_type"] for message in cell.messages]


def test_a_long_run_shows_its_ranks_and_leaves_nothing(book: Notebook, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    late = (
        f"def late():\n    while dist.get_rank() and not os.path.exists({str(seen)!r}):\n        time.sleep(0.05)\n"
        "    dist.all_reduce(torch.ones(2))\n    return 1\n"
    )
    request = book.start(late + "tplab.launch(late, 2)[1]")
    book.wait_until_shown(request, "waits in all_reduce #1 for rank 1")
    seen.touch()
    cell = book.finish(request)
    views = [m["content"] for m in cell.messages if WIDGET_VIEW in m["content"].get("data", {})]
    assert len(views) == 1
    assert list(views[0]["data"]) == [WIDGET_VIEW], "no text beside it that nbval could compare"
    values = [m["content"]["data"].get("state", {}).get("value", "") for m in cell.messages if "comm" in m["msg_type"]]
    assert any("waits in all_reduce #1 for rank 1" in value and "computing" in value for value in values)
    assert shown(cell) == [{}]
    assert kinds(cell).count("comm_open") == kinds(cell).count("comm_close") == 3
    assert "1" in cell.text
    assert not cell.error


def test_a_run_that_prints_keeps_its_one_area(book: Notebook) -> None:
    source = "def talk():\n    for i in range(100_000):\n        print(i)\n    time.sleep(2)\nr = tplab.launch(talk, 2)"
    cell = book.run(source)
    areas = shown(cell)
    assert len(areas) == 2
    assert {} in areas
    assert sum("[rank 1] 99999" in area.get("text/plain", "") for area in areas) == 1


def test_an_interrupted_run_leaves_nothing(book: Notebook) -> None:
    request = book.start("tplab.launch(lambda: time.sleep(600), 2, timeout=None)")
    book.wait_until_shown(request, WIDGET_VIEW)
    book.manager.interrupt_kernel()
    cell = book.finish(request)
    assert cell.error.startswith("KeyboardInterrupt: the run was interrupted.")
    assert shown(cell) == [{}]
    assert "comm_close" in kinds(cell)


def test_inside_an_output_widget_nothing_that_ranks_print_is_lost(book: Notebook) -> None:
    """ipywidgets.Output takes displays and ignores their updates."""
    book.run("import ipywidgets\ndef talk():\n    time.sleep(dist.get_rank())\n    print('words')")
    cell = book.run("with ipywidgets.Output():\n    tplab.launch(talk, 3)")
    texts = [
        m["content"]["data"]["text/plain"]
        for m in cell.messages
        if m["msg_type"] == "display_data" and "text/plain" in m["content"]["data"]
    ]
    assert texts == ["[rank 0] words\n[rank 1] words\n[rank 2] words"]
    assert "comm_close" in kinds(cell)
