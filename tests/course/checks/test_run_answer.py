"""What a failure says was tried: the case on the ranks, the call in this process."""

import re
import time

import pytest
import torch
import torch.distributed as dist

from tests import saying
from tests.course.checks import refused
from tplab.course.checks import run_answer
from tplab.course.checks.exercises import check
from tplab.course.checks.forms.alone import Alone, Call, refusals
from tplab.course.checks.observation import Claim
from tplab.course.checks.run_answer import run_cases, run_ranks
from tplab.course.checks.trials import exercise
from tplab.course.feedback.verdict import CheckFailed
from tplab.course.notebooks.mistakes import shared
from tplab.runtime import Deadlock, RankError

pytestmark = pytest.mark.usefixtures("table")


def scale(answer, cases, data):
    """On a rank: what the answer makes of each case's own number."""
    return [answer(case, mine[dist.get_rank()]) for case, mine in zip(cases, data, strict=True)]


CASES = ("one", "two", "three")
DATA = [[torch.tensor(float(10 * case + rank)) for rank in range(2)] for case in range(3)]


def cases_of(answer, cases=CASES, data=DATA, question=lambda case, failure: ""):
    return run_cases(scale, 2, answer, cases, data, note="case({})".format, question=question)


def test_the_case_and_the_only_rank_that_fail_are_named_and_asked_about() -> None:
    def answer(case, number):
        return number if case == "one" or dist.get_rank() == 0 else number + None

    with pytest.raises(CheckFailed) as failure:
        list(cases_of(answer, question=lambda case, failure: f"What about {case}?"))
    assert re.search(saying("p = 2", "case(two)", "rank 1"), failure.value.headline)
    assert failure.value.question == "What about two?"
    assert "number + None" in failure.value.report


def test_ranks_that_are_not_done_in_time_are_blamed_on_nobody() -> None:
    with pytest.raises(CheckFailed) as failure:
        run_ranks(time.sleep, 2, 60, timeout=1.0)
    assert re.findall(r"\w+ = \d+|rank \d+", failure.value.headline) == ["p = 2"]
    assert failure.value.question == shared("late")


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """The number of cases in each launch, in order."""
    counts: list[int] = []

    def counted(program, p, answer, cases, *args, **options):
        counts.append(len(cases.cases))
        return run_ranks(program, p, answer, cases, *args, **options)

    monkeypatch.setattr(run_answer, "run_ranks", counted)
    return counts


@pytest.mark.parametrize("stuck", [False, True])
def test_a_case_that_fails_among_many_is_found_in_three_launches(launches, stuck) -> None:
    def answer(case, number):
        if case == 6 and stuck and dist.get_rank() == 0:
            dist.all_reduce(number)
        return number if case != 6 or stuck else number + None

    numbers = [torch.tensor(float(case)) for case in range(9)]
    runs = cases_of(answer, range(9), [[number] * 2 for number in numbers])
    assert [next(runs)[0].item() for _ in range(6)] == list(range(6))
    with pytest.raises(CheckFailed, match=r"case\(6\)"):
        next(runs)
    assert launches == [9, 6, 1]


def test_a_message_that_meets_one_of_a_later_case_is_blamed_on_the_first_case(launches) -> None:
    """Rank 1 forgets its first message, so rank 0's first meets rank 1's second, and only the last case gets stuck."""

    def answer(case, number):
        if dist.get_rank() == 0 or case != "one":
            dist.all_reduce(number)
        return number

    with pytest.raises(CheckFailed, match=saying("p = 2", "case(one)")) as failure:
        next(cases_of(answer))
    assert failure.value.question == shared("stuck"), "the case has no question of its own"
    assert launches == [3, 2, 1]


def test_the_rank_that_raised_says_which_case_failed_even_if_another_one_is_behind(tmp_path) -> None:
    path = tmp_path / "begun"
    path.write_bytes(b"".join(index.to_bytes(run_answer.PLACE, "little") for index in (23, 20)))
    watched = run_answer.Watched(range(40), str(path))
    assert watched.reached(2, RankError("rank 0 failed", rank=0)) == 23
    assert watched.reached(2, Deadlock("rank 0 is waiting", rank=0)) == 20


# In this process


def register(trial) -> None:
    exercise("90.72", "alone", takes=["answer"], trials=[trial], passed="")


def test_a_statement_stands_by_itself_in_the_verdict_and_fails_the_check_if_it_does_not_hold() -> None:
    register(
        Alone(
            calls=lambda generator: [Call(None, "a call", 2, alone=False)],
            run=lambda answer, call: [{"out": 1, "the shard is contiguous": Claim(answer(rank))} for rank in range(2)],
            right=lambda call: [{"out": 1}] * 2,
        )
    )
    told = " ".join(str(check("90.72", lambda rank: "")).split())
    assert re.search(saying("out", "p = 2", "the shard is contiguous"), told)
    failure = refused("90.72", lambda rank: "its strides are (1, 4)" if rank == 1 else "")
    ((claim, where, why),) = failure.rows
    assert (claim, where) == ("the shard is contiguous", "rank 1")
    assert "its strides are (1, 4)" in why
    assert failure.right == ["out"]


def refuse(error: Exception):
    def answer():
        raise error

    return answer


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda: 2, saying("ValueError", "2")),
        (refuse(AssertionError("10, 4")), saying("ValueError", "AssertionError")),
        (refuse(ValueError("10 is odd")), saying("ValueError", "4")),
    ],
)
def test_a_refusal_has_to_be_a_value_error_that_names_the_cause(answer, says) -> None:
    register(refusals("10 columns are refused", [("divide(10, 4)", lambda answer: answer(), (10, 4))]))
    failure = refused("90.72", answer)
    assert "divide(10, 4)" in failure.headline
    assert re.search(says, failure.rows[0][2])
    assert "10 columns are refused" in str(check("90.72", refuse(ValueError("4 doesn't divide 10"))))
    with pytest.raises(NotImplementedError):
        check("90.72", refuse(NotImplementedError("exercise 90.72")))
