"""A moving picture in a notebook that isn't trusted, and in a page of the book: it starts once the reader is there."""

import time
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, Page, expect

from tests import ROOT
from tests.browser.lab import FIRST, PATIENCE, Lab

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group(FIRST), pytest.mark.timeout(1800)]

ALT = "f and g on two ranks"
LINK = f"![{ALT}](pictures/fg.svg)"
FAR = 60  # cells or paragraphs between the top of the page and the picture
SECONDS = 120  # a loop of the picture in these tests


def put_slow_picture(folder: Path) -> None:
    """Put fg.svg into the folder, but with longer loops, so that it moves for as long as a test looks at it."""
    drawn = (ROOT / "pictures" / "moving" / "fg.svg").read_text(encoding="utf-8")
    slow = drawn.replace("animation-duration:12s", f"animation-duration:{SECONDS}s")
    assert slow != drawn
    folder.mkdir(parents=True)
    (folder / "fg.svg").write_text(slow, encoding="utf-8")


def starts_again(picture: Locator, address: str) -> str:
    """Wait until the picture has another address than this one, which starts it again, and return the new address."""
    expect(picture).not_to_have_attribute("src", address, timeout=PATIENCE * 1000)
    return picture.get_attribute("src") or ""


def starts_in_view_and_by_a_click(page: Page) -> None:
    """The picture starts again as soon as it's in view, and after a click."""
    picture = page.get_by_alt_text(ALT)
    address = picture.get_attribute("src") or ""
    page.wait_for_timeout(500)
    assert picture.get_attribute("src") == address, "nobody has seen it yet"
    picture.scroll_into_view_if_needed()
    seen = starts_again(picture, address)
    picture.click()
    assert starts_again(picture, seen) != address
    first, end = picture.screenshot(), time.monotonic() + PATIENCE
    while picture.screenshot() == first:
        assert time.monotonic() < end, "it doesn't move"
    assert picture.evaluate("picture => picture.naturalWidth") > 0


def test_in_a_notebook_that_is_not_trusted(lab: Lab) -> None:
    folder = lab.server.folder / "moving"
    put_slow_picture(folder / "pictures")
    cells = [nbformat.v4.new_markdown_cell(f"# A heading, number {number}") for number in range(FAR)]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook = nbformat.v4.new_notebook(
        cells=[*cells, nbformat.v4.new_markdown_cell(LINK), nbformat.v4.new_code_cell("1 + 1")],
        metadata={"kernelspec": kernel},
    )
    nbformat.write(notebook, folder / "90_tiny.ipynb")
    with lab.notebook("moving/90_tiny.ipynb") as page:
        assert page.page.get_by_title("Notebook not trusted").count()
        starts_in_view_and_by_a_click(page.page)
        assert page.refused == []
        assert page.errors == []


def test_in_a_page_of_the_book(page: Page, tmp_path: Path) -> None:
    put_slow_picture(tmp_path / "_images")
    script = (ROOT / "docs" / "_static" / "replay.js").read_text(encoding="utf-8")
    text = "<p>Text.</p>" * FAR * 3
    (tmp_path / "page.html").write_text(
        f'<!doctype html><script>{script}</script>{text}<img alt="{ALT}" src="_images/fg.svg">', encoding="utf-8"
    )
    page.goto((tmp_path / "page.html").as_uri())
    starts_in_view_and_by_a_click(page)
