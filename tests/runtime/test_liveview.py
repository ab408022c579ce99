"""The live view: what it says about each rank, and that it shows only long runs. (In a notebook: test_notebook.py.)"""

import re
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests import saying
from tplab.runtime import liveview
from tplab.runtime.board import Entry
from tplab.runtime.liveview import LiveView, look, to_text


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
THIRD, BOTH = entry("all_reduce", 3, (0, 1, 2, 3)), entry("all_gather", 2, (0, 1))
SEND, RECEIVE = entry("send", 1, (0, 1), peer=1), entry("recv", 1, (0, 1), peer=0)


@pytest.mark.parametrize(
    ("pages", "entered", "says"),
    [
        (STATES, {}, ["…", "●", "✓", "✗"]),
        ([THIRD, *["running"] * 4], {0: 3, 1: 2, 2: 3}, [("○", "all_reduce #3", "ranks 1, 3")]),  # 4 is no member
        ([BOTH, BOTH], {0: 2, 1: 2}, [("↔", "all_gather #2"), ("↔", "all_gather #2")]),
        ([SEND, RECEIVE], {}, [("○", "send", "rank 1"), ("○", "recv", "rank 0")]),
    ],
)
def test_what_ranks_do_is_put_into_words(pages: list[str | Entry], entered: dict[int, int], says: list) -> None:
    for text, parts in zip(look(board(pages, entered)), says, strict=False):
        assert re.search(saying(*parts), text)
    assert [text[0] for text in look(board(STATES, {}), dead=[1, 2])] == ["…", "✗", "✓", "✗"]


def test_ranks_that_do_the_same_share_a_line() -> None:
    assert to_text(["○ waits", "● computing", "○ waits"], 4.24) == "4.2 s\nranks 0, 2  ○ waits\nrank 1      ● computing"


@pytest.mark.parametrize(("error", "drawn"), [(None, [1.0, 1.5]), (RuntimeError("no page"), [1.0])])
def test_a_view_is_drawn_after_a_second_and_not_too_often_and_gives_up_where_it_cannot(
    error: Exception | None, drawn: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 0.9, 1.0, 1.1, 1.5])
    monkeypatch.setattr(liveview, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(liveview, "has_page", lambda: True)
    view, draw = LiveView(list), Mock(side_effect=error)
    monkeypatch.setattr(view, "_draw", draw)
    monkeypatch.setattr(view, "_handle", Mock())
    for _ in range(4):
        view.refresh()
    view.close()
    expected = [{"text/plain": f"{seconds} s"} for seconds in drawn]
    assert [call.args[0] for call in draw.call_args_list] == [*expected, {}]  # the last one removes it


PAGE = {"JPY_SESSION_NAME": "chapters/04_parallel_linear.ipynb"}
PLACES = {  # environment variables, IPython's kernel, and whether there's a page
    "a terminal": ({}, None, False),
    "JupyterLab": (PAGE, 7, True),
    "a program that JupyterLab's terminal runs": (PAGE, None, False),
    "nbclient, nbval and VS Code": ({}, 7, False),
}


@pytest.mark.parametrize(("variables", "kernel", "page"), PLACES.values(), ids=PLACES)
def test_a_view_is_shown_on_a_page_and_nowhere_else(
    variables: dict[str, str], kernel: int | None, page: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=kernel))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert liveview.has_page() == page
    now = iter([0.0, 1.5])
    monkeypatch.setattr(liveview, "time", SimpleNamespace(monotonic=lambda: next(now)))
    view, draw = LiveView(list), Mock()
    monkeypatch.setattr(view, "_draw", draw)
    view.refresh()
    assert draw.called == page
