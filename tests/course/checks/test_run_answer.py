"""What a failure says was tried: the case on the ranks, the call in this process."""

import time

import pytest
import torch
import torch.distributed as dist

from tplab.course.checks import Claim, called_as, exercises, run_answer, run_ranks
from tplab.course.checks.exercises import check
from tplab.course.checks.forms.alone import Alone, Call, one, refusals
from tplab.course.checks.run_answer import run_cases
from tplab.course.checks.trials import Trial, exercise
from tplab.course.feedback.verdict import CheckFailed
from tplab.course.notebooks.mistakes import Row, Table, shared
from tplab.runtime import RankError

pytestmark = pytest.mark.usefixtures("chapter")


def scale(answer, cases, data):
    """On a rank: what the answer makes of each case's own number."""
    return [answer(case, mine[dist.get_rank()]) for case, mine in zip(cases, data, strict=True)]


CASES = ("one", "two", "three")
DATA = [[torch.tensor(float(10 * case + rank)) for rank in range(2)] for case in range(3)]


def cases_of(answer, cases=CASES, data=DATA, question=lambda case, failure: ""):
    return run_cases(scale, 2, answer, cases, data, note="case({})".format, question=question)


def try_cases(answer):
    return list(cases_of(answer, question=lambda case, failure: f"What about {case}?" if case != "three" else ""))


def test_the_cases_come_back_one_by_one_from_all_ranks() -> None:
    seen = try_cases(lambda case, number: number + 1)
    assert [[value.item() for value in case] for case in seen] == [[1, 2], [11, 12], [21, 22]]


def test_the_case_that_fails_is_named_and_asked_about() -> None:
    def answer(case, number):
        return number if case == "one" else number + None

    with pytest.raises(
        CheckFailed, match=r"p = 2, case\(two\): your code fails on (every rank|rank [01])\."
    ) as failure:
        try_cases(answer)
    assert failure.value.question == "What about two?"
    assert "number + None" in failure.value.report


def test_one_failing_rank_is_named_and_several_are_not_called_one() -> None:
    def on_rank_1(case, number):
        return number if dist.get_rank() == 0 else number + None

    def everywhere(case, number):
        dist.barrier()
        return number + None

    def with_different_errors(case, number):
        dist.barrier()
        return number + None if dist.get_rank() == 0 else number[None, 0, 0]

    with pytest.raises(CheckFailed, match=r"your code fails on rank 1\."):
        try_cases(on_rank_1)
    with pytest.raises(CheckFailed) as failure:
        try_cases(with_different_errors)
    both = all(f"rank {rank} failed" in failure.value.report for rank in (0, 1))
    assert ("fails on every rank" in failure.value.headline) == both
    with pytest.raises(CheckFailed) as failure:
        try_cases(everywhere)
    said = "every rank" if failure.value.report.startswith("ranks 0, 1 failed") else "rank "
    assert f"your code fails on {said}" in failure.value.headline


def test_a_case_on_which_the_ranks_get_stuck_is_named() -> None:
    def answer(case, number):
        if case == "three" and dist.get_rank() == 0:
            dist.all_reduce(number)
        return number

    with pytest.raises(CheckFailed, match=r"p = 2, case\(three\): the ranks are waiting") as failure:
        try_cases(answer)
    assert failure.value.question == shared("stuck"), "the case has no question of its own"


def rank_0_never_comes():
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("program", "args"), [(time.sleep, (60,)), (rank_0_never_comes, ())])
def test_ranks_that_are_not_done_in_time_are_blamed_on_nobody(program, args) -> None:
    """Not even if some of them wait for a rank that would come later, or never."""
    with pytest.raises(CheckFailed) as failure:
        run_ranks(program, 2, *args, timeout=1.0)
    assert "p = 2: the ranks didn't finish in time" in str(failure.value)
    assert failure.value.question == shared("late")
    assert "None" not in str(failure.value)


