"""The report: that its numbers are those of the log, that it needs nothing but itself, and names what is missing."""

import re
from pathlib import Path

import pytest

from tests.capstone.made_up import MEASURED, NASTY, SETTINGS, losses, write_run
from tests.runtime.page import Page
from tplab.capstone.report import compose, write_report
from tplab.capstone.report.run import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, measured=MEASURED)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_the_page_is_whole_and_needs_nothing_else(page: Page, folder: Path):
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object"}
    addresses = page.values("src") + page.values("href")
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in addresses)
    assert {address[1:] for address in addresses if address.startswith("#")} <= set(page.values("id"))
    assert all(attrs.get("alt") for tag, attrs in page.tags if tag == "img")
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[A-Za-z0-9+/=]+", "", html))


def test_its_numbers_are_those_of_the_log_and_those_measured(page: Page, folder: Path):
    last = losses(SETTINGS.steps)[-1]
    assert f"{last + 0.1:.3f}" in page.text
    assert f"{SETTINGS.tokens_per_step / 0.11:,.0f}" in page.text
    assert "30%" in page.text  # rank 1's share of communication
    assert "412 MB" in page.text
    assert "60 of 60 steps" in page.text
    assert "2 ranks are 1.72 times as fast as 1 rank" in page.text  # 0.19 / 0.1105
    assert "180 ms to 200 ms" in page.text
    assert "differ by at most 3e-07" in page.text  # 30 steps, 1e-8 more each
    assert compose(Run(folder)).missing == []


def test_written_text_is_text_and_never_markup(page: Page, folder: Path):
    assert NASTY in page.text
    assert "␀ is" in page.text, "what can't be shown has a picture"
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    block = re.search(r"^(`{4,})text\n(.*?)\n\1$", markdown, re.MULTILINE | re.DOTALL)
    assert block
    assert NASTY in block[2]


def test_markdown_has_its_pictures_beside_it(folder: Path):
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    names = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", markdown)
    assert len(names) == 6
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert {path.name for path in (folder / "report_files").iterdir()} == {Path(name).name for name in names}


def test_what_was_not_measured_is_named_with_the_command_for_it(tmp_path: Path):
    write_run(tmp_path)
    report = compose(Run(tmp_path))
    text, table = report.sections[-1].blocks
    assert f"study --folder {tmp_path}`" in text
    how = " ".join(row[1] for row in table.rows)
    for part in ("machine", "alone", "scaling"):
        assert how.count(f"--only {part}`") == 1
        assert f"--only {part}`" not in str(report.sections[:-1]), "it's said once"
    assert "Scaling" not in {section.title for section in report.sections}
    write_report(tmp_path)
    Page((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_a_run_without_a_step_has_nothing_to_report(tmp_path: Path):
    write_run(tmp_path)
    (tmp_path / "log.jsonl").write_text((tmp_path / "log.jsonl").read_text().split("\n")[0] + "\n")
    with pytest.raises(ValueError, match="hasn't completed a step"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="no run has been started in"):
        write_report(tmp_path / "nowhere")
