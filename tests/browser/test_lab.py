"""A learner at work, in a real browser: open a chapter, turn a knob, answer an exercise, get out of a deadlock."""

import io
import re
import shutil

import nbformat
import psutil
import pytest
from PIL import Image

from tests import ROOT
from tests.browser.lab import NotebookPage, browser, chromium_path, lab_server

CHAPTER = "02_splitting_matrices"
EXERCISE, CHECK = "exercise-2-1", "check-2-1"

DEADLOCK = """\
import time

def stuck():
    if dist.get_rank() == 0:
        print("rank 0 goes into the all_reduce")
        dist.all_reduce(torch.ones(2))
    else:
        time.sleep(600)

launch(stuck, 2, timeout=None)"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A course of one chapter, as the learner finds it."""
    folder = tmp_path_factory.mktemp("course")
    (folder / "chapters").mkdir()
    shutil.copy(ROOT / "chapters" / f"{CHAPTER}.ipynb", folder / "chapters")
    return folder


@pytest.fixture(scope="module")
def chromium():
    if chromium_path() is None:
        pytest.skip("needs Chromium or Chrome (or its path in the variable CHROMIUM)")
    if shutil.which("make") is None:
        pytest.skip("needs make")
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def server(folder, chromium):
    with lab_server(folder) as found:
        yield found


@pytest.fixture(scope="module")
def page(chromium, server):
    return NotebookPage(chromium, server, f"chapters/{CHAPTER}.ipynb")


@pytest.fixture(scope="module")
def solution():
    notebook = nbformat.read(ROOT / "solutions" / f"{CHAPTER}.ipynb", as_version=4)
    return {cell["id"]: cell.source for cell in notebook.cells}


@pytest.fixture(scope="module")
def explore(folder):
    notebook = nbformat.read(folder / "chapters" / f"{CHAPTER}.ipynb", as_version=4)
    return next(cell["id"] for cell in notebook.cells if "explore" in cell.metadata.get("tags", []))


@pytest.mark.browser
@pytest.mark.timeout(1800)
def test_a_learner_can_work_through_a_chapter(page, folder, solution, explore, tmp_path):
    # Run All reaches the last cell: what isn't written yet waits in a calm box, and nothing is red
    page.run_all()
    assert "Exercise 2.1 is waiting for you." in page.output(CHECK).inner_text()
    assert page.page.locator("[data-mime-type='application/vnd.jupyter.error']").count() == 0
    prompts = page.page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").all_inner_texts()
    assert prompts
    assert all(re.fullmatch(r"\[\d+\]:", prompt) for prompt in prompts), "every cell has run"

    # a slider, dragged and then moved by the keyboard, changes the picture
    handle = page.cell(explore).locator(".noUi-handle").first
    readout = page.cell(explore).locator(".widget-readout").first
    first = page.picture(explore)
    assert readout.inner_text() == "2"
    page.drag(handle, page.cell(explore).locator(".noUi-base").first, 0)
    second = page.next_picture(explore, first)
    assert readout.inner_text() == "1"
    handle.focus()
    page.page.keyboard.press("End")
    third = page.next_picture(explore, second)
    assert readout.inner_text() == "4"
    assert len({first, second, third}) == 3

    # a wrong answer is refused, the right one passes
    wrong = solution[EXERCISE].replace("rank * length", "0")
    assert wrong != solution[EXERCISE]
    page.write(EXERCISE, wrong)
    page.run(EXERCISE)
    page.run(CHECK)
    assert "Exercise 2.1 passed" not in page.output(CHECK).inner_text()
    page.write(EXERCISE, solution[EXERCISE])
    page.run(EXERCISE)
    page.run(CHECK)
    assert "Exercise 2.1 passed" in page.output(CHECK).inner_text()
    assert "waiting" not in page.output(CHECK).inner_text()

    # a cell that waits for ever is interrupted, and the notebook goes on
    page.add_cell("deadlock", CHECK, DEADLOCK)
    page.start("deadlock")
    page.output("deadlock").get_by_text("rank 0 goes into the all_reduce").first.wait_for()
    page.page.wait_for_timeout(1000)
    assert "[*]" in page.cell("deadlock").inner_text()
    page.interrupt()
    page.wait_until_idle()
    assert "KeyboardInterrupt" in page.output("deadlock").inner_text()
    page.run(CHECK)
    assert "Exercise 2.1 passed" in page.output(CHECK).inner_text()
    page.screenshot(tmp_path / "end.png")

    # what JupyterLab saves is what was written, in cells that keep their ids
    page.save()
    saved = nbformat.read(folder / "chapters" / f"{CHAPTER}.ipynb", as_version=4)
    source = {cell["id"]: cell.source for cell in saved.cells}
    assert source[EXERCISE] == solution[EXERCISE]
    assert set(page.ids) - {"deadlock"} <= set(source)

    # nothing was asked of anyone but this machine
    assert page.refused == []
    assert page.errors == []
    assert listening_addresses(page.server.pid) == {"127.0.0.1"}


