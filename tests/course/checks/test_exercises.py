"""A check on real ranks: the right program passes, every wrong one is caught and told why."""

import re
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests import saying
from tests.course.checks import refused
from tests.course.checks.test_cases import SUM, total
from tplab.course.checks.cases import Case, random_tensor
from tplab.course.checks.exercises import check
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.trials import exercise
from tplab.course.checks.twins import Twin
from tplab.course.notebooks.mistakes import shared

pytestmark = pytest.mark.usefixtures("table")

trial = replace(SUM, cases=[Case()], world_sizes=(1, 2, 4), without=set(Twin))
exercise("90.1", "a sum", takes=["answer"], trials=[trial], passed="of all ranks")


def returns_nothing_on_rank_1(x, group):
    out = total(x, group)
    return out if dist.get_rank() == 0 else None


def cut_from_the_graph_on_rank_1(x, group):
    out = total(x, group)
    return out if dist.get_rank() == 0 else out.detach()


@pytest.mark.parametrize(
    ("answer", "question", "says"),
    [
        (returns_nothing_on_rank_1, "malformed", ["out  rank 1", "dx, backward traffic"]),
        (cut_from_the_graph_on_rank_1, "no gradient", ["dx", "rank 1", "another rank"]),
    ],
)
def test_a_wrong_answer_is_caught_and_explained(answer, question, says) -> None:
    failure = refused("90.1", answer)
    told = " ".join(str(failure).split())
    for text in ("Exercise 90.1, p = ", *says):
        assert " ".join(text.split()) in told, str(failure)
    assert failure.question == shared(question)
    assert "tplab/course/" not in told


def test_the_verdict_says_what_was_right() -> None:
    verdict = check("90.1", total)
    assert "out, dx, forward traffic, backward traffic, inputs unchanged" in repr(verdict)


@pytest.mark.parametrize("number", ["90.1", "89.2"])
def test_a_stub_stays_a_stub_also_on_one_rank_only_and_in_another_answer(number) -> None:
    def answer(x, group):
        if dist.get_rank() == 1:
            raise NotImplementedError(f"exercise {number}")
        return total(x, group)

    with pytest.raises(NotImplementedError) as caught:
        check("90.1", answer)
    assert (type(caught.value), str(caught.value)) == (NotImplementedError, f"exercise {number}")


# An exercise without ranks

LOCAL = Alone(
    calls=lambda generator: [Call(3, "square(3)")],
    run=lambda answer, call: one({"value": answer(call.given), "autograd": torch.is_grad_enabled()}),
    right=lambda call: one({"value": 9, "autograd": True}),
)
exercise("90.2", "in this process", takes=["answer"], trials=[LOCAL], passed="")


@pytest.mark.parametrize(
    ("answer", "headline", "report"),
    [
        (lambda number: number / 0, saying("90.2", "square(3)", "ZeroDivisionError"), "number / 0"),
        (lambda number: sys.exit(number), saying("90.2", "SystemExit"), "sys.exit(number)"),
    ],
    ids=["an error", "the end of the program"],
)
def test_an_exception_in_this_process_is_a_failure_that_shows_the_learners_lines_only(answer, headline, report) -> None:
    failure = refused("90.2", answer)
    assert re.search(headline, failure.headline)
    assert failure.question == shared("failed")
    assert report in failure.report
    assert "tplab/course" not in failure.report


def test_the_same_seed_gives_the_same_inputs_and_no_seed_gives_others() -> None:
    drawn = []

    def calls(generator):
        drawn.append(random_tensor(generator, 3).tolist())
        return [Call(3, "square(3)")]

    exercise("90.4", "drawn", takes=["answer"], trials=[replace(LOCAL, calls=calls)], passed="")
    for seed in (17, 17, None, None):
        failure = refused("90.4", abs, seed=seed)
    assert drawn[0] == drawn[1]
    assert len(set(map(tuple, drawn))) == 3
    refused("90.4", abs, seed=int(failure.footnote.partition("seed=")[2].rstrip(")")))
    assert drawn[-1] == drawn[-2]


def first_try(number: int) -> int:
    return number


def test_an_answer_may_use_its_own_earlier_version() -> None:
    refused("90.2", first_try)
    assert "90.2" not in refused("90.2", lambda number: first_try(number)).question


@torch.no_grad()
def test_a_check_works_while_autograd_is_off() -> None:
    assert "value, autograd" in check("90.2", lambda number: number**2).compared


def test_as_many_answers_as_the_check_takes() -> None:
    with pytest.raises(TypeError, match=saying("90.2", "answer", "2 answers")):
        check("90.2", abs, abs)


def test_a_check_that_compares_nothing_is_refused() -> None:
    exercise("90.3", "empty", takes=["answer"], trials=[], passed="")
    with pytest.raises(RuntimeError, match=saying("exercise 90.3")):
        check("90.3", total)


@pytest.mark.parametrize(("number", "named"), [("89.1", "'89'"), ("90.77", "'90.77'"), ("x", "'x'")])
def test_an_unknown_number_is_refused(number, named) -> None:
    with pytest.raises(ValueError, match=saying(named)):
        check(number, total)
