"""What a failure says was tried: the case on the ranks, the call in this process."""

import time

import pytest
import torch
import torch.distributed as dist

from tplab.course.checks import (
    CheckFailed,
    Claim,
    Verdict,
    called_as,
    calling,
    exercise,
    run_answer,
    run_cases,
    run_ranks,
    verify,
)
from tplab.course.checks.exercises import check

pytestmark = pytest.mark.usefixtures("chapter")


def scale(answer, cases, data):
    """On a rank: what the answer makes of each case's own number."""
    return [answer(case, mine[dist.get_rank()]) for case, mine in zip(cases, data, strict=True)]


CASES = ("one", "two", "three")
DATA = [[torch.tensor(float(10 * case + rank)) for rank in range(2)] for case in range(3)]


def try_cases(answer):
    options = {"note": lambda case: f"case({case})", "question": ask, "stuck": lambda case: f"Who waits in {case}?"}
    return list(run_cases(scale, 2, answer, CASES, DATA, **options))


def ask(case):
    return "Which two?" if case == "two" else None


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
    assert failure.value.question == "Which two?"
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
    assert failure.value.question == "Who waits in three?"


def test_ranks_that_wait_are_asked_about_their_collectives_and_not_about_shapes() -> None:
    with pytest.raises(CheckFailed) as failure:
        run_ranks(wait_on_rank_0, 2, question="Which two shapes do not fit?")
    assert failure.value.question.startswith("Does every rank call the same collectives")


def wait_on_rank_0():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def rank_0_never_comes():
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("program", "args"), [(time.sleep, (60,)), (rank_0_never_comes, ())])
def test_ranks_that_are_not_done_in_time_are_blamed_on_nobody(program, args) -> None:
    """Not even if some of them wait for a rank that would come later, or never."""
    with pytest.raises(CheckFailed) as failure:
        run_ranks(program, 2, *args, question="Which argument?", stuck="Who waits?", timeout=1.0)
    assert "p = 2: the ranks didn't finish in time" in str(failure.value)
    assert "inside a loop that never ends?" in failure.value.question
    assert "None" not in str(failure.value)


def test_what_was_wrong_in_an_earlier_case_is_told_first() -> None:
    """The cases before the one that fails are handed out, so that a check can compare them."""
    runs = run_cases(
        scale, 2, lambda case, number: number.long() // (case != "two"), CASES, DATA, note=str, question=ask
    )
    assert [value.item() for value in next(runs)] == [0, 1]
    with pytest.raises(CheckFailed, match="p = 2, two: your code fails"):
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
    runs = run_cases(scale, 2, answer, range(40), [[number] * 2 for number in numbers], note="case {}".format)
    assert [next(runs)[0].item() for _ in range(23)] == list(range(23))
    with pytest.raises(CheckFailed, match="case 23"):
        next(runs)
    assert launches == [40, 1, 22, 1]


def test_if_every_rank_fails_in_the_first_case_one_launch_is_enough(launches) -> None:
    def answer(case, number):
        dist.all_reduce(number)
        return number + None

    with pytest.raises(CheckFailed, match="p = 2, one: your code fails on every rank"):
        next(run_cases(scale, 2, answer, CASES, DATA, note=str))
    assert launches == [len(CASES)]


def test_a_message_that_meets_one_of_a_later_case_is_blamed_on_the_first_case(launches) -> None:
    """Rank 1 forgets its first message, so rank 0's first meets rank 1's second, and only the last case gets stuck."""

    def answer(case, number):
        if dist.get_rank() == 0 or case != "one":
            dist.all_reduce(number)
        return number

    with pytest.raises(CheckFailed, match="p = 2, one: the ranks are waiting for each other"):
        next(run_cases(scale, 2, answer, CASES, DATA, note=str))
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


def test_the_stub_stays_a_stub() -> None:
    def answer(case, number):
        raise NotImplementedError("exercise 90.1")

    with pytest.raises(NotImplementedError, match=r"^exercise 90\.1$"):
        try_cases(answer)
    with pytest.raises(NotImplementedError, match=r"^exercise 90\.1$"), calling("f(1)"):
        raise NotImplementedError("exercise 90.1")


def test_a_call_in_this_process_is_named_as_written() -> None:
    @exercise("90.70", "a call")
    def checked(answer) -> Verdict:
        with calling("half(3, dim=-1)", "What is half of 3?"):
            answer(3)
        return Verdict()

    with pytest.raises(CheckFailed) as failure:
        check("90.70", lambda number: torch.zeros(number).reshape(-1, 2))
    assert failure.value.headline == "Exercise 90.70: half(3, dim=-1) raised RuntimeError."
    assert failure.value.question == "What is half of 3?"
    assert "reshape(-1, 2)" in failure.value.report


def test_what_another_not_implemented_error_says_is_not_a_stub() -> None:
    with pytest.raises(CheckFailed, match=r"f\(1\) raised NotImplementedError"), calling("f(1)"):
        raise NotImplementedError("not for complex numbers")


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
        run_ranks(call_it, 1, lambda x: x.reshape(2, 2), note="in a note")
    assert "p = 1, in a note: your code fails on rank 0" in str(failure.value)
    assert "The call was answer(x [3], group)." in failure.value.report


# Statements


def statement_of(seen):
    @exercise("90.72", "statements")
    def checked() -> Verdict:
        verify("90.72", 2, seen, [{"out": 1}] * 2)
        return Verdict("a note")

    return check("90.72")


def test_a_statement_that_holds_stands_by_itself_in_the_verdict() -> None:
    told = str(statement_of([{"out": 1, "the shard has memory of its own": Claim("")}] * 2))
    assert "Right: out, on every rank at p = 2. Also: the shard has memory of its own." in " ".join(told.split())


def test_a_statement_that_does_not_hold_fails_the_check_though_nobody_expected_it() -> None:
    held, broken = ({"out": 1, "the shard is contiguous": Claim(text)} for text in ("", "its strides are (1, 4)"))
    with pytest.raises(CheckFailed) as failure:
        statement_of([held, broken])
    assert failure.value.rows == [("the shard is contiguous", "rank 1", "not true: its strides are (1, 4)")]
    assert failure.value.right == ["out"]


# What one process computes for p ranks


def test_what_one_process_computed_is_told_without_ranks() -> None:
    @exercise("90.74", "alone")
    def checked(answer) -> Verdict:
        for p in (1, 2):
            verify("90.74", p, [{"gap": answer(p)}], [{"gap": torch.tensor([1.0, 2.0]) * p}], note="x [2]", alone=True)
        return Verdict()

    assert "Right: gap, for p = 1, 2." in str(check("90.74", lambda p: torch.tensor([1.0, 2.0]) * p))
    with pytest.raises(CheckFailed) as failure:
        check("90.74", lambda p: torch.tensor([1.0, 2.0]))
    assert failure.value.headline == "Exercise 90.74, p = 2, x [2]: wrong scale (right at p = 1)."
    assert "rank" not in str(failure.value).partition("Think:")[0]
    with pytest.raises(ValueError, match="needs 1 observed and 1 expected"):
        verify("90.74", 2, [{}] * 2, [{}] * 2, alone=True)
