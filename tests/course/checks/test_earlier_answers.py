"""A failed check names the earlier exercise whose wrong answer the failed one uses."""

import json

import pytest

from tests import ROOT
from tests.wrong_answers import load_chapter_namespace, run_check, wrong_answers
from tplab.course.checks import CheckFailed
from tplab.course.grading.check_notebook import Verdict, check_notebook
from tplab.course.notebooks.cells import read_notebook

SOLUTION = ROOT / "solutions" / "04_parallel_linear.ipynb"
MEND = "but your answer to exercise {} doesn't pass its own check. Fix exercise {} first"


def wrong(exercise: str) -> str:
    """The first wrong answer to an exercise."""
    return next(answer for answer in wrong_answers(int(exercise[0])) if answer.exercise == exercise).source


def question(exercise: str, answers: dict[str, str]) -> str:
    """What the failed check of an exercise asks."""
    with pytest.raises(CheckFailed) as failure:
        run_check(exercise, load_chapter_namespace(exercise, answers), seed=3)
    return failure.value.question


@pytest.mark.parametrize(
    ("exercise", "earlier"),
    [("1.3", "1.2"), ("4.4", "4.3"), ("6.4", "6.1"), ("7.3", "7.1"), ("8.4", "8.1")],
    ids=[
        "one of two",
        "one function of two",
        "one of three",
        "a function of an exercise between",
        "the first of three",
    ],
)
def test_earlier_exercise_is_named(exercise, earlier):
    assert MEND.format(earlier, earlier) in question(exercise, {earlier: wrong(earlier)})


@pytest.mark.parametrize(("exercise", "earlier"), [("1.3", "1.2"), ("4.4", "4.3")])
def test_right_earlier_answer_is_not_named(exercise, earlier):
    assert "Mend" not in question(exercise, {exercise: wrong(exercise)})


def test_first_of_two_wrong_ones_is_named():
    assert MEND.format("8.2", "8.2") in question("8.4", {"8.2": wrong("8.2"), "8.3": wrong("8.3")})


def test_wrong_answer_that_this_one_does_not_use_is_not_named():
    assert "Mend" not in question("1.3", {"1.3": wrong("1.3"), "1.1": wrong("1.1")})


def test_tplab_check_names_it_too_when_it_runs_only_the_later_exercise(tmp_path):
    notebook = json.loads(SOLUTION.read_text())
    for cell in notebook["cells"]:
        if cell["metadata"].get("tplab", {}).get("exercise") == "4.3":
            cell["source"] = wrong("4.3")
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps(notebook))
    reference = read_notebook(SOLUTION)
    said = [item for item in check_notebook(reference, path, exercises=["4.4"]) if isinstance(item, Verdict)]
    assert [verdict.status for verdict in said] == ["failed"]
    assert MEND.format("4.3", "4.3") in " ".join(said[0].text.split())
