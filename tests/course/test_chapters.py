"""Every chapter: its notebooks fit its source, its solution passes, its blank form is to do, no wrong answer passes."""

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import is_dataclass
from pathlib import Path

import nbformat
import pytest

from tests import ROOT
from tests.course.chapter_cells import that_need_answers, with_what_they_need
from tests.course.known_mistakes import questions
from tests.wrong_answers import (
    chapter,
    has_table,
    load_chapter_namespace,
    plain,
    run_check,
    run_prediction,
    run_wrong_answer,
    wrong_answers,
)
from tplab.course.checks import Question
from tplab.course.checks.failures import NOTHING_FAILED
from tplab.course.grade.check_notebook import Note, Verdict, check_notebook
from tplab.course.grade.needs import has_side_effects
from tplab.course.grade.run import PYTEST
from tplab.course.notebooks.build import stale, table_problems
from tplab.course.notebooks.cells import read_notebook
from tplab.course.notebooks.kernels import DIED, STARTS
from tplab.course.notebooks.numbering import chapter_of, number_of, package, prefix
from tplab.course.notebooks.rules import validate
from tplab.course.notebooks.source import sources

STEMS = [path.stem for path in sources(ROOT)]
NUMBERS = [number_of(stem) for stem in STEMS]
EXERCISES = [exercise for number in NUMBERS for exercise in chapter(number).of_role("exercise")]
PREDICTIONS = [prediction for number in NUMBERS for prediction in chapter(number).of_role("predict")]
IN_TABLES = [exercise for exercise in EXERCISES if has_table(chapter_of(exercise))]
WRONG = [wrong for number in NUMBERS for wrong in wrong_answers(number)]


def spread(values, name=str):
    """Parameters that may run beside those of other chapters: one process for each chapter."""
    marks = [pytest.mark.xdist_group(f"chapter {str(name(value)).partition('.')[0]}") for value in values]
    return [pytest.param(value, id=str(name(value)), marks=mark) for value, mark in zip(values, marks, strict=True)]


def results(stem: str, folder: str, only: Collection[str] = ()) -> tuple[dict[str, str], list[str]]:
    """What `tplab check` says about a notebook: status by exercise, and notes. Every cell is run, or `only` these."""
    reference = [cell for cell in read_notebook(ROOT / "solutions" / f"{stem}.ipynb") if not only or cell.id in only]
    path = ROOT / folder / f"{stem}.ipynb"
    learner = [cell for cell in read_notebook(path) if not only or cell.id in only]
    stream = list(check_notebook(reference, path, learner=learner, everything=True))
    statuses = {said.number: f"{said.status} {said.text}".strip() for said in stream if isinstance(said, Verdict)}
    return statuses, [said.text for said in stream if isinstance(said, Note)]


def test_there_are_chapters(capfd):
    assert STEMS, "no solutions/NN_*.py: nothing here was tested"
    assert EXERCISES
    assert WRONG
    with capfd.disabled():
        print(
            f"\n{len(STEMS)} chapters, {len(EXERCISES)} exercises, {len(PREDICTIONS)} predictions, "
            f"{len(WRONG)} wrong answers",
            file=sys.stderr,
        )


@pytest.mark.parametrize("number", NUMBERS)
def test_source_keeps_the_rules_and_notebooks_fit_it(number):
    validate(chapter(number))
    assert stale(chapter(number), ROOT) == [], "run `make notebooks`"


@pytest.mark.parametrize("number", NUMBERS)
def test_checks_and_predictions_are_those_of_the_source(number):
    module = importlib.import_module(f"tplab.course.exercises.{package(number)}")
    assert set(module.PREDICTIONS) == set(chapter(number).of_role("predict"))
    assert {symptom.exercise for symptom in getattr(module, "SYMPTOMS", [])} - {""} <= set(EXERCISES)


