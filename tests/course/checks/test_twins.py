"""Twins of a case, on real ranks: a check gets them for free, and each catches the mistake that it's there for."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.course.checks.test_cases import ROWS, Length, draw, give, right, total
from tplab.course.checks import Traffic, Twin, observe, random_tensor, twins
from tplab.course.checks.exercises import check
from tplab.course.checks.layouts import packed, spread_out, unpacked
from tplab.course.checks.trials import OnRanks, Trial, exercise
from tplab.course.feedback.verdict import CheckFailed
from tplab.course.notebooks.mistakes import Table, shared

pytestmark = pytest.mark.usefixtures("chapter")

SIZES = (3, 4, 2)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "table", lambda self, number: Table(number, ROWS))


def run(answer, case, given, group):
    return observe(answer.apply if hasattr(answer, "apply") else answer, None, inputs={"x": given})


def plain(case, generator, size):
    return random_tensor(generator, *SIZES)


def twice_as_much(case, problem, place):
    return {"out": 2 * problem, "dx": torch.full_like(problem, 2)}


TWICE = OnRanks(cases=[Length(), Length(n=2)], draw=plain, run=run, right=twice_as_much)
exercise("90.91", "twice as much", takes=["twice"], trials=[TWICE], passed="")


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


def knows_two_dtypes(x):
    return 2 * (x.float() if x.dtype == torch.bfloat16 else x)


def with_numpy(x):
    return x + x * torch.from_numpy(np.ones_like(x.detach().numpy()))


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
    assert "Which line hardcodes a dtype" in failure.question


def test_an_input_that_is_no_leaf_is_asked_about():
    failure = wrong(lambda x: Doubled.apply(x if x.is_leaf or not torch.is_grad_enabled() else x.detach()))
    assert failure.headline.startswith("Exercise 90.91, p = 2, <lambda> of 3 numbers under torch.no_grad: wrong")
    assert "Which line checks x.is_leaf" in failure.question


def test_a_process_group_that_every_call_creates_is_asked_about():
    def with_a_new_group(x):
        dist.new_group()
        return 2 * x

    assert wrong(with_a_new_group).question == shared("new groups")


def test_a_result_in_float32_is_wrong_in_bfloat16():
    failure = wrong(knows_two_dtypes)
    assert failure.headline.startswith("Exercise 90.91, p = 2, knows_two_dtypes of 3 numbers in bfloat16: wrong dtype")
    assert {"float32", "bfloat16"} <= set(failure.rows[0][2].replace(",", "").split())
    assert "for float64 and float32 tensors, but not for bfloat16" in failure.question


def test_what_bfloat16_makes_fail_is_named():
    failure = wrong(with_numpy)
    assert "with_numpy of 3 numbers in bfloat16: your code fails" in failure.headline
    assert "NumPy has no bfloat16" in failure.question


def test_a_bfloat16_result_may_be_rounded_and_not_wrong():
    check("90.91", lambda x: x + x.float().mul(1.01).to(x.dtype) if x.dtype == torch.bfloat16 else x + x)
    assert "in bfloat16" in wrong(lambda x: (1.4 if x.dtype == torch.bfloat16 else 2) * x).headline


def test_a_loss_and_a_message_may_be_float32_for_bfloat16():
    loss = torch.tensor(2.0)
    assert twins.loss_in(Twin.BFLOAT16, loss).dtype == torch.bfloat16
    assert twins.loss_in(Twin.FLOAT32, loss.double()).dtype == torch.float64
    sent = {dtype: Traffic.expected(2, ("all_reduce", 3), dtype=dtype) for dtype in ("bfloat16", "float32", "float64")}
    for dtype, same in (("bfloat16", True), ("float32", True), ("float64", False)):
        assert (twins.observed(Twin.BFLOAT16, {"traffic": sent[dtype]})["traffic"] == sent["bfloat16"]) is same
    assert twins.observed(Twin.FLOAT32, {"traffic": sent["float32"]})["traffic"] == sent["float32"]
    assert twins.expected(Twin.BFLOAT16, {"traffic": sent["float64"]})["traffic"] == sent["bfloat16"]


def test_an_output_kept_from_an_earlier_call_is_wrong_between_two_other_calls():
    outputs.clear()
    failure = wrong(cached_by_shape)
    assert "p = 2, cached_by_shape of 3 numbers between two other calls: wrong" in failure.headline
    assert "keeps its value between calls" in failure.question


def test_what_is_written_into_a_copy_is_missed_on_tensors_with_another_layout():
    failure = wrong(writes_into_a_copy)
    assert "on tensors that aren't contiguous" in failure.headline
    assert "whatever you write into the copy is lost" in failure.question


def test_a_check_can_do_without_a_twin():
    def total_of(answer, case, given, group):
        assert case.twin is None
        return observe(lambda x: answer(x, group), None, inputs={"x": given})

    trial = OnRanks(cases=[Length()], draw=draw, give=give, run=total_of, right=right, without=set(Twin))
    exercise("90.92", "a sum without twins", takes=["total"], trials=[trial], passed="")
    check("90.92", total)


calls: set = set()


def wrong_the_second_time(x):
    times = 3 if (key := str(x.tolist())) in calls else 2
    calls.add(key)
    return times * x


def clone_is_reduced(x):
    y = x.clone()
    dist.all_reduce(y)
    return y + 0 * x


def check_without_observe(function, **options):
    trial = OnRanks(
        cases=[Length()], world_sizes=[2], draw=plain, run=lambda answer, case, given, group: {"out": answer(given)},
        right=lambda case, problem, place: {"out": 2 * problem}, **options,
    )  # fmt: skip
    exercise("90.93", "twice as much, not observed by `observe`", takes=["function"], trials=[trial], passed="")
    return check("90.93", function)


def test_what_is_wrong_when_it_is_called_again_with_the_same_arguments():
    with pytest.raises(CheckFailed) as failure:
        check_without_observe(wrong_the_second_time)
    assert "wrong_the_second_time of 3 numbers called again with the same arguments: wrong" in failure.value.headline
    assert failure.value.question == twins.question(Twin.AGAIN)


def test_an_answer_that_works_in_place_gets_fresh_inputs_when_it_is_called_again():
    check_without_observe(lambda x: x.mul_(2))


def test_layouts_differ_between_ranks_only_if_the_check_says_so():
    check_without_observe(clone_is_reduced)
    with pytest.raises(CheckFailed) as failure:
        check_without_observe(clone_is_reduced, layouts_differ=True)
    assert "on tensors that aren't contiguous" in failure.value.headline
    assert "rank 0's tensors aren't contiguous, but rank 1's are" in failure.value.question


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
