"""The report: its numbers are those of the log, it needs nothing but itself, and it says whose code it was."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests import saying
from tests.capstone.made_up import MEASURED, NASTY, SETTINGS, Log, losses, start_row, step_row, write_run
from tests.runtime.page import Page
from tplab.capstone.own_layers.find import COURSES, MINE
from tplab.capstone.report import write_report
from tplab.capstone.report.run import Run
from tplab.course.learn.my_tp import FOR_A_GPT


def read(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def words(folder: Path) -> str:
    return Page(read(folder)).text


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, replace(SETTINGS, data="/somewhere/else/notes"), measured=MEASURED)
    return read(folder)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_page_needs_nothing_else_and_has_no_absolute_path(page: Page, html: str):
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "img"}
    assert not page.values("src") + page.values("href")
    assert all(attrs.get("aria-label") for tag, attrs in page.tags if tag == "svg")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|/tmp|/somewhere", html)
    assert "else/notes" in html


def test_its_numbers_are_those_of_the_log_and_those_measured(page: Page):
    last = losses(SETTINGS.steps)[-1]
    assert f"{last + 0.1:.2f}" in page.text
    assert f"{SETTINGS.tokens_per_step / 0.11:,.0f}" in page.text
    assert " 30% " in page.text  # rank 1's share of communication
    assert re.search(r"1 rank\D*190 ms", page.text)
    assert re.search(r"2 ranks\D*0\.58\D*1 rank\b", page.text)  # 0.1105 / 0.19
    assert re.search(saying("agree", "3e-07"), page.text)  # 30 steps, 1e-8 more each
    assert re.search(saying(" 1.10 ", "1,234,567 bytes", "exactly"), page.text)


def test_written_text_is_text_and_never_markup(page: Page):
    assert NASTY in page.text
    assert "␀ is" in page.text, "what can't be shown has a picture"


def answers(*mine: str) -> dict:
    whose = {exercise: MINE if exercise in mine else COURSES for exercise in FOR_A_GPT}
    return {"whose": whose, "checked": {}, "lines": dict.fromkeys(FOR_A_GPT, 10)}


@pytest.mark.parametrize(
    ("tp", "mine", "says"),
    [
        (2, FOR_A_GPT, saying("2 ranks", "160 lines", "chapters 3, 4, 5, 6, 7, 8, 10 and 14")),
        (2, ("4.1", "5.2"), saying("2 ranks", "2 ", "16 answers", "20 lines", "chapters 4 and 5")),
        (1, (), r"model\D*chapters 3, 4, 5, 6, 7, 8 and 10"),
    ],
)
def test_it_begins_with_whose_code_it_was(tp: int, mine: tuple[str, ...], says: str, tmp_path: Path):
    log, settings = Log(tmp_path), replace(SETTINGS, tp=tp, layers="mine")
    log.add(start_row(settings, answers=answers(*mine)), step_row(settings, 1, 5.0))
    text = words(tmp_path)
    assert re.search(says, text)
    assert len(re.findall(r"chapter \d+, my\b", text)) == len({"5.2", "6.2", "7.3", "7.4", "8.3"} & set(mine))


def test_a_log_of_every_tenth_step_tells_the_whole_run(tmp_path: Path):
    write_run(tmp_path, replace(SETTINGS, log_every=10), MEASURED)
    values = losses(60)
    text = words(tmp_path)
    assert re.search(saying(f" {values[9]:.2f} ", f" {values[59]:.2f} nats"), text)
    assert " 3e-07" in text, "steps 10, 20 and 30 are compared"


@pytest.mark.parametrize(
    ("change", "off", "says"),
    [
        ({}, 0.5 / 30, r" 0\.5\b[^.]*float32"),
        ({"precision": "bfloat16"}, 0.02 / 30, r"agree[^.]* 0\.02\b"),
        ({"dropout": 0.1}, 0.5 / 30, r" 0\.5\b[^.]*dropout"),
    ],
)
def test_a_difference_is_called_what_it_is(tmp_path: Path, change: dict, off: float, says: str):
    write_run(tmp_path, replace(SETTINGS, **change), MEASURED | {"alone": losses(30, off)})
    assert re.search(says, words(tmp_path))


def test_a_run_that_went_on_at_another_tp_is_reported_as_it_is_now(tmp_path: Path):
    log, wide = Log(tmp_path), replace(SETTINGS, tp=4)
    log.add(start_row(SETTINGS), *(step_row(SETTINGS, step, 5.0) | {"seconds": 9.0} for step in range(1, 31)))
    later = {"time": "2026-03-02T08:00:00+00:00", "step": 31, "resumed_from": 30}
    log.add(start_row(wide, **later), *(step_row(wide, step, 4.0) | {"seconds": 0.5} for step in range(31, 61)))
    run = Run(tmp_path)
    assert (run.ranks, run.done, run.step_seconds) == (4, 60, 0.5)
    assert re.search(r"interrupted[^.]*once", words(tmp_path))
    log.add(start_row(SETTINGS, step=61, resumed_from=60))
    assert Run(tmp_path).ranks == 4, "a start behind which no step was done says nothing of those there are"
    log.add(step_row(SETTINGS, 61, 3.9) | {"seconds": 7.0})
    assert Run(tmp_path).step_seconds == 7.0


def test_what_differs_from_the_plan_is_said(tmp_path: Path):
    """The plan is 100 ms and 1,234,567 bytes."""
    log = Log(tmp_path)
    row = {"seconds": 0.2, "sent": [1_234_667] * 2}
    log.add(start_row(SETTINGS), *(step_row(SETTINGS, step, 5.0) | row for step in range(1, 11)))
    assert re.search(saying(" 2.00 ", "1,234,667 bytes", "100 more"), words(tmp_path))


def test_a_run_without_a_step_has_nothing_to_report(tmp_path: Path):
    Log(tmp_path).add(start_row(SETTINGS))
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=saying(str(folder))):
            write_report(folder)
