"""A learner at work, in a real browser: turn a knob, answer an exercise, watch the ranks, get out of a deadlock."""

import io
import json
import re
import shutil

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image

from tests import ROOT
from tests.browser.lab import DARK, FIRST, choose_theme, lab_server

CHAPTER = "02_splitting_matrices"
EXERCISE, CHECK = "exercise-2-1", "check-2-1"

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group(FIRST), pytest.mark.timeout(1800)]

DEADLOCK = """\
import time

def stuck():
    if dist.get_rank() == 0:
        print("rank 0 goes into the all_reduce")
        dist.all_reduce(torch.ones(2))
    else:
        time.sleep(600)

launch(stuck, 2, timeout=None)"""

SEEN = "seen"  # a file that says that the test has seen the ranks at work
SLOW = f"""\
import os, time, torch, torch.distributed as dist
from tplab import launch
def slow():
    while dist.get_rank() == 2 and not os.path.exists({SEEN!r}):
        time.sleep(0.1)
    dist.all_reduce(torch.ones(2))
launch(slow, 3, timeout=None)"""

WRONG = """\
from tplab.course import check
def shard(tensor, dim, rank, world_size):
    return tensor.narrow(dim, 0, tensor.shape[dim] // world_size).clone()
def unshard(shards, dim):
    return torch.cat(shards, dim)
check("2.1", shard, unshard)"""

CELLS = {"slow": SLOW, "wrong": WRONG}


@pytest.fixture
def chapter(lab):
    """As a learner finds it."""
    shutil.copy(ROOT / "chapters" / f"{CHAPTER}.ipynb", lab.server.folder / "copy.ipynb")
    with lab.notebook("copy.ipynb") as found:
        yield found


@pytest.fixture(scope="module")
def solution():
    notebook = nbformat.read(ROOT / "solutions" / f"{CHAPTER}.ipynb", as_version=4)
    return {cell["id"]: cell.source for cell in notebook.cells}


@pytest.fixture(scope="module")
def explore():
    notebook = nbformat.read(ROOT / "chapters" / f"{CHAPTER}.ipynb", as_version=4)
    return next(cell["id"] for cell in notebook.cells if "explore" in cell.metadata.get("tags", []))


def test_a_learner_can_work_through_a_chapter(chapter, solution, explore, tmp_path):
    # Run All reaches the last cell: what isn't written yet waits in a calm box, and nothing is red
    chapter.run_all()
    assert "○ Exercise 2.1" in chapter.output(CHECK).inner_text()
    assert chapter.page.locator("[data-mime-type='application/vnd.jupyter.error']").count() == 0
    prompts = chapter.page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").all_inner_texts()
    assert prompts
    assert all(re.fullmatch(r"\[\d+\]:", prompt) for prompt in prompts), "every cell has run"

    # a slider, dragged and then moved by the keyboard, changes the picture
    handle = chapter.cell(explore).locator(".noUi-handle").first
    readout = chapter.cell(explore).locator(".widget-readout").first
    first = chapter.picture(explore)
    assert readout.inner_text() == "2"
    chapter.drag(handle, chapter.cell(explore).locator(".noUi-base").first, 0)
    second = chapter.next_picture(explore, first)
    assert readout.inner_text() == "1"
    handle.focus()
    chapter.page.keyboard.press("End")
    third = chapter.next_picture(explore, second)
    assert readout.inner_text() == "4"
    assert len({first, second, third}) == 3

    # a wrong answer is refused, the right one passes
    wrong = solution[EXERCISE].replace("rank * length", "0")
    assert wrong != solution[EXERCISE]
    chapter.write(EXERCISE, wrong)
    chapter.run(EXERCISE)
    chapter.run(CHECK)
    assert "✓ Exercise 2.1" not in chapter.output(CHECK).inner_text()
    chapter.write(EXERCISE, solution[EXERCISE])
    chapter.run(EXERCISE)
    chapter.run(CHECK)
    assert "✓ Exercise 2.1" in chapter.output(CHECK).inner_text()
    assert "○ Exercise 2.1" not in chapter.output(CHECK).inner_text()

    # a cell that waits for ever is interrupted, and the notebook goes on
    chapter.add_cell("deadlock", CHECK, DEADLOCK)
    chapter.start("deadlock")
    chapter.output("deadlock").get_by_text("rank 0 goes into the all_reduce").first.wait_for()
    chapter.page.wait_for_timeout(1000)
    assert "[*]" in chapter.cell("deadlock").inner_text()
    chapter.interrupt()
    chapter.wait_until_idle()
    assert "KeyboardInterrupt" in chapter.output("deadlock").inner_text()
    chapter.run(CHECK)
    assert "✓ Exercise 2.1" in chapter.output(CHECK).inner_text()
    chapter.screenshot(tmp_path / "end.png")

    # what JupyterLab saves is what was written, in cells that keep their ids
    chapter.save()
    saved = nbformat.read(chapter.file, as_version=4)
    source = {cell["id"]: cell.source for cell in saved.cells}
    assert source[EXERCISE] == solution[EXERCISE]
    assert set(chapter.ids) - {"deadlock"} <= set(source)

    # nothing was asked of anyone but this machine
    assert chapter.refused == []
    assert chapter.errors == []
    assert listening_addresses(chapter.server.pid) == {"127.0.0.1"}