@pytest.mark.parametrize("path", ["README.md", "solutions/index.py"])
def test_lists_of_chapters_use_the_titles_of_the_chapters(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    listed = {stem: title for title, stem in re.findall(r"\| \[(.+?)\]\((?:chapters/)?(\w+)\.ipynb\) \|", text)}
    headings = {stem: chapter(number_of(stem)).cells[0].text.splitlines()[0] for stem in STEMS}
    assert listed == {stem: re.sub(r"# (\d\d · )?", "", heading) for stem, heading in headings.items()}


@pytest.mark.parametrize("stem", STEMS)
def test_programs_that_are_wrong_on_purpose_do_fail(stem):
    """By the outputs of the executed solution, which the tests above hold to its source."""
    cells = nbformat.read(ROOT / "solutions" / f"{stem}.ipynb", as_version=4).cells
    broken = [cell for cell in cells if "with show_failure(" in cell.source]
    shown = [str(cell.get("outputs", "")) for cell in broken]
    assert all("It failed, as it should" in text for text in shown)
    assert not any(NOTHING_FAILED in text for text in shown)


@pytest.mark.parametrize("exercise", spread(EXERCISES))
def test_right_answer_passes(exercise):
    verdict = run_check(exercise, load_chapter_namespace(exercise, {}))
    assert verdict.exercise == exercise
    assert verdict.title == chapter(chapter_of(exercise)).of_role("task")[exercise].attributes["title"]
    assert verdict.compared


@pytest.mark.slow
@pytest.mark.share(len(STEMS))
@pytest.mark.parametrize("stem", spread(STEMS))
def test_solution_passes(stem):
    """And every cell runs that needs an answer. The others run the same in the blank chapter, below."""
    answered = that_need_answers(stem)
    only = with_what_they_need(
        stem, lambda cell: cell.role in ("exercise", "check") or cell.id in answered or has_side_effects(cell.source)
    )
    statuses, notes = results(stem, "solutions", only)
    assert statuses == dict.fromkeys(chapter(number_of(stem)).of_role("exercise"), "passed")
    assert notes == []


@pytest.mark.slow
@pytest.mark.share(len(STEMS))
@pytest.mark.parametrize("stem", spread(STEMS))
def test_blank_chapter_is_to_do_and_nothing_else_fails(stem):
    statuses, notes = results(stem, "chapters")
    exercises = list(chapter(number_of(stem)).of_role("exercise"))
    assert list(statuses) == exercises
    for place, (exercise, status) in enumerate(statuses.items()):
        assert status in ["to do", *(f"waiting {earlier}" for earlier in exercises[:place])], exercise
    assert notes == []


def compared_by_nbval(stem: str) -> nbformat.NotebookNode:
    """The chapter with its answers typed in, as far as nbval compares it: set-up, answers and checks. That every other
    cell runs is what the tests above say.

    The first launch of a kernel says on what it runs, and must not say so below a check. It is one of the cells above,
    for which a short one stands here."""
    notebook = nbformat.read(ROOT / "chapters" / f"{stem}.ipynb", as_version=4)
    solved = {cell.id: cell.source for cell in nbformat.read(ROOT / "solutions" / f"{stem}.ipynb", as_version=4).cells}
    cells, launched = [], False
    for cell in notebook.cells:
        role = cell.metadata.get("tplab", {})
        if role.keys() & {"exercise", "check"} or "setup" in cell.metadata.get("tags", []):
            cells.append(cell)
        elif cell.cell_type == "code" and "launch(" in cell.source and not launched:
            launched = True
            cells.append(nbformat.v4.new_code_cell("__import__('tplab').launch(int, 1)"))
        if "exercise" in role:
            cell.source = solved[cell.id]
    notebook.cells = cells
    return notebook


@pytest.mark.slow
@pytest.mark.share(len(STEMS))
@pytest.mark.parametrize("stem", spread(STEMS))
def test_solved_chapter_passes_plain_nbval(stem, tmp_path):
    """`pytest --nbval-lax` on a chapter whose answers were typed in but never run: the stored outputs are compared."""
    notebook = compared_by_nbval(stem)
    compared = [cell for cell in notebook.cells if "nbval-check-output" in cell.metadata.get("tags", [])]
    assert [cell.metadata["tplab"]["check"] for cell in compared] == list(chapter(number_of(stem)).of_role("check"))
    path = tmp_path / f"{stem}.ipynb"
    nbformat.write(notebook, path)
    command = [sys.executable, "-c", PYTEST, "-q", "--nbval-lax", "-p", "no:cacheprovider", "-c", os.devnull]
    for _ in range(STARTS):  # nbval starts a kernel that has lost its ports only once
        run = subprocess.run(
            [*command, path.name], cwd=tmp_path, env=dict(os.environ, PYTHONPATH=str(ROOT)), capture_output=True,
            text=True,
        )  # fmt: skip
        if DIED not in run.stdout:
            break
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.parametrize("exercise", spread(EXERCISES))
def test_check_fails_where_only_its_exercise_is_blank(exercise):
    namespace = load_chapter_namespace(exercise, {}, blank=[exercise])
    with pytest.raises(NotImplementedError, match=f"^exercise {exercise}$"):
        run_check(exercise, namespace)


@pytest.mark.share(20)
@pytest.mark.parametrize("wrong", spread(WRONG, lambda wrong: f"{wrong.exercise} {wrong.name}"))
def test_wrong_answer_is_caught(wrong):
    run_wrong_answer(wrong)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it runs up to sixty answers, on a machine that may be busy
@pytest.mark.parametrize("exercise", spread(IN_TABLES))
def test_known_mistakes_get_the_question_they_stand_under(exercise):
    found = list(questions(exercise))
    assert len(found) >= 10
    assert [f"{name}: {asked}" for name, wanted, asked in found if asked != wanted] == []


@pytest.mark.parametrize("number", NUMBERS)
def test_tables_of_mistakes_fit_their_reference_answers(number):
    assert table_problems(chapter(number)) == []


@pytest.mark.parametrize("exercise", [exercise for exercise in EXERCISES if exercise not in IN_TABLES])
def test_five_wrong_answers_for_each_exercise(exercise):
    names = Counter(wrong.name for wrong in WRONG if wrong.exercise == exercise)
    assert len(names) >= 5
    assert max(names.values()) == 1
    assert all(len(wrong.says) >= 10 for wrong in WRONG if wrong.exercise == exercise), "say more of the message"


@pytest.mark.parametrize("number", PREDICTIONS)
def test_prediction_accepts_the_answer_and_asks_for_the_dots(number):
    assert "right" in str(run_prediction(number)).splitlines()[0]
    assert "not" not in str(run_prediction(number)).splitlines()[0]
    assert "Replace the dots" in str(run_prediction(number, blank=True))


def questions_in(value: object, depth: int = 0) -> Iterator[Question]:
    """The questions in a value of a module: itself, or in a tuple, a mapping or a dataclass, however deep."""
    if isinstance(value, Question):
        yield value
    elif depth < 4 and isinstance(value, tuple | list):
        for item in value:
            yield from questions_in(item, depth + 1)
    elif depth < 4 and isinstance(value, dict):
        yield from questions_in(list(value.values()), depth)
    elif depth < 4 and is_dataclass(value) and not isinstance(value, type):
        yield from questions_in(list(vars(value).values()), depth)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_question_is_what_some_wrong_answer_must_be_asked(number):
    """By the words that the wrong answers of the chapter must get; `test_wrong_answer_is_caught` sees that they do."""
    chapters = importlib.import_module(f"tplab.course.exercises.{package(number)}")
    modules = [module for name, module in sys.modules.items() if f"{name}.".startswith(f"{chapters.__name__}.")]
    asked = {question.ask for module in modules for value in vars(module).values() for question in questions_in(value)}
    expected = [plain(wrong.says) for wrong in WRONG if wrong.exercise.startswith(f"{prefix(number)}.")]
    assert [ask for ask in asked if not any(words in plain(ask) for words in expected)] == []


def test_every_wrong_answer_belongs_to_an_exercise():
    assert {wrong.exercise for wrong in WRONG} == set(EXERCISES) - set(IN_TABLES)
    files = {path.stem for path in Path(__file__).parents[1].joinpath("wrong_answers").glob("*.py")}
    assert files - {"__init__", "accepted", "by_class"} == {
        package(number) for number in NUMBERS if not has_table(number)
    }
