"""The live panel: what it shows, where, and that nothing of it stays or disturbs."""

import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.capstone.made_up import SETTINGS, Log, rows
from tests.runtime.kernel import Notebook, notebook
from tests.runtime.page import Page
from tplab import launch
from tplab.capstone.watching import panel as panel_module
from tplab.capstone.watching.log_tail import RunStatus
from tplab.capstone.watching.panel import panel, to_html, to_line
from tplab.runtime import RankError, liveview
from tplab.runtime.liveview import Now
from tplab.runtime.screen import WIDGET_VIEW

pytestmark = pytest.mark.share(5)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


# Showing


def seen(**other: Any) -> RunStatus:
    values = {"step": 312, "last_step": 600, "loss": 2.3141, "tokens_per_second": 8912.4, "seconds_left": 130.0,
              "memory": [412e6, 1.5e9], "communication": [0.34, 0.2], "losses": [(1, 7.5), (312, 2.3)],
              "speeds": [(1, 8000.0), (312, 8912.4)], "evaluations": [(300, 2.4)], "started": True}  # fmt: skip
    return RunStatus(**(values | other))


def test_the_page_says_how_far_the_run_is_and_how_each_rank_does():
    page = Page(to_html(seen()))
    for words in ("step 312 of 600, 52%", "2 min 10 s left", "2.3141", "8,912", "rank 0", "34% communicating", "rank 1",
                  "412 MB resident", "1.5 GB resident", "held-out text"):  # fmt: skip
        assert words in page.text, words
    assert "on the GPU" in to_html(seen(device="cuda"))


def test_the_curve_leaves_room_for_what_is_to_come():
    x = [float(point.split(",")[0]) for point in " ".join(Page(to_html(seen(speeds=[]))).values("points")).split()]
    assert (x[1] - x[0]) / (292 - 44) == pytest.approx(311 / 599, abs=0.01)


@pytest.mark.parametrize(
    "strange",
    [
        {"losses": [], "loss": None, "speeds": [], "tokens_per_second": None},
        {"losses": [(1, float("nan")), (2, 3.0)]},
        {"losses": [(1, 3.0)], "last_step": 1, "step": 1, "seconds_left": 0.0},
        {"communication": [], "memory": []},
        {"step": 0, "losses": [], "started": False},
        {"ended": "<b>done", "communication": [1.7]},
    ],
)
def test_whatever_is_not_there_yet_is_left_out(strange: dict[str, Any]):
    page = to_html(seen(**strange), [Now(0, "starting")])
    Page(page)
    assert "nan" not in page
    assert "<b>done" not in page
    assert to_line(seen(**strange), 200)


def test_until_the_first_step_it_says_what_the_ranks_do():
    early = RunStatus(last_step=600, started=True)
    ranks = [Now(0, "waiting", "all_reduce #3", (1,)), Now(1, "computing")]
    assert "waits in all_reduce #3 for rank 1" in Page(to_html(early, ranks)).text
    assert to_line(early, 200, ranks) == "first step  rank 0 waits in all_reduce #3 for rank 1, rank 1 computing"


def test_the_line_keeps_its_width():
    whole = to_line(seen(), 200)
    assert whole == ("step 312/600  ██████░░░░░░  52%  2 min 10 s left  loss 2.3141  8,912 tokens/s  34% communicating")
    assert to_line(seen(), 30) == whole[:29] + "…"


# Where and when


def write_and_wait(folder: str, fail: bool) -> int:
    """Stands for a training: its first rank writes a log while the panel looks."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        with open(Path(folder, "log.jsonl"), "w") as file:
            for row in rows(SETTINGS):
                file.write(json.dumps(row) + "\n")
                file.flush()
                time.sleep(0.01)
        time.sleep(1.2)
    dist.barrier()
    if fail:
        raise ValueError("the loss has come apart")
    return dist.get_rank()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_it_is_one_line_whose_last_state_stays(log: Log, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with panel(log.settings):
        assert list(launch(write_and_wait, 2, args=(log.settings.folder, False))) == [0, 1]
    shown = sys.stderr.getvalue()
    assert shown.count("\r\x1b[K") >= 2, "drawn at least once, and wiped"
    assert shown.endswith("\n")
    last = shown.split("\x1b[K")[-1]
    assert last.startswith("step 60/60  ████████████  100%  done  loss 2.1122  2,327 tokens/s")
    assert "\n" not in shown[:-1].replace("tplab: running on gloo, on the CPU (0 GPUs for 2 ranks)\n", "")


def test_it_never_disturbs(log: Log, monkeypatch: pytest.MonkeyPatch):
    """Neither a log that is none, nor a screen that can't draw, nor the end of the run by an error."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    log.path.write_text('[1]\n"kind"\n{"kind": "step"}\n')
    with pytest.raises(RankError, match="the loss has come apart"), panel(log.settings):
        launch(write_and_wait, 2, args=(log.settings.folder, True))
    monkeypatch.setattr(panel_module, "to_line", lambda *_: 1 / 0)
    with panel(log.settings):
        assert list(launch(write_and_wait, 2, args=(log.settings.folder, False))) == [0, 1]
    with pytest.raises(KeyboardInterrupt), panel(log.settings):
        raise KeyboardInterrupt
    assert liveview._other is None


def test_nothing_is_shown_where_nobody_looks(log: Log, capfd: pytest.CaptureFixture[str]):
    with panel(log.settings) as following:
        log.start()
        log.steps(1, 60)
    assert following.look().step == 60
    assert capfd.readouterr() == ("", "")


CELL = """
import os
from dataclasses import replace
from tests.capstone.made_up import SETTINGS
from tests.capstone.watching.test_panel import write_and_wait
from tplab import launch
from tplab.capstone.watching.panel import panel
os.environ.pop("JPY_SESSION_NAME", None)
os.environ.update({page})
with panel(replace(SETTINGS, folder={folder!r})):
    launch(write_and_wait, 2, args=({folder!r}, {fail}))
"""
PAGE = {"JPY_SESSION_NAME": "chapter.ipynb"}


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook() as book:
        yield book


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.slow
def test_in_jupyterlab_a_widget_that_ends_as_a_picture(book: Notebook, tmp_path: Path, fail: bool):
    cell = book.run(CELL.format(page=PAGE, folder=str(tmp_path), fail=fail))
    left = book.run("import ipywidgets; print(len(ipywidgets.widgets.widget._instances))")
    assert ("come apart" in cell.error) == fail
    displays = [message["content"] for message in cell.messages if "display_data" in message["msg_type"]]
    shown = [content for content in displays if content.get("transient", {}).get("display_id")]
    assert WIDGET_VIEW in shown[0]["data"]
    assert "image/png" in shown[-1]["data"]
    assert WIDGET_VIEW not in shown[-1]["data"]
    assert left.text.strip() == "0"


def test_executed_without_a_page_it_leaves_the_picture_only(book: Notebook, tmp_path: Path):
    cell = book.run(CELL.format(page={}, folder=str(tmp_path), fail=False))
    displays = [message["content"]["data"] for message in cell.messages if message["msg_type"] == "display_data"]
    assert [sorted(data) for data in displays] == [["image/png", "text/plain"]]