def test_sliders_without_their_kernel_say_so_and_run_again(chapter, explore):
    handle = chapter.cell(explore).locator(".noUi-handle").first
    again = chapter.cell(explore).get_by_role("button", name="Run these cells")
    chapter.run_all()
    assert not again.is_visible()
    first = chapter.picture(explore)
    handle.focus()
    chapter.page.keyboard.press("End")
    chapter.next_picture(explore, first)

    chapter.menu("Kernel", "Restart Kernel…")
    chapter.page.get_by_role("button", name="Confirm Kernel Restart").click()
    again.wait_for()
    assert "kernel" in chapter.output(explore).inner_text()
    assert handle.evaluate("knob => getComputedStyle(knob).pointerEvents") == "none", "it can't be dragged any more"
    again.click()
    again.wait_for(state="hidden")
    chapter.wait_until_idle()
    assert chapter.picture(explore) == first, "the sliders are back where they began"

    chapter.save()
    chapter.menu("Kernel", "Shut Down Kernel")
    chapter.load()  # as on the next day: the notebook's file knows of sliders that are gone
    again.wait_for()
    assert "model not found" not in chapter.output(explore).inner_text()
    again.click()
    again.wait_for(state="hidden")
    chapter.wait_until_idle()
    assert chapter.picture(explore) == first


def test_ranks_are_seen_at_work_and_hints_unfold_one_by_one(lab):
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    cells = [new_code_cell(source, id=id) for id, source in CELLS.items()]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), lab.server.folder / "mine.ipynb")
    with lab.notebook("mine.ipynb") as page:
        # while the run lasts, what every rank does; afterwards nothing
        page.start("slow")
        page.page.get_by_text(re.compile("all_reduce #1.*rank 2")).first.wait_for()
        assert "●" in page.output("slow").inner_text()
        (lab.server.folder / SEEN).touch()
        page.wait_until_idle()
        assert "rank 2" not in page.output("slow").inner_text()

        page.run("wrong")
        page.save()
        assert (page.errors, page.refused) == ([], [])

    # the file keeps no trace of the view; a copy that nobody trusts still shows the box
    saved = json.loads(page.file.read_text())
    outputs = saved["cells"][0]["outputs"]
    assert "widget" not in json.dumps(saved)
    assert [output["data"] for output in outputs if output["output_type"] == "display_data"] == [{}]
    html = saved["cells"][1]["outputs"][0]["data"]["text/html"]
    saved["cells"][1]["outputs"][0]["data"]["text/html"] = [*html, "<script>document.title = 'run'</script>"]
    (lab.server.folder / "untrusted.ipynb").write_text(json.dumps(saved))
    with lab.notebook("untrusted.ipynb") as copy:
        assert copy.output("wrong").locator("script").count() == 0, "JupyterLab has cleaned what it does not trust"
        assert "tplab hint" in copy.output("wrong").inner_text()
        assert (copy.errors, copy.refused) == ([], [])


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_lab_suits_a_dark_theme_and_a_narrow_window(page, tmp_path):
    shutil.copy(ROOT / "solutions" / f"{CHAPTER}.ipynb", tmp_path)  # it has pictures, because it was run
    with lab_server(tmp_path) as server:
        page.goto(f"{server.url}lab?token={server.token}")
        choose_theme(page, DARK)
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(f"{server.url}lab/tree/{CHAPTER}.ipynb")
        picture = page.locator(".jp-RenderedImage img").first
        picture.scroll_into_view_if_needed()
        page.wait_for_timeout(1000)
        paper = Image.open(io.BytesIO(picture.screenshot())).convert("RGB").getpixel((8, 8))
        assert all(200 < channel < 235 for channel in paper), "it keeps its paper, a little darker, and its colors"

        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
        page.wait_for_timeout(1000)
        assert page.locator(".jp-mod-dirty").count() == 0, "to open a notebook is not to change it"

        cut = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth + 1).map(cell => cell.innerText)"
        assert page.locator(".jp-DirListing-itemText").count() >= len(list((ROOT / "chapters").glob("*.ipynb")))
        assert page.locator(".jp-DirListing-itemText").evaluate_all(cut) == [], "the names of files are whole"
        assert page.locator(".jp-Notebook .cm-scroller").count() > 10
        assert page.locator(".jp-Notebook .cm-scroller").evaluate_all(cut) == [], "lines of code are wrapped"

        page.set_viewport_size({"width": 900, "height": 900})
        page.reload()
        page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        page.locator(".jp-DirListing").wait_for(state="hidden")


def listening_addresses(pid: int) -> set[str]:
    """The addresses on which a process and its children can be reached."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    sockets = [connection for process in family for connection in process.net_connections(kind="inet")]
    return {connection.laddr.ip for connection in sockets if connection.status == psutil.CONN_LISTEN}
