"""A failed check names the earlier exercise whose wrong answer the failed one uses."""

import pytest
import torch

from tests.chapter_runner import load_chapter_namespace, run_check, wrong_source
from tplab.course.checks.earlier_answers import _used
from tplab.course.feedback.verdict import CheckFailed
from tplab.tensor import sharding

MEND = "but your answer to exercise {} doesn't pass its own check. Fix exercise {} first"


def question(exercise: str, answers: dict[str, str], blank: tuple[str, ...] = ()) -> str:
    """What the failed check of an exercise asks."""
    with pytest.raises(CheckFailed) as failure:
        run_check(exercise, load_chapter_namespace(exercise, answers, blank), seed=3)
    return failure.value.question


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
)
def test_an_earlier_answer_is_found_however_it_is_used(source, used):
    namespace = {"__name__": "__main__", "torch": torch, "sharding": sharding}
    exec("class shard: pass", namespace)
    exec(source, namespace)
    assert ("shard" in _used((namespace["answer"],), namespace)) == used


def test_an_earlier_exercise_that_is_still_to_do_is_named():
    """The answers fail before they get to the stub."""
    answers = "def ring_all_gather(chunk): return chunk\ndef ring_all_reduce(x): return x or ring_reduce_scatter(x)"
    said = question("1.3", {"1.3": answers}, blank=("1.2",))
    assert "uses `ring_reduce_scatter` from exercise 1.2, which you haven't written yet" in said


def test_first_of_two_wrong_ones_is_named():
    assert MEND.format("8.1", "8.1") in question("8.3", {"8.1": wrong_source("8.1"), "8.2": wrong_source("8.2")})


def test_wrong_answer_that_this_one_does_not_use_is_not_named():
    assert "own check" not in question("1.3", {"1.3": wrong_source("1.3"), "1.1": wrong_source("1.1")})
