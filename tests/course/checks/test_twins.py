"""Twins of a case: what the tables of mistakes (`[in bfloat16]` and so on) don't say about them."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.course.checks import refused
from tests.course.checks.test_cases import SUM, Length
from tplab.course.checks import twins
from tplab.course.checks.layouts import packed, spread_out, unpacked
from tplab.course.checks.recorded_traffic import Traffic
from tplab.course.checks.trials import exercise
from tplab.course.checks.twins import Twin
from tplab.course.notebooks.mistakes import shared


def reads_too_early(x, group):
    out = x.detach().clone()
    work = dist.all_reduce(out, group=group, async_op=True)
    while not getattr(work, "work", work).is_completed():  # without the twin, the sum is there now
        pass
    early = out.clone()
    work.wait()
    return early + 0 * x


@pytest.mark.usefixtures("table")
def test_messages_that_arrive_late_are_tried():
    trial = replace(SUM, cases=[Length()], world_sizes=(2,), late=True, without=set(Twin) - {Twin.LATE})
    exercise("90.91", "a sum", takes=["total"], trials=[trial], passed="")
    failure = refused("90.91", reads_too_early)
    assert Twin.LATE.value in failure.headline
    assert failure.question == shared(Twin.LATE.value)


def test_a_loss_and_a_message_may_be_float32_for_bfloat16():
    loss = torch.tensor(2.0)
    assert twins.loss_in(Twin.BFLOAT16, loss).dtype == torch.bfloat16
    sent = {dtype: Traffic.expected(2, ("all_reduce", 3), dtype=dtype) for dtype in ("bfloat16", "float32", "float64")}
    for dtype, same in (("bfloat16", True), ("float32", True), ("float64", False)):
        assert (twins.observed(Twin.BFLOAT16, {"traffic": sent[dtype]})["traffic"] == sent["bfloat16"]) is same
    assert twins.expected(Twin.BFLOAT16, {"traffic": sent["float64"]})["traffic"] == sent["bfloat16"]


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (5,), ()])
def test_memory_layouts_arrive(shape):
    x = spread_out({"x": torch.randn(shape), "n": 3})
    assert x["x"].is_contiguous() == (len(shape) < 2)
    sent, strides = packed(x)
    arrived = unpacked({"x": sent["x"].contiguous(), "n": 3}, strides)
    assert torch.equal(arrived["x"], x["x"])
    assert arrived["x"].stride() == x["x"].stride()
    assert arrived["n"] == 3
