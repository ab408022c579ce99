"""A failed check names the earlier exercise whose wrong answer the failed one uses."""

import pytest
import torch

from tests import ROOT
from tests.chapter_runner import chapter, load_chapter_namespace, run_check, swap_all, wrong_source
from tplab.course.checks.earlier_answers import _used, earlier_answers
from tplab.course.feedback.verdict import CheckFailed
from tplab.course.notebooks.rewrite import keep_solution
from tplab.course.notebooks.source import passed_names, read, sources
from tplab.tensor import sharding

MEND = "but your answer to exercise {} doesn't pass its own check. Fix exercise {} first"


def question(exercise: str, answers: dict[str, str], blank: tuple[str, ...] = ()) -> str:
    """What the failed check of an exercise asks."""
    with pytest.raises(CheckFailed) as failure:
        run_check(exercise, load_chapter_namespace(exercise, answers, blank), seed=3)
    return failure.value.question


# every exercise whose reference answer uses earlier ones of the chapter, also through others
USES = {
    "1.3": ["1.2"],
    "3.4": ["3.2", "3.3"],
    "4.4": ["4.3"],
    "4.5": ["4.3"],
    "6.4": ["6.3"],
    "6.6": ["6.3"],
    "7.3": ["7.2"],
    "8.2": ["8.1"],
    "8.3": ["8.1", "8.2"],
    "8.4": ["8.1", "8.2"],
    "10.3": ["10.2"],
    "13.3": ["13.2"],
}


def test_every_exercise_that_uses_earlier_answers_is_known():
    found = {}
    for path in sources(ROOT):
        source = read(path)
        for exercise in source.of_role("exercise"):
            namespace = load_chapter_namespace(exercise, {})
            names = passed_names(source.of_role("check")[exercise].text)
            uses = [earlier for earlier, _, _ in earlier_answers(exercise, tuple(namespace[name] for name in names))]
            found |= {exercise: uses} if uses else {}
    assert found == USES


@pytest.mark.parametrize(("exercise", "earlier"), [("1.3", "1.2"), ("8.4", "8.1")])
def test_earlier_exercise_is_named(exercise, earlier):
    assert MEND.format(earlier, earlier) in question(exercise, {earlier: wrong_source(earlier)})


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("class answer(shard): pass", True),
        ("class answer:\n    @property\n    def part(self): return shard()", True),
        ("@torch.no_grad()\ndef answer(): return shard()", True),
        ("def answer(f=shard): return f()", True),
        ("def helper(): return shard()\ndef answer(): return helper()", True),
        ("def answer(): return sharding.shard()", False),  # the course's, and not the learner's
    ],
    ids=["a base class", "in a property", "behind a decorator", "a default value", "in a helper", "an attribute"],
)
def test_an_earlier_answer_is_found_however_it_is_used(source, used):
    namespace = {"__name__": "__main__", "torch": torch, "sharding": sharding}
    exec("class shard: pass", namespace)
    exec(source, namespace)
    assert ("shard" in _used((namespace["answer"],), namespace)) == used


def test_an_earlier_exercise_that_is_still_to_do_is_named():
    """The answer fails before it gets to the stub."""
    answer = swap_all(
        keep_solution(chapter(4).of_role("exercise")["4.4"].text),
        ("    init_method(master)\n", "    if param.numel():\n        return\n    init_method(master)\n"),
    )
    said = question("4.4", {"4.4": answer}, blank=("4.3",))
    assert "uses `shard` from exercise 4.3, which you haven't written yet. Write `shard` first" in said


def test_first_of_two_wrong_ones_is_named():
    assert MEND.format("8.1", "8.1") in question("8.3", {"8.1": wrong_source("8.1"), "8.2": wrong_source("8.2")})


def test_wrong_answer_that_this_one_does_not_use_is_not_named():
    assert "own check" not in question("1.3", {"1.3": wrong_source("1.3"), "1.1": wrong_source("1.1")})