def test_what_was_wrong_in_an_earlier_case_is_told_first() -> None:
    """The cases before the one that fails are handed out, so that a check can compare them."""
    runs = cases_of(lambda case, number: number.long() // (case != "two"))
    assert [value.item() for value in next(runs)] == [0, 1]
    with pytest.raises(CheckFailed, match=r"p = 2, case\(two\): your code fails"):
        next(runs)


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
def test_a_case_that_fails_among_many_is_found_in_four_launches(launches, stuck) -> None:
    def answer(case, number):
        if case == 23 and stuck and dist.get_rank() == 0:
            dist.all_reduce(number)
        return number if case != 23 or stuck else number + None

    numbers = [torch.tensor(float(case)) for case in range(40)]
    runs = cases_of(answer, range(40), [[number] * 2 for number in numbers])
    assert [next(runs)[0].item() for _ in range(23)] == list(range(23))
    with pytest.raises(CheckFailed, match=r"case\(23\)"):
        next(runs)
    assert launches == [40, 1, 22, 1]


def test_if_every_rank_fails_in_the_first_case_one_launch_is_enough(launches) -> None:
    def answer(case, number):
        dist.all_reduce(number)
        return number + None

    with pytest.raises(CheckFailed, match=r"p = 2, case\(one\): your code fails on every rank"):
        next(cases_of(answer))
    assert launches == [len(CASES)]


def test_a_message_that_meets_one_of_a_later_case_is_blamed_on_the_first_case(launches) -> None:
    """Rank 1 forgets its first message, so rank 0's first meets rank 1's second, and only the last case gets stuck."""

    def answer(case, number):
        if dist.get_rank() == 0 or case != "one":
            dist.all_reduce(number)
        return number

    with pytest.raises(CheckFailed, match=r"p = 2, case\(one\): the ranks are waiting for each other"):
        next(cases_of(answer))
    assert launches == [len(CASES), 1]


def test_the_rank_that_raised_says_which_case_failed_even_if_another_one_is_behind(tmp_path) -> None:
    path = tmp_path / "begun"
    path.write_bytes(b"".join(index.to_bytes(run_answer.PLACE, "little") for index in (23, 20)))
    watched = run_answer.Watched(range(40), str(path))
    assert (watched.reached(2, failed=0), watched.reached(2, failed=None)) == (23, 20)


def test_a_failure_that_no_case_has_alone_is_told_as_it_is() -> None:
    def answer(case, number, calls=[]):  # noqa: B006 (it remembers its calls)
        calls.append(case)
        if len(calls) > 1:
            raise RuntimeError("the second call")
        return number

    with pytest.raises(CheckFailed, match="p = 2: your code fails") as failure:
        try_cases(answer)
    assert "the second call" in failure.value.report


def test_when_no_line_of_the_learner_ran_the_question_is_about_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = f'  File "{exercises.__file__}", line 3, in f\n    answer(1, 2)\nTypeError: answer() takes 1'

    def launch(*args, **options):
        raise RankError(f"rank 0 failed:\n{lines}", 0, "TypeError", "answer() takes 1")

    monkeypatch.setattr(run_answer, "launch", launch)
    with pytest.raises(CheckFailed, match=r"TypeError: answer\(\) takes 1") as failure:
        run_ranks(scale, 2)
    assert failure.value.question == shared("called")


def call_it(answer):
    with called_as("answer(x [3], group)"):
        return answer(torch.zeros(3))


def test_a_stub_called_on_a_rank_stays_a_stub() -> None:
    def answer(x):
        raise NotImplementedError("exercise 90.1")

    with pytest.raises(NotImplementedError, match=r"^exercise 90\.1$"):
        run_ranks(call_it, 1, answer)


def test_a_call_on_a_rank_is_named_below_what_it_raised() -> None:
    with pytest.raises(CheckFailed) as failure:
        run_ranks(call_it, 1, lambda x: x.reshape(2, 2), note=lambda error: "in a note")
    assert "p = 1, in a note: your code fails on rank 0" in str(failure.value)
    assert "The call was answer(x [3], group)." in failure.value.report


# In this process


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "table", lambda self, number: Table(number, (Row("Which?", "", symptoms=("dx",)),)))


def register(trial) -> None:
    exercise("90.72", "alone", takes=["answer"], trials=[trial], passed="")


def refused(answer) -> CheckFailed:
    with pytest.raises(CheckFailed) as failure:
        check("90.72", answer)
    return failure.value


def test_a_statement_stands_by_itself_in_the_verdict_and_fails_the_check_if_it_does_not_hold() -> None:
    register(
        Alone(
            calls=lambda generator: [Call(None, "a call", 2, alone=False)],
            run=lambda answer, call: [{"out": 1, "the shard is contiguous": Claim(answer(rank))} for rank in range(2)],
            right=lambda call: [{"out": 1}] * 2,
        )
    )
    told = " ".join(str(check("90.72", lambda rank: "")).split())
    assert "Right: out, on every rank at p = 2. Also: the shard is contiguous." in told
    failure = refused(lambda rank: "its strides are (1, 4)" if rank == 1 else "")
    assert failure.rows == [("the shard is contiguous", "rank 1", "not true: its strides are (1, 4)")]
    assert failure.right == ["out"]


def test_what_one_process_computed_for_p_ranks_is_told_without_ranks() -> None:
    register(
        Alone(
            calls=lambda generator: [Call(p, "x [2]", p) for p in (1, 2)],
            run=lambda answer, call: one({"gap": answer(call.given)}),
            right=lambda call: one({"gap": torch.tensor([1.0, 2.0]) * call.given}),
        )
    )
    assert "Right: gap, for p = 1, 2." in str(check("90.72", lambda p: torch.tensor([1.0, 2.0]) * p))
    failure = refused(lambda p: torch.tensor([1.0, 2.0]))
    assert failure.headline == "Exercise 90.72, p = 2, x [2]: wrong scale (right at p = 1)."
    assert "rank" not in str(failure).partition("Think:")[0]


def refuse(error: Exception):
    def answer():
        raise error

    return answer


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda: 2, "it returned 2"),
        (lambda: torch.zeros(3), "it returned a tensor of shape [3]"),
        (refuse(AssertionError("10, 4")), "it raised AssertionError"),
        (refuse(ValueError("10 is odd")), "doesn't mention 4"),
        (refuse(ValueError("max() of 10 and 4")), "about an empty list"),
    ],
    ids=["nothing raised", "a tensor", "another error", "says too little", "about an empty list"],
)
def test_a_refusal_has_to_be_a_value_error_that_names_the_cause(answer, says) -> None:
    register(refusals("10 columns are refused", [("divide(10, 4)", lambda answer: answer(), (10, 4))]))
    failure = refused(answer)
    assert "divide(10, 4)" in failure.headline
    assert says in failure.rows[0][2]
    assert "Also: 10 columns are refused." in str(check("90.72", refuse(ValueError("4 doesn't divide 10"))))
    with pytest.raises(NotImplementedError):
        check("90.72", refuse(NotImplementedError("exercise 90.72")))
