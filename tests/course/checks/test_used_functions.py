"""An answer that calls the course's own function is told so, and a wrong one hears of the earlier one that it uses."""

import re

import pytest

import tplab.tensor.linear
from tests import saying
from tests.chapter_runner import load_chapter_namespace, run_check, wrong_source
from tplab.course.checks.exercises import check
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.trials import exercise
from tplab.course.checks.used_functions import tplabs_own, wrong_part
from tplab.course.feedback.verdict import CheckFailed
from tplab.tensor import linear
from tplab.tensor.linear import ColumnParallelLinear as Theirs


class ColumnParallelLinear(Theirs):
    pass


def ring_all_reduce(x):
    from tplab.collectives.by_hand import ring_all_reduce

    return ring_all_reduce(x)


class RowParallelLinear:
    def forward(self, x):
        return linear.RowParallelLinear(3, 4)(x)


class ParallelMLP:
    def __init__(self):
        self.up = tplab.tensor.linear.ColumnParallelLinear(3, 4)


@pytest.mark.parametrize(
    ("answer", "theirs", "own"),
    [
        (Theirs, (), "ColumnParallelLinear"),
        (ColumnParallelLinear, (), "ColumnParallelLinear"),
        (ring_all_reduce, (), "ring_all_reduce"),
        (RowParallelLinear, (), "RowParallelLinear"),
        (ParallelMLP, (), ""),
        (ParallelMLP, ["ColumnParallelLinear"], "ColumnParallelLinear"),
        (lambda x: x, (), ""),
    ],
    ids=["itself", "a subclass", "imported inside", "of a module", "an earlier part", "by another name", "nothing"],
)
def test_tplabs_own_version_is_found(answer, theirs, own):
    assert tplabs_own([answer], theirs) == own


@pytest.mark.usefixtures("table")
def test_the_verdict_says_so():
    trial = Alone(
        calls=lambda generator: [Call(1, "one")], run=lambda answer, call: one({"value": call.given}),
        right=lambda call: one({"value": call.given}),
    )  # fmt: skip
    exercise("90.81", "theirs", takes=["answer"], trials=[trial], passed="Good.")
    assert re.search(saying("tplab", "ColumnParallelLinear", "Good."), check("90.81", Theirs).note)
    assert check("90.81", len).note == "Good."


def scatter(x):
    return x


@pytest.mark.parametrize(
    ("answer", "used"),
    [
        (lambda x: scatter(x), True),
        (lambda x: [scatter(each) for each in x], True),
        (lambda x: x.scatter(0), False),
        (lambda dist: dist.scatter(0), False),
    ],
    ids=["a call", "a call inside", "a method", "of a module"],
)
def test_an_attribute_with_the_name_of_a_wrong_answer_is_not_that_answer(answer, used):
    assert bool(wrong_part([answer], {"1.1": [scatter]})) == used


def question(exercise: str, namespace: dict) -> str:
    """What the failed check of an exercise asks."""
    with pytest.raises(CheckFailed) as failure:
        run_check(exercise, namespace, seed=3)
    return failure.value.question


def test_an_earlier_exercise_that_failed_is_named_where_its_answer_is_used():
    namespace = load_chapter_namespace("1.3", {"1.2": wrong_source("1.2")})
    assert "exercise 1.2" not in question("1.2", namespace)
    assert "exercise 1.2" in question("1.3", namespace)
    namespace = load_chapter_namespace("1.3", {"1.1": wrong_source("1.1"), "1.3": wrong_source("1.3")})
    question("1.1", namespace)
    assert "exercise 1" not in question("1.3", namespace), "it uses neither 1.1 nor the wrong 1.2 of another chapter"
