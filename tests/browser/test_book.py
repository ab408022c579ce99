"""Every page of the book in a real browser: in a wide window and the light theme, and in a narrow and dark one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.browser.conftest import DRAWN

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1800), pytest.mark.xdist_group("book")]

# How wide the page and the window are; of each figure its size, its natural size and its alt text; how narrow the
# narrowest other picture is; formulas left as TeX; figures, tables and formulas that end beyond the column of the text;
# and what outputs are painted on
MEASURES = """() => ({
    width: [document.documentElement.scrollWidth, document.documentElement.clientWidth],
    figures: [...document.querySelectorAll(".bd-article .cell_output img")].filter(img => img.checkVisibility())
        .map(img => [img.clientWidth, img.clientHeight, img.naturalWidth, img.naturalHeight, img.alt]),
    narrowest: Math.min(...[...document.querySelectorAll(".bd-article :is(p, .three) > img")]
        .filter(img => img.checkVisibility()).map(img => img.clientWidth)),
    raw: [...document.querySelectorAll(".bd-article :is(span, div).math")]
        .filter(math => !math.querySelector("mjx-container")).map(math => math.textContent),
    cut: [...document.querySelectorAll(".bd-article :is(img, table, mjx-container)")]
        .filter(one => one.checkVisibility() && one.getBoundingClientRect().right
            > document.querySelector(".bd-article").getBoundingClientRect().right + 1)
        .map(one => one.alt || one.textContent.slice(0, 80)),
    slabs: [...document.querySelectorAll(".bd-article .cell_output .text_html")]
        .map(html => getComputedStyle(html).backgroundColor),
})"""


def faults(measured: dict, width: int, theme: str) -> Iterator[str]:
    """What can't be read on a page, from its measures in a window of this width."""
    if measured["width"][0] > measured["width"][1]:
        yield f"it is {measured['width'][0]} pixels wide in {measured['width'][1]}"
    for w, h, natural_w, natural_h, alt in measured["figures"]:
        if abs(w * natural_h - h * natural_w) > max(natural_w, natural_h):
            yield f"a figure of {natural_w} x {natural_h} is shown at {w} x {h}"
        if not alt.strip() or re.fullmatch(r"(.*/)?[0-9a-f]{32,}(\.png)?", alt):
            yield f"{alt!r} says nothing about a figure"
    yield from (f"still TeX: {tex}" for tex in measured["raw"])
    if width > 1000:  # on a phone, they scroll
        yield from (f"this doesn't fit into the column: {name}" for name in measured["cut"])
    elif measured["narrowest"] and measured["narrowest"] < 550:
        yield f"the text in a picture of {measured['narrowest']} pixels can't be read"
    if theme == "dark":
        yield from (f"a slab in {color}" for color in measured["slabs"] if "0, 0, 0, 0" not in color)


def test_every_page_can_be_read(page: Page, book: Path) -> None:
    wrong: list[str] = []
    requests: list[str] = []
    figures = 0
    page.on("request", lambda request: requests.append(request.url))
    for path in sorted(path for path in book.rglob("*.html") if "_static" not in path.parts):
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(path.as_uri())
        page.add_style_tag(content="* { transition: none !important }")
        page.evaluate("() => window.MathJax && MathJax.startup && MathJax.startup.promise")
        page.evaluate("() => document.querySelectorAll('details').forEach(fold => { fold.open = true })")
        page.wait_for_function("() => [...document.images].every(img => img.complete || img.loading === 'lazy')")
        for width, theme in ((1280, "light"), (390, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.evaluate("theme => Object.assign(document.documentElement.dataset, {mode: theme, theme})", theme)
            measured = page.evaluate(MEASURES)
            figures += len(measured["figures"])
            wrong += [f"{path.name}, {width} pixels, {theme}: {what}" for what in faults(measured, width, theme)]
    with page.context.browser.new_context(viewport={"width": 390, "height": 900}) as readers:
        phone = readers.new_page()
        phone.add_init_script("localStorage.setItem('mode', 'dark'); localStorage.setItem('theme', 'dark')")
        phone.goto((book / "_pages" / f"{DRAWN}.html").as_uri())
        assert phone.locator("html").get_attribute("data-theme") == "dark", "as the reader has chosen"
        phone.evaluate("() => window.MathJax && MathJax.startup && MathJax.startup.promise")
        wrong += [f"opened on a phone: {what}" for what in faults(phone.evaluate(MEASURES), 390, "dark")]
    assert wrong == []
    assert figures > 2 * 60
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_buttons_go_through_the_pictures_of_a_control(page: Page, book: Path) -> None:
    page.goto((book / "_pages" / f"{DRAWN}.html").as_uri())
    states = page.locator(".states").first
    shown = states.locator("img.shown")
    assert states.locator("span").inner_text() == "p = 2, kind = column (1 of 6)"
    first = shown.get_attribute("src")
    states.get_by_role("button", name="back").click()  # the last one
    assert states.locator("span").inner_text().endswith("(6 of 6)")
    assert shown.get_attribute("src") != first
    states.get_by_role("button", name="next").click()
    assert shown.get_attribute("src") == first