@pytest.mark.browser
@pytest.mark.timeout(1800)
def test_sliders_without_their_kernel_say_so_and_run_again(chromium, server, folder, explore):
    shutil.copy(ROOT / "chapters" / f"{CHAPTER}.ipynb", folder / "chapters" / "again.ipynb")
    page = NotebookPage(chromium, server, "chapters/again.ipynb")
    handle = page.cell(explore).locator(".noUi-handle").first
    again = page.cell(explore).get_by_role("button", name="Run these cells")
    page.run_all()
    assert not again.is_visible()
    first = page.picture(explore)
    handle.focus()
    page.page.keyboard.press("End")
    page.next_picture(explore, first)

    page.menu("Kernel", "Restart Kernel…")
    page.page.get_by_role("button", name="Confirm Kernel Restart").click()
    again.wait_for()
    assert "lost their kernel" in page.output(explore).inner_text()
    assert handle.evaluate("knob => getComputedStyle(knob).pointerEvents") == "none", "it can't be dragged any more"
    again.click()
    again.wait_for(state="hidden")
    page.wait_until_idle()
    assert page.picture(explore) == first, "the sliders are back where they began"

    page.save()
    page.menu("Kernel", "Shut Down Kernel")
    page.page.reload()  # as on the next day: the notebook's file knows of sliders that are gone
    again.wait_for()
    assert "model not found" not in page.output(explore).inner_text()
    again.click()
    again.wait_for(state="hidden")
    page.wait_until_idle()
    assert page.picture(explore) == first


@pytest.mark.browser
@pytest.mark.timeout(1800)
def test_the_lab_suits_a_dark_theme_and_a_narrow_window(chromium, tmp_path):
    for chapter in sorted((ROOT / "chapters").glob("*.ipynb")):
        shutil.copy(chapter, tmp_path)
    shutil.copy(ROOT / "solutions" / f"{CHAPTER}.ipynb", tmp_path)  # it has pictures, because it was run
    with lab_server(tmp_path, "JupyterLab Dark") as server:
        page = chromium.new_page()
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(f"{server.url}lab/tree/{CHAPTER}.ipynb?token={server.token}")
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

        narrow = chromium.new_page()
        narrow.set_viewport_size({"width": 900, "height": 900})
        narrow.goto(f"{server.url}lab/tree/{CHAPTER}.ipynb?token={server.token}")
        narrow.locator(".jp-Notebook .jp-Cell").first.wait_for()
        narrow.locator(".jp-DirListing").wait_for(state="hidden")


def listening_addresses(pid: int) -> set[str]:
    """The addresses on which a process and its children can be reached."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    sockets = [connection for process in family for connection in process.net_connections(kind="inet")]
    return {connection.laddr.ip for connection in sockets if connection.status == psutil.CONN_LISTEN}
