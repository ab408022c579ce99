"""The capstone's report in a browser: nothing is wider than the page, and every text can be read."""

from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.browser.lab import FIRST, contrasts
from tests.capstone.made_up import MEASURED, SETTINGS, write_run
from tplab.capstone.report import write_report

WIDTHS = (1280, 900, 390)

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group(FIRST)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a-folder-whose-name-is-longer-than-a-phone-is-wide-" + 40 * "x")
    write_run(folder, replace(SETTINGS, data="/texts/" + 90 * "y"), MEASURED)
    return write_report(folder)


def test_nothing_is_wider_than_the_page_and_texts_stand_out(page: Page, report: Path) -> None:
    page.emulate_media(color_scheme="dark")  # the page is light in any case
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(report.as_uri())
        page.eval_on_selector_all("details", "all => all.forEach((one) => { one.open = true; })")
        widest = page.evaluate("Math.max(...[...document.querySelectorAll('body *')].map((element) => "
                               "element.getBoundingClientRect().right))")  # fmt: skip
        assert widest <= width, width
    contrast, text = min(contrasts(page, "main *"))
    assert contrast >= 4.5, text
