"""The live panel: what it shows, where, and that nothing of it stays or disturbs."""

import io
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.capstone.made_up import SETTINGS, Log, rows, step_row
from tests.runtime.kernel import notebook
from tests.runtime.page import Page
from tplab import launch
from tplab.capstone.watching import panel as panel_module
from tplab.capstone.watching.panel import _Panel, panel, run
from tplab.runtime import liveview
from tplab.runtime.liveview import Now
from tplab.runtime.screen import WIDGET_VIEW


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


# Showing


@pytest.fixture
def shown(log: Log, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Draw the panel of a run on two ranks, and return the page."""
    monkeypatch.setattr(panel_module, "place", lambda: "page")
    drawn = []
    view = _Panel(log.settings, lambda: [Now(0, "waiting", "all_reduce #3", (1,)), Now(1, "computing")])
    monkeypatch.setattr(view._widget, "show", drawn.append)

    def show() -> str:
        view._draw(1.0)
        return Page(drawn[-1]).text

    return show


def test_the_page_says_how_far_the_run_is_and_what_each_rank_does(log: Log, shown: Callable[[], str]):
    assert "waits in all_reduce #3 for rank 1" in shown()
    log.start()
    assert "Training 2,410,000 parameters on 2 ranks (An Example CPU @ 2.00GHz) until step 60" in shown()
    log.steps(1, 6)
    log.add({"kind": "evaluation", "step": 6, "loss": 5.0})
    text = shown()
    for words in ("Predicted: 100 ms per step", "step  6   loss 4.9400", "30% communicating", "6 s left",
                  "loss 5.0000 on held-out text", "waits in all_reduce #3 for rank 1", "computing"):  # fmt: skip
        assert words in text, words


def test_half_a_row_waits_for_its_other_half(log: Log, shown: Callable[[], str]):
    log.start()
    text = json.dumps(step_row(log.settings, 1, 5.0))
    for part, there in ((text[:40], False), (text[40:], False), ("\n", True)):
        log.write(part)
        assert ("step  1 " in shown()) == there


def test_of_a_run_taken_up_again_the_old_rows_and_what_a_kill_cut_off_are_passed_over(log: Log):
    log.start()
    log.steps(1, 3)
    whole = log.path.stat().st_size
    log.write('{"kind": "step", "st')
    view = _Panel(log.settings, list)
    assert view._new_rows() == []
    os.truncate(log.path, whole)  # as the resumed run does
    log.start(resumed_from=2, step=3)
    log.steps(3, 3)
    assert [(row["kind"], row["step"]) for row in view._new_rows()] == [("start", 3), ("step", 3)]


def test_a_log_that_is_none_does_not_disturb(log: Log, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(panel_module, "place", lambda: "page")
    view = _Panel(log.settings, list)
    view._due = 0.0
    log.write('[1]\n"kind"\n{"kind": "step"}\n')
    view.refresh()
    assert view._due == float("inf"), "it gives up"
    view.close()


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


def test_outside_of_notebooks_a_run_is_shown_as_any_other(log: Log, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with panel(log.settings):
        assert liveview._other is None
        assert list(launch(write_and_wait, 2, args=(log.settings.folder, False))) == [0, 1]
    assert "rank 1 " in sys.stderr.getvalue()
    with pytest.raises(KeyboardInterrupt), panel(log.settings):
        raise KeyboardInterrupt


CELL = """
import os
from dataclasses import replace
from tests.capstone.made_up import SETTINGS
from tests.capstone.watching.test_panel import write_and_wait
from tplab import launch
from tplab.capstone.watching.panel import panel
os.environ["JPY_SESSION_NAME"] = "chapter.ipynb"
with panel(replace(SETTINGS, folder={folder!r})):
    launch(write_and_wait, 2, args=({folder!r}, True))
"""


@pytest.mark.slow
def test_in_jupyterlab_a_widget_that_ends_as_a_picture_also_when_a_rank_fails(tmp_path: Path):
    with notebook() as book:
        cell = book.run(CELL.format(folder=str(tmp_path)))
        left = book.run("import ipywidgets; print(len(ipywidgets.widgets.widget._instances))")
    assert "come apart" in cell.error
    displays = [message["content"] for message in cell.messages if "display_data" in message["msg_type"]]
    shown = [content for content in displays if content.get("transient", {}).get("display_id")]
    assert WIDGET_VIEW in shown[0]["data"]
    assert "image/png" in shown[-1]["data"]
    assert WIDGET_VIEW not in shown[-1]["data"]
    assert left.text.strip() == "0"


# Running


def test_without_answers_the_learners_are_looked_for_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given = []
    settings = replace(SETTINGS, layers="mine", tp=2, folder=str(tmp_path / "run"), chapters=str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="there's no folder .*nowhere with your notebooks"):
        run(settings)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(panel_module, "prepare", lambda settings: None)
    monkeypatch.setattr(panel_module, "find_answers", lambda folder, settings: f"those in {folder}")
    monkeypatch.setattr(panel_module, "launch", lambda *_, args, **options: given.append(args))
    run(settings)
    run(settings, "others")
    assert [answers for _, answers in given] == [f"those in {settings.chapters}", "others"]
