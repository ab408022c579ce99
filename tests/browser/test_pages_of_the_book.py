"""The book: every chapter is a page, every link in it leads somewhere, and no answer is in sight; a reference."""

import importlib
import pkgutil
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import nbformat
import pytest

import tplab.tensor
from tests import ROOT
from tests.browser.conftest import DRAWN
from tplab.course.notebooks.numbering import chapter_files

SOLUTIONS = chapter_files(ROOT / "solutions", ".ipynb")

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("book"), pytest.mark.timeout(1800)]  # built once


class Page(HTMLParser):
    """What a page links to, the anchors it has, and its code: in sight, and folded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.code: dict[bool, str] = {True: "", False: ""}  # by whether it is folded
        self._folds = 0
        self._in_code = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.links += [given[name] for name in ("href", "src") if name in given]
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self._folds += tag == "details"
        self._in_code = self._in_code or tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        self._folds -= tag == "details"
        if tag == "pre":
            self._in_code = False

    def handle_data(self, data: str) -> None:
        if self._in_code:
            self.code[self._folds > 0] += data


@pytest.fixture(scope="module")
def pages(book: Path) -> dict[Path, Page]:
    return {
        path: Page(path.read_text(encoding="utf-8")) for path in book.rglob("*.html") if "_static" not in path.parts
    }


def test_every_chapter_is_a_page_that_the_index_leads_to(book: Path, pages: dict[Path, Page]) -> None:
    assert SOLUTIONS
    index = pages[book / "index.html"]
    for solution in SOLUTIONS:
        assert f"_pages/{solution.stem}.html" in index.links
        assert book / "_pages" / f"{solution.stem}.html" in pages


def test_every_link_inside_the_book_leads_somewhere(pages: dict[Path, Page]) -> None:
    broken = []
    inside = 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlparse(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            inside += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            here = target.is_file() and (
                not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].anchors
            )
            if not here:
                broken.append(f"{path.name}: {link}")
    assert broken == []
    assert inside > 10 * len(SOLUTIONS)


def test_reference_has_every_exported_name(book: Path, pages: dict[Path, Page]) -> None:
    rooms = [found.name for found in pkgutil.iter_modules(tplab.__path__) if found.ispkg]
    modules = [importlib.import_module(name) for name in ("tplab", *(f"tplab.{room}" for room in rooms))]
    exporting = [module for module in modules if getattr(module, "__all__", None)]
    assert len(exporting) > 10
    for module in exporting:
        page = pages[book / "_pages" / f"{module.__name__}.html"]
        shown = set(re.findall(r"\w+", page.code[False]))
        assert set(module.__all__) <= shown, module.__name__


def test_glossary_names_terms_that_the_chapters_use(book: Path) -> None:
    source = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^([\w-].*)\n  \S", source, re.MULTILINE)
    assert len(terms) >= 40
    assert terms == sorted(terms, key=str.lower)
    numbers = [int(number) for number in re.findall(r"\((\d\d)(?:, \d\d)?\)$", source, re.MULTILINE)]
    assert len(numbers) == len(terms)
    assert set(numbers) <= set(range(len(SOLUTIONS)))
    for name in re.findall(r"`(\w+)`", source):
        assert any(hasattr(room, name) for room in (tplab, tplab.tensor)), name
    assert source.count("\n  ") == (book / "glossary.html").read_text().count("<dd>")


def test_a_reader_steps_through_the_pictures_of_controls(book: Path) -> None:
    page = (book / "_pages" / f"{DRAWN}.html").read_text(encoding="utf-8")
    first, second = (
        re.findall(r'<img src="(.*?)" alt="(.+?)" data-values="(.*?)"', each)
        for each in page.split('class="states"')[1:]
    )
    assert sorted(values for _, _, values in first) == [
        f"p = {p}, kind = {kind}" for p in (1, 2, 4) for kind in ("column", "row")
    ]
    assert first[0][2] == "p = 2, kind = column"
    assert len({alt for _, alt, _ in first}) == len(first)
    assert [values for _, _, values in second[:2]] == ["rank_0 = 3.0, rank_1 = -3.0", "rank_0 = 3.0, rank_1 = -1.0"]
    assert len(second) == 1 + 6 + 6, "too many for all combinations: each value on its own"
    pictures = {(book / "_pages" / source).resolve().read_bytes() for source, _, _ in first + second}
    assert len(pictures) >= len(first) + len(second) - 1


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("solution", SOLUTIONS, ids=lambda path: path.stem)
def test_answers_are_folded_away_below_what_is_given(solution: Path, book: Path, pages: dict[Path, Page]) -> None:
    code = pages[book / "_pages" / f"{solution.stem}.html"].code
    given = {cell["id"]: cell.source for cell in nbformat.read(ROOT / "chapters" / solution.name, as_version=4).cells}
    answered = 0
    for cell in nbformat.read(solution, as_version=4).cells:
        if {"exercise", "predict"} & set(cell.metadata.get("tplab", {})):
            answered += 1
            assert squeezed(cell.source) in squeezed(code[True])
            assert squeezed(cell.source) not in squeezed(code[False])
            assert squeezed(given[cell["id"]]) in squeezed(code[False])
    assert answered >= 4
