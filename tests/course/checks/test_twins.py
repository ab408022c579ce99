"""Twins of a case, on real ranks: a check gets them for free, and each catches the mistake that it's there for."""

import pytest
import torch

from tests.course.checks.test_cases import WHOSE, Length, draw, expect, give, total
from tplab.course.checks import CheckFailed, Expected, Twin, Verdict, check_cases, exercise, observe, random_tensor
from tplab.course.checks.exercises import check
from tplab.course.checks.layouts import packed, spread_out, unpacked

pytestmark = pytest.mark.usefixtures("chapter")

SIZES = (3, 4, 2)


def run(answer, case, given, group):
    seen = observe(answer.apply if hasattr(answer, "apply") else answer, None, inputs={"x": given})
    return {"out": seen["out"], "dx": seen["dx"]}


@exercise("90.91", "twice as much")
def twice(answer) -> Verdict:
    def expect(case, problem, place):
        return Expected({"out": 2 * problem, "dx": torch.full_like(problem, 2)})

    def draw(case, generator, size):
        return random_tensor(generator, *SIZES)

    check_cases(
        "90.91", answer, [Length(), Length(n=2)], draw=draw, run=run, expect=expect, questions=(), whose_group=WHOSE
    )
    return Verdict()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.full_like(x, 2))
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        (factor,) = ctx.saved_tensors
        return dy * factor


def names_float64(x):
    return torch.zeros(x.shape, dtype=torch.float64, device=x.device) + 2 * x


outputs: dict = {}


def cached_by_shape(x):
    if (x.shape, x.dtype, x.stride()) not in outputs:
        outputs[x.shape, x.dtype, x.stride()] = 2 * x
    return outputs[x.shape, x.dtype, x.stride()]


def writes_into_a_copy(x):
    out = torch.empty_like(x)
    out.reshape(-1).copy_(2 * x.detach().reshape(-1))
    return out + 2 * x - 2 * x.detach()


def wrong(answer) -> CheckFailed:
    with pytest.raises(CheckFailed) as failure:
        check("90.91", answer)
    return failure.value


def test_a_right_answer_passes_in_every_twin():
    check("90.91", Doubled)
    check("90.91", lambda x: x + x)


def test_a_dtype_that_the_code_names_is_wrong_in_float32():
    failure = wrong(names_float64)
    assert failure.headline.startswith("Exercise 90.91, p = 2, names_float64 of 3 numbers in float32: wrong dtype")
    assert "Which line chooses a dtype on its own" in failure.question


def test_an_output_kept_from_an_earlier_call_is_wrong_between_two_other_calls():
    outputs.clear()
    failure = wrong(cached_by_shape)
    assert "p = 2, cached_by_shape of 3 numbers between two other calls: wrong" in failure.headline
    assert "What does a call leave behind" in failure.question


def test_what_is_written_into_a_copy_is_missed_on_tensors_with_another_layout():
    failure = wrong(writes_into_a_copy)
    assert "on tensors that aren't contiguous" in failure.headline
    assert "whatever you write into the copy is lost" in failure.question


def test_a_check_can_do_without_a_twin():
    @exercise("90.92", "a sum without twins")
    def without(answer) -> Verdict:
        check_cases(
            "90.92", answer, [Length()], draw=draw, give=give, run=total_of, expect=expect, questions=(),
            without=set(Twin),
        )  # fmt: skip
        return Verdict()

    def total_of(answer, case, given, group):
        assert case.twin is None
        return observe(lambda x: answer(x, group), None, inputs={"x": given})

    check("90.92", total)


def test_a_mistake_in_a_plain_case_is_told_before_the_twins():
    assert wrong(lambda x: x.float()).headline.startswith("Exercise 90.91, p = 1, <lambda> of 3 numbers: wrong")


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (5,), ()])
def test_memory_layouts_arrive(shape):
    x = spread_out({"x": torch.randn(shape), "n": 3})
    assert x["x"].is_contiguous() == (len(shape) < 2)
    sent, strides = packed(x)
    arrived = unpacked({"x": sent["x"].contiguous(), "n": 3}, strides)
    assert torch.equal(arrived["x"], x["x"])
    assert arrived["x"].stride() == x["x"].stride()
    assert arrived["n"] == 3
