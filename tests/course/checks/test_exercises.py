"""A check on real ranks: the right program passes, every wrong one is caught and told why."""

import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course.checks import (
    WORLD_SIZES,
    CheckFailed,
    Question,
    Traffic,
    Verdict,
    exercise,
    fail,
    fresh_generator,
    must_refuse,
    observe,
    run_ranks,
    verify,
)
from tplab.course.checks import exercises as checking
from tplab.course.checks import run_answer as trying
from tplab.course.checks.exercises import check
from tplab.runtime import RankError

pytestmark = pytest.mark.usefixtures("chapter")


# An exercise as a chapter would have it: y = sum over ranks of x_r W_r^T, plus b


def program(answer, xs, weights, bias, dy):
    rank = dist.get_rank()
    weight, b = nn.Parameter(weights[rank]), nn.Parameter(bias)
    return observe(lambda x: answer(x, weight, b), dy, inputs={"x": xs[rank]}, parameters={"W": weight, "b": b})


@exercise("90.1", "row-parallel product")
def row_product(answer) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        x, weight, bias = (
            torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
            for shape in ((3, 8), (4, 8), 4)
        )
        dy = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        y = x @ weight.T + bias
        y.backward(dy)
        xs, weights = x.detach().chunk(p, 1), weight.detach().chunk(p, 1)
        seen = run_ranks(program, p, answer, xs, weights, bias.detach(), dy)
        expected = [
            {
                "out": y.detach(),
                "dx": x.grad.chunk(p, 1)[rank],
                "dW": weight.grad.chunk(p, 1)[rank],
                "db": bias.grad,
                "forward traffic": Traffic.expected(p, ("all_reduce", 12)),
                "backward traffic": Traffic(),
            }
            for rank in range(p)
        ]
        verify(
            "90.1",
            p,
            seen,
            expected,
            questions=[Question("out", "How often is the bias added?"), Question("db", "Whose bias is it?")],
            lookalikes={"out": {"the sum with p biases": [y.detach() + (p - 1) * bias.detach()] * p}},
        )
    return Verdict("with a bias that is not zero")


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return dy


class ReducesBackwardToo(SumOverRanks):
    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        dist.all_reduce(dy)
        return dy


class WritesIntoItsInput(SumOverRanks):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x.clone()


def right(x, w, b):
    return SumOverRanks.apply(x @ w.T) + b


def bias_on_every_rank(x, w, b):
    return SumOverRanks.apply(x @ w.T + b)


def bias_divided(x, w, b):
    return SumOverRanks.apply(x @ w.T + b / dist.get_world_size())


def bias_on_rank_0(x, w, b):
    return SumOverRanks.apply(x @ w.T + b if dist.get_rank() == 0 else x @ w.T)


def no_sum(x, w, b):
    return x @ w.T + b / dist.get_world_size()


def gradient_summed_too(x, w, b):
    return ReducesBackwardToo.apply(x @ w.T) + b


def returns_nothing(x, w, b):
    SumOverRanks.apply(x @ w.T) + b


def returns_nothing_on_rank_1(x, w, b):
    out = SumOverRanks.apply(x @ w.T) + b
    return out if dist.get_rank() == 0 else None


def returns_a_pair(x, w, b):
    return SumOverRanks.apply(x @ w.T), b


def returns_the_handle(x, w, b):
    return dist.all_reduce((x @ w.T).detach(), async_op=True)


def cut_from_the_graph(x, w, b):
    total = (x @ w.T).detach()
    dist.all_reduce(total)
    return total + b


def cut_from_the_graph_on_rank_1(x, w, b):
    out = SumOverRanks.apply(x @ w.T) + b
    return out if dist.get_rank() == 0 else out.detach()


def never_waits(x, w, b):
    part = x @ w.T
    total = part.detach().clone()
    dist.all_reduce(total, async_op=True)
    time.sleep(0.1)
    return part + (total - part).detach() + b


