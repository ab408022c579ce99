"""Twins of a case, on real ranks: what the tables of mistakes (`[in bfloat16]` and so on) don't say about them."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.course.checks.test_cases import Length
from tplab.course.checks import twins
from tplab.course.checks.cases import random_tensor
from tplab.course.checks.exercises import check
from tplab.course.checks.layouts import packed, spread_out, unpacked
from tplab.course.checks.observation import observe
from tplab.course.checks.recorded_traffic import Traffic
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.course.feedback.verdict import CheckFailed
from tplab.course.notebooks.mistakes import shared

pytestmark = pytest.mark.usefixtures("table")


def observed(answer, case, given, group):
    return observe(answer, None, inputs={"x": given})


def not_observed(answer, case, given, group):
    return {"out": answer(given)}


def run(answer, run=observed, **options):
    right = {observed: lambda x: {"out": 2 * x, "dx": torch.full_like(x, 2)}, not_observed: lambda x: {"out": 2 * x}}
    trial = OnRanks(
        cases=[Length()], world_sizes=[2], draw=lambda case, generator, size: random_tensor(generator, 3, 4, 2),
        run=run, right=lambda case, problem, place: right[run](problem), **options,
    )  # fmt: skip
    exercise("90.91", "twice as much", takes=["twice"], trials=[trial], passed="")
    return check("90.91", answer)


def wrong(answer, *options, **named) -> CheckFailed:
    with pytest.raises(CheckFailed) as failure:
        run(answer, *options, **named)
    return failure.value


def with_numpy(x):
    return x + x * torch.from_numpy(np.ones_like(x.detach().numpy()))


def with_a_new_group(x):
    dist.new_group()
    return 2 * x


def writes_into_a_copy(x):
    out = torch.empty_like(x)
    out.reshape(-1).copy_(2 * x.detach().reshape(-1))
    return out + 2 * x - 2 * x.detach()


@pytest.mark.parametrize(
    ("answer", "when", "says"),
    [
        (with_a_new_group, Twin.BETWEEN, "creates a new group"),
        (with_numpy, Twin.BFLOAT16, "NumPy has no bfloat16"),
        (lambda x: (1.4 if x.dtype == torch.bfloat16 else 2) * x, Twin.BFLOAT16, "but not for bfloat16"),
        (writes_into_a_copy, Twin.STRIDED, "whatever you write into the copy is lost"),
    ],
)
def test_a_wrong_twin_is_named_and_asked_about(answer, when, says):
    failure = wrong(answer)
    assert f"p = 2, {answer.__name__} of 3 numbers {when.value}: " in failure.headline
    assert says in failure.question


def test_a_bfloat16_result_may_be_rounded():
    run(lambda x: x + x.float().mul(1.01).to(x.dtype) if x.dtype == torch.bfloat16 else x + x)


def test_a_loss_and_a_message_may_be_float32_for_bfloat16():
    loss = torch.tensor(2.0)
    assert twins.loss_in(Twin.BFLOAT16, loss).dtype == torch.bfloat16
    assert twins.loss_in(Twin.FLOAT32, loss.double()).dtype == torch.float64
    sent = {dtype: Traffic.expected(2, ("all_reduce", 3), dtype=dtype) for dtype in ("bfloat16", "float32", "float64")}
    for dtype, same in (("bfloat16", True), ("float32", True), ("float64", False)):
        assert (twins.observed(Twin.BFLOAT16, {"traffic": sent[dtype]})["traffic"] == sent["bfloat16"]) is same
    assert twins.observed(Twin.FLOAT32, {"traffic": sent["float32"]})["traffic"] == sent["float32"]
    assert twins.expected(Twin.BFLOAT16, {"traffic": sent["float64"]})["traffic"] == sent["bfloat16"]


calls: set = set()


def wrong_the_second_time(x):
    times = 3 if (key := str(x.tolist())) in calls else 2
    calls.add(key)
    return times * x


def clone_is_reduced(x):
    y = x.clone()
    dist.all_reduce(y)
    return y + 0 * x


def test_a_second_call_gets_fresh_inputs_and_has_to_be_right():
    run(lambda x: x.mul_(2), not_observed)
    failure = wrong(wrong_the_second_time, not_observed)
    assert Twin.AGAIN.value in failure.headline
    assert failure.question == shared(Twin.AGAIN.value)


def test_layouts_differ_between_ranks_only_if_the_check_says_so():
    run(clone_is_reduced, not_observed)
    failure = wrong(clone_is_reduced, not_observed, layouts_differ=True)
    assert Twin.STRIDED.value in failure.headline
    assert "rank 0's tensors aren't contiguous, but rank 1's are" in failure.question


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (5,), ()])
def test_memory_layouts_arrive(shape):
    x = spread_out({"x": torch.randn(shape), "n": 3})
    assert x["x"].is_contiguous() == (len(shape) < 2)
    sent, strides = packed(x)
    arrived = unpacked({"x": sent["x"].contiguous(), "n": 3}, strides)
    assert torch.equal(arrived["x"], x["x"])
    assert arrived["x"].stride() == x["x"].stride()
    assert arrived["n"] == 3
