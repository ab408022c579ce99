"""Every chapter: its notebooks fit its source, its answers pass, its blanks are to do, and no known mistake passes."""

import importlib
import os
import re

import nbformat
import pytest

from tests import ROOT
from tests.chapter_runner import (
    chapter,
    load_chapter_namespace,
    run_check,
    run_prediction,
)
from tplab.course.checks.exercises import registered
from tplab.course.checks.known_mistakes import fingerprint, questions, tried
from tplab.course.checks.predictions import symptoms
from tplab.course.feedback.verdict import AMBER
from tplab.course.notebooks.build import stale
from tplab.course.notebooks.mistakes import path_of, tables
from tplab.course.notebooks.numbering import chapter_of, number_of, package
from tplab.course.notebooks.rewrite import keep_solution
from tplab.course.notebooks.rules import validate
from tplab.course.notebooks.source import parse_code, sources
from tplab.runtime.devices import COURSE_RANKS

STEMS = [path.stem for path in sources(ROOT)]
NUMBERS = [number_of(stem) for stem in STEMS]
EXERCISES = [exercise for number in NUMBERS for exercise in chapter(number).of_role("exercise")]
PREDICTIONS = [prediction for number in NUMBERS for prediction in chapter(number).of_role("predict")]
SEED = os.environ.get("TPLAB_TEST_SEED", "")  # if it's set, the known mistakes of all exercises run, with its inputs
RECORD = tried(ROOT)
UNTRIED = [  # their tables, or the code these depend on, have changed: nothing runs again that was tried as it is now
    exercise for exercise in EXERCISES
    if SEED or RECORD.get(exercise) != fingerprint(chapter(chapter_of(exercise)), exercise)
]  # fmt: skip


def spread(values, name=str):
    """Parameters whose tests may run in any process, also beside those of the same chapter."""
    names = [str(name(value)) for value in values]
    return [
        pytest.param(value, id=name, marks=pytest.mark.xdist_group(name))
        for value, name in zip(values, names, strict=True)
    ]


def test_there_are_chapters():
    assert STEMS, "no solutions/NN_*.py: nothing here was tested"
    assert EXERCISES
    assert PREDICTIONS


@pytest.mark.parametrize("number", NUMBERS)
def test_source_keeps_the_rules_and_notebooks_fit_it(number):
    validate(chapter(number))
    assert stale(chapter(number), ROOT) == [], "run `make notebooks`"


@pytest.mark.parametrize("folder", ["chapters", "solutions"])
def test_notebooks_have_less_than_a_megabyte(folder):
    """GitHub doesn't show larger ones."""
    sizes = {path.name: path.stat().st_size for path in (ROOT / folder).glob("*.ipynb")}
    assert {name: size for name, size in sizes.items() if size > 1_000_000} == {}, "draw smaller pictures or print less"


def test_no_chapter_launches_more_ranks_than_the_choice_of_the_device_assumes():
    paths = [*(ROOT / "solutions").glob("*.py"), *(ROOT / "tplab" / "course" / "exercises").rglob("*.py")]
    found = [re.findall(r"\blaunch\(\w+, *(\d+)", path.read_text(encoding="utf-8")) for path in paths]
    assert max(int(number) for each in found for number in each) == COURSE_RANKS


@pytest.mark.parametrize("number", NUMBERS)
def test_checks_and_predictions_are_those_of_the_source(number):
    module = importlib.import_module(f"tplab.course.exercises.{package(number)}")
    assert set(module.PREDICTIONS) == set(chapter(number).of_role("predict"))
    exercises = chapter(number).of_role("task")
    assert {exercise: registered(exercise).title for exercise in exercises} == {
        exercise: task.attributes["title"] for exercise, task in exercises.items()
    }
    assert {exercise for _, _, exercise in symptoms(number).rows} - {""} <= set(EXERCISES)


def test_the_list_of_chapters_uses_the_titles_of_the_chapters():
    """tests/course/notebooks/test_index.py compares the index with the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = {stem: title for title, stem in re.findall(r"\| \[(.+?)\]\(chapters/(\w+)\.ipynb\) \|", text)}
    headings = {stem: chapter(number_of(stem)).cells[0].text.splitlines()[0] for stem in STEMS}
    assert listed == {stem: re.sub(r"# (\d\d · )?", "", heading) for stem, heading in headings.items()}


@pytest.mark.parametrize("stem", STEMS)
def test_programs_that_are_wrong_on_purpose_do_fail(stem):
    """By the outputs of the executed solution, which the tests above hold to its source."""
    cells = nbformat.read(ROOT / "solutions" / f"{stem}.ipynb", as_version=4).cells
    broken = [cell for cell in cells if "with show_failure(" in cell.source]
    shown = [str(cell.get("outputs", "")) for cell in broken]
    assert all(AMBER in text for text in shown), "where nothing failed, the box has another color"


@pytest.mark.parametrize("exercise", spread(EXERCISES))
def test_check_fails_where_only_its_exercise_is_blank(exercise):
    namespace = load_chapter_namespace(exercise, {}, blank=[exercise])
    with pytest.raises(NotImplementedError, match=f"^exercise {exercise}$"):
        run_check(exercise, namespace)


if UNTRIED:  # without any exercise, pytest would skip the test, which CI doesn't allow

    @pytest.mark.slow
    @pytest.mark.timeout(1800)  # it runs up to sixty answers, on a machine that may be busy
    @pytest.mark.parametrize("exercise", spread(UNTRIED))
    def test_right_answers_pass_and_known_mistakes_get_the_question_they_stand_under(exercise):
        found = list(questions(exercise, int(SEED or "0")))
        assert len(found) > 10
        assert [f"{name}: {asked}" for name, wanted, asked in found if asked != wanted] == []


@pytest.mark.parametrize("number", [number for number in NUMBERS if path_of(number).exists()])
def test_tables_of_mistakes_fit_their_reference_answers(number):
    exercises = chapter(number).of_role("exercise")
    for title, table in tables(path_of(number)).items():
        reference = keep_solution(exercises[title.split()[0]].text)
        assert [row.where for row in table.rows if not (row.mistakes or row.symptoms)] == [], "nobody is ever asked"
        answers = {answer.name: answer for answer in [*table.mistakes, *table.right]}
        assert len(answers) == len(table.mistakes) + len(table.right), f"{title} has the same name twice"
        for answer in answers.values():
            parse_code(answer.of(reference))


@pytest.mark.parametrize("number", PREDICTIONS)
def test_prediction_accepts_the_answer_and_asks_for_the_dots(number):
    assert run_prediction(number).mark == "✓"
    assert run_prediction(number, blank=True).mark == "?"