def sums_twice_the_traffic(x, w, b):
    a, c = (x @ w.T).chunk(2, 1)
    return torch.cat([SumOverRanks.apply(a), SumOverRanks.apply(c)], 1) + b


def single_precision(x, w, b):
    return SumOverRanks.apply((x @ w.T).float()) + b.float()


def writes_into_x(x, w, b):
    with torch.no_grad():
        x.mul_(2)
    return SumOverRanks.apply(x @ w.T / 2) + b


def rank_1_skips(x, w, b):
    return SumOverRanks.apply(x @ w.T) + b if dist.get_rank() == 0 else x @ w.T + b


def raises(x, w, b):
    return x @ w + b


def wrong_arguments(x, w):
    return x @ w


def stops(x, w, b):
    raise SystemExit(3)


WRONG = [
    (
        bias_on_every_rank,
        ["p = 2", "(right at p = 1)", "out  every rank  equals the sum with p biases", "How often"],
    ),
    (bias_divided, ["db  every rank  exactly 1/2 of the correct tensor", "Whose bias"]),
    (bias_on_rank_0, ["db  rank 1  None: no gradient reaches this tensor", "wrong on rank 1", "Whose bias"]),
    (no_sum, ["one term of the sum", "expected 1 all_reduce of 12 elements (float64); saw no collective"]),
    (
        gradient_summed_too,
        ["dx, dW", "exactly 2 times", "wrote into the upstream gradient", "one of the caller's tensors"],
    ),
    (
        returns_nothing,
        ["p = 1", "got None. Does every path", "dx, dW, db, backward traffic", "What should your function return"],
    ),
    (returns_nothing_on_rank_1, ["out", "rank 1", "return a value", "not run"]),
    (returns_a_pair, ["got a tuple of 2 (tensor [3, 4], tensor [4]), expected a tensor"]),
    (returns_the_handle, ["got a ", "expected a tensor", "both return None"]),
    (cut_from_the_graph, ["dx, dW  rank 0  None: no gradient reaches this tensor", "leave autograd's graph"]),
    (cut_from_the_graph_on_rank_1, ["dx, dW, db", "rank 1", "another rank is cut off"]),
    (never_waits, ["never waited for", "async_op=True"]),
    (sums_twice_the_traffic, ["expected 1 all_reduce of 12", "saw 2 all_reduces of 6", "The values are correct"]),
    (single_precision, ["out", "dtype float32, expected float64"]),
    (writes_into_x, ["wrote into x, which the caller still needs"]),
    (
        rank_1_skips,
        [
            "ranks are waiting for each other",
            "rank 1 never joined all_reduce #1",
            "rank 1: has returned from your code",
        ],
    ),
    (raises, ["fails on rank 0", "return x @ w + b", "shapes cannot be multiplied"]),
    (wrong_arguments, ["takes 2 positional arguments but 3 were given"]),
    (stops, ["fails on rank 0"]),
]


@exercise("90.11", "a number, in two cases on each world size")
def two_cases(answer) -> Verdict:
    for p in (1, 2):
        for case in ("plain", "special"):
            verify("90.11", p, run_ranks(answer, p, p, case, note=case), [{"out": 1}] * p, note=case)
    return Verdict("")


@pytest.mark.parametrize("fails", ["by its value", "by raising"])
def test_a_later_case_that_fails_at_p_2_is_not_called_right_at_p_2(fails) -> None:
    def right_but_for_the_last_case(p: int, case: str) -> dict[str, int]:
        wrong = p == 2 and case == "special"
        if wrong and fails == "by raising":
            raise ValueError("no")
        return {"out": 0 if wrong else 1}

    with pytest.raises(CheckFailed) as failure:
        check("90.11", right_but_for_the_last_case)
    headline = str(failure.value).splitlines()[0]
    assert "p = 2" in headline
    assert "(right at p = 1)" in headline


def test_only_the_failing_case_itself_is_called_right_at_other_world_sizes() -> None:
    with pytest.raises(CheckFailed) as failure:
        check("90.11", lambda p, case: {"out": 0 if case == "special" else 1})
    assert failure.value.headline == "Exercise 90.11, p = 1, special: wrong."


