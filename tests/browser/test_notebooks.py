"""Every chapter in a real browser: it runs without an error, every knob changes its picture, and all of it can be read.

The first fifteen minutes and chapter 01, the first ones that start ranks, run whole. In the others, only the cells with
a knob run, and the cells that these need. The rest shows what was saved with the solution, and tests/notebooks runs
every cell. Each chapter is shown in one theme, a third of them in the dark one.
"""

import re
import shutil

import nbformat
import pytest
from playwright.sync_api import Locator

from tests import ROOT
from tests.browser.lab import DARK, FIRST, LIGHT, SECOND, NotebookPage, contrasts
from tplab.course.grade.needs import ids_with_needs
from tplab.course.notebooks.numbering import chapter_files

CHAPTERS = [path.stem for path in chapter_files(ROOT / "solutions", ".ipynb")]
WHOLE = ["00_start", "01_ranks_and_collectives"]
WITHOUT_KNOBS = ["00_start", "08_vocab_parallel_loss", "09_randomness", "15_capstone"]
PLAYED = "01_ranks_and_collectives"
NARROW = "03_conjugate_operators"  # its controls are also turned in a window as narrow as a phone
IN_DARK = CHAPTERS[1::3]
KNOBS = [".widget-slider", ".widget-toggle-buttons", ".widget-checkbox", ".widget-dropdown"]
READABLE = 3.0  # contrast: WCAG 2.1 asks 3 of large text, 4.5 of small; black on white has 21

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1800)]


# Elements such as "img, table" that stick out of their cell to the right: what they are, and how far they do
TOO_WIDE = """elements => [...document.querySelectorAll(`.jp-OutputArea-output :is(${elements})`)]
    .map(one => [one.alt || one.innerText, one.getBoundingClientRect().right
        - one.closest(".jp-Cell").getBoundingClientRect().right])
    .filter(([name, excess]) => excess > 1)"""
WIDTHS = {
    1280: "img, table",
    900: "img, table",
    420: "img",
}  # of the window, and what must fit: on a phone, tables scroll

ERRORS = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']"


@pytest.fixture(scope="session")
def solved(lab):
    """The folder of the solutions, relative to the learner's."""
    folder = lab.server.folder / "solved"
    folder.mkdir()
    for stem in CHAPTERS:
        shutil.copy(ROOT / "solutions" / f"{stem}.ipynb", folder)
    return folder.name


def run(page: NotebookPage, stem: str) -> None:
    if stem in WHOLE:
        page.run_all()
    else:
        page.run_each(ids_with_needs(page.file, controls(page)))
    assert page.page.locator(ERRORS).all_inner_texts() == []
    assert page.errors == []
    assert page.refused == []


def controls(page: NotebookPage) -> list[str]:
    """The cells that show something to turn."""
    found = nbformat.read(page.file, as_version=4).cells
    return [cell.id for cell in found if "explore" in cell.metadata.get("tags", [])]


def turn_every_knob(page: NotebookPage, stem: str) -> int:
    """Choose another value with each control; its picture must change. Returns how many controls there were."""
    turned = 0
    for cell in controls(page):
        knobs = page.cell(cell).locator(f".tplab-explore > :is({', '.join(KNOBS)})")
        assert knobs.count(), f"{stem}: the cell {cell} shows no control"
        for place in range(knobs.count()):
            picture = page.picture(cell)
            knobs.nth(place).scroll_into_view_if_needed()
            choose_another(page, knobs.nth(place))
            page.next_picture(cell, picture)
            turned += 1
    return turned


def choose_another(page: NotebookPage, knob: Locator) -> None:
    if (handle := knob.locator(".noUi-handle")).count():
        readout = knob.locator(".widget-readout")
        value = readout.inner_text()
        handle.focus()
        page.page.keyboard.press("ArrowRight")
        if readout.inner_text() == value:  # it's at its right end
            page.page.keyboard.press("ArrowLeft")
        assert readout.inner_text() != value
    elif (buttons := knob.locator("button:not(.mod-active)")).count():
        buttons.first.click()
    elif (box := knob.locator("input[type=checkbox]")).count():
        box.click()
    else:
        chosen = knob.locator("select")
        chosen.select_option(index=chosen.evaluate("select => (select.selectedIndex + 1) % select.options.length"))


def unreadable(page: NotebookPage) -> list[str]:
    found = contrasts(page.page, ".jp-OutputArea-output *, .jp-MarkdownOutput *", without="mjx-container, svg")
    assert len(found) > 50, "there was nothing to read"
    return [f"{text!r} has contrast {contrast:.1f}" for contrast, text in found if contrast < READABLE]


def with_play_button(page: NotebookPage) -> str:
    """The cell that has one."""
    (cell,) = [cell.id for cell in nbformat.read(page.file, as_version=4).cells if "viz.play(" in cell.source]
    return cell


def play(page: NotebookPage, cell: str) -> None:
    """Press a cell's play button, which goes through the steps once, and then starts again."""
    player, step = page.cell(cell).locator(".widget-play"), page.cell(cell).locator(".widget-readout").last
    assert step.inner_text() == "3"
    third = page.picture(cell)
    player.locator("button").first.click()
    step.filter(has_text="6").wait_for()
    page.wait_until_idle()
    assert page.picture(cell) != third
    page.page.wait_for_timeout(1500)
    assert step.inner_text() == "6", "it stops at the last step"
    player.locator("button").first.click()
    step.filter(has_text=re.compile("[345]")).wait_for()  # from the start again
    page.wait_until_idle()


def lose_kernel(page: NotebookPage, cell: str) -> None:
    """Restart the kernel. The cell offers to run again, and its play button rests."""
    page.menu("Kernel", "Restart Kernel…")
    page.page.get_by_role("button", name="Confirm Kernel Restart").click()
    page.cell(cell).get_by_role("button", name="Run these cells").wait_for()
    player = page.cell(cell).locator(".widget-play")
    assert player.evaluate("buttons => getComputedStyle(buttons).pointerEvents") == "none"
    page.wait_until_idle()  # a kernel that is restarting can't be ended


@pytest.mark.parametrize(
    "stem", [pytest.param(stem, marks=pytest.mark.xdist_group(FIRST if stem < "04" else SECOND)) for stem in CHAPTERS]
)
def test_a_chapter_runs_and_its_controls_change_their_pictures(lab, solved, stem):
    with lab.notebook(f"{solved}/{stem}.ipynb", DARK if stem in IN_DARK else LIGHT) as page:
        run(page, stem)
        assert page.page.locator("body[data-jp-theme-light='false']").count() == (stem in IN_DARK)
        if stem == PLAYED:
            play(page, with_play_button(page))
        assert (turn_every_knob(page, stem) == 0) == (stem in WITHOUT_KNOBS)
        assert unreadable(page) == []
        assert page.errors == []
        for width, elements in WIDTHS.items():
            page.page.set_viewport_size({"width": width, "height": 1000})
            assert page.page.evaluate(TOO_WIDE, elements) == [], f"in a window of {width} pixels"
        assert page.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        if stem == NARROW:
            assert turn_every_knob(page, stem) >= 1
        if stem == PLAYED:
            page.page.set_viewport_size({"width": 1280, "height": 1000})
            lose_kernel(page, with_play_button(page))