def test_the_box_of_a_pass_says_what_was_tried_and_what_comes_next() -> None:
    verdict = check("90.1", right)
    # 7 observations on 1 + 2 + 4 ranks; at p = 2 and at p = 4, one all-reduce of 3 x 4 float64 elements
    assert verdict.tried == "3 cases on 1, 2 and 4 ranks, 49 results compared, 2 messages of 192 bytes in all."
    assert verdict.after == ("Next: exercise 90.2, in this process.",)
    assert verdict.tried in verdict._repr_html_()
    assert "Next: exercise 90.2" in verdict._repr_html_()
    assert "Tried" not in repr(verdict), "the text is shorter"
    assert check("90.1", right)._repr_html_() == verdict._repr_html_(), "other inputs, the same box"


def test_the_right_answer_passes_and_the_verdict_says_what_was_compared() -> None:
    verdict = check("90.1", right)
    assert repr(verdict) == (
        "Exercise 90.1 passed: row-parallel product\n"
        "  Right: out, dx, dW, db, forward traffic, backward traffic, inputs unchanged, on every rank at p =\n"
        "  1, 2, 4.\n"
        "  with a bias that is not zero"
    )


@pytest.mark.parametrize(("answer", "says"), WRONG, ids=[answer.__name__ for answer, _ in WRONG])
def test_a_wrong_answer_is_caught_and_explained(answer, says) -> None:
    with pytest.raises(CheckFailed) as caught:
        check("90.1", answer)
    told = " ".join(str(caught.value).split())
    for text in says:
        assert " ".join(text.split()) in told, str(caught.value)
    assert "Exercise 90.1, p = " in told
    assert caught.value.question
    assert "tplab/course/" not in told


def not_written(x, w, b):
    raise NotImplementedError("exercise 90.1")


def waits_for_another(x, w, b):
    raise NotImplementedError("exercise 89.2")


def not_written_on_rank_1(x, w, b):
    out = SumOverRanks.apply(x @ w.T)
    if dist.get_rank() == 1:
        raise NotImplementedError("exercise 90.1")
    return out + b


@pytest.mark.parametrize(
    ("answer", "says"),
    [(not_written, "exercise 90.1"), (waits_for_another, "exercise 89.2"), (None, None)],
    ids=["its own stub", "a stub it uses", "a stub on one rank only"],
)
def test_a_stub_comes_out_as_itself(answer, says) -> None:
    if answer is None:  # right at p = 1, so only a rank of p = 2 reaches the stub

        def answer(x, w, b):
            return not_written_on_rank_1(x, w, b) if dist.get_world_size() > 1 else right(x, w, b)

        says = "exercise 90.1"
    with pytest.raises(NotImplementedError) as caught:
        check("90.1", answer)
    assert type(caught.value) is NotImplementedError
    assert str(caught.value) == says


def test_an_error_that_only_looks_like_a_stub_is_a_failure() -> None:
    def answer(x, w, b):
        raise NotImplementedError("no such operator")

    with pytest.raises(CheckFailed, match="no such operator"):
        check("90.1", answer)

    def local_answer(number):
        raise NotImplementedError("not for odd numbers")

    with pytest.raises(CheckFailed, match="not for odd numbers"):
        check("90.2", local_answer)


def test_the_same_seed_gives_the_same_inputs_and_no_seed_gives_others() -> None:
    def told(**seed):
        with pytest.raises(CheckFailed) as caught:
            check("90.1", gradient_dropped, **seed)
        return caught.value

    assert str(told(seed=17)) == str(told(seed=17))
    assert told(seed=17).footnote == 'To try the same inputs again: check("90.1", gradient_dropped, seed=17)'
    assert len({str(told().rows) for _ in range(3)}) == 3


def gradient_dropped(x, w, b):
    return SumOverRanks.apply((x + 0.1) @ w.T) + b


@exercise("90.2", "in this process")
def local(answer) -> Verdict:
    verify("90.2", 1, [{"value": answer(3)}], [{"value": 9}])
    return Verdict()


def test_an_exception_in_this_process_shows_the_learners_lines_only() -> None:
    def answer(number):
        return number / 0

    with pytest.raises(CheckFailed) as caught:
        check("90.2", answer)
    assert "return number / 0" in str(caught.value)
    assert "ZeroDivisionError" in str(caught.value)
    assert "tplab/course" not in str(caught.value)


def test_an_answer_that_ends_the_program_has_failed() -> None:
    with pytest.raises(CheckFailed, match="raised SystemExit") as caught:
        check("90.2", lambda number: sys.exit(number))
    assert "sys.exit(number)" in str(caught.value)


@pytest.mark.parametrize("answers", [(), (abs, abs)])
def test_as_many_answers_as_the_check_takes(answers: tuple) -> None:
    with pytest.raises(TypeError, match=f"exercise 90.2 takes answer, but you passed {len(answers)} answers"):
        check("90.2", *answers)


def test_a_check_works_while_autograd_is_off() -> None:
    with torch.no_grad():
        assert isinstance(check("90.1", right), Verdict)


def test_a_check_that_compares_nothing_is_refused() -> None:
    @exercise("90.3", "empty")
    def empty(answer) -> Verdict:
        return Verdict()

    with pytest.raises(RuntimeError, match="compared nothing"):
        check("90.3", right)


def test_a_check_that_returns_no_verdict_is_refused() -> None:
    @exercise("90.4", "no verdict")
    def silent(answer):
        verify("90.4", 1, [{"value": 1}], [{"value": 1}])

    with pytest.raises(TypeError, match="must return a Verdict"):
        check("90.4", right)


@pytest.mark.parametrize("number", ["89.1", "90.77", "x", ""])
def test_an_unknown_number_is_refused(number) -> None:
    with pytest.raises(ValueError, match="there is no"):
        check(number, right)


def test_fail_says_what_and_asks() -> None:
    with pytest.raises(CheckFailed, match=r"(?s)Exercise 4\.9: too slow.*Think: Why\?"):
        fail("4.9", "too slow", "Why?")


def refusal(exception: Exception | None, returns: object = 2):
    def call():
        if exception:
            raise exception
        return returns

    return call


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (refusal(None), "it returned 2"),
        (refusal(None, torch.zeros(3)), "it returned a tensor of shape [3]"),
        (refusal(TypeError("10, 4")), "raised a different exception"),
        (refusal(AssertionError("10, 4")), "raised a different exception"),
        (refusal(ValueError("10 is odd")), "doesn't mention 4"),
    ],
    ids=["nothing raised", "a tensor", "another error", "an assertion", "says too little"],
)
def test_must_refuse_catches(call, says) -> None:
    with pytest.raises(CheckFailed) as caught:
        must_refuse("2.1", call, "What should happen?", says=(10, 4), what="divide(10, 4)")
    assert says in str(caught.value)
    assert "divide(10, 4)" in str(caught.value)


def test_must_refuse_accepts_a_clear_refusal() -> None:
    must_refuse("2.1", refusal(ValueError("10 can't be divided by 4")), "?", says=(10, 4))


def test_must_refuse_lets_a_stub_through() -> None:
    with pytest.raises(NotImplementedError):
        must_refuse("2.1", refusal(NotImplementedError("exercise 2.1")), "?", error=RuntimeError)


def test_when_no_line_of_the_learner_ran_the_question_is_about_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    report = (
        f'rank 0 failed:\n  File "{checking.__file__}", line 3, in f\n    answer(1, 2)\nTypeError: answer() takes 1'
    )

    def launch(*args, **options):
        raise RankError(report, 0, "TypeError", "answer() takes 1")

    monkeypatch.setattr(trying, "launch", launch)
    with pytest.raises(CheckFailed, match=r"(?s)TypeError: answer\(\) takes 1.*According to the exercise"):
        run_ranks(program, 2)
    with pytest.raises(CheckFailed, match="Think: My own?"):
        run_ranks(program, 2, question="My own?")
