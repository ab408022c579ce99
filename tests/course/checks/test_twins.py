"""Twins of a case: what the tables of mistakes (`[in bfloat16]` and so on) don't say about them."""

from dataclasses import replace

import pytest
import torch

from tests.course.checks import refused
from tests.course.checks.test_cases import SUM, Length
from tplab.course.checks import twins
from tplab.course.checks.cases import random_tensor
from tplab.course.checks.layouts import packed, spread_out, unpacked
from tplab.course.checks.recorded_traffic import Traffic
from tplab.course.checks.trials import exercise
from tplab.course.checks.twins import Twin
from tplab.course.notebooks.mistakes import shared


def writes_into_a_copy(x, group):
    out = torch.zeros_like(x)
    out.reshape(-1).copy_(2 * x.detach().reshape(-1))
    return out + 2 * x - 2 * x.detach()


@pytest.mark.usefixtures("table")
def test_tensors_that_are_not_contiguous_are_tried():
    trial = replace(
        SUM, cases=[Length()], draw=lambda case, generator, size: random_tensor(generator, size, 3, 4, 2),
        right=lambda case, problem, place: {"out": 2 * problem[place.index]}, world_sizes=[2],
    )  # fmt: skip
    exercise("90.91", "twice as much", takes=["twice"], trials=[trial], passed="")
    failure = refused("90.91", writes_into_a_copy)
    assert Twin.STRIDED.value in failure.headline
    assert failure.question == shared(Twin.STRIDED.value)


def test_a_loss_and_a_message_may_be_float32_for_bfloat16():
    loss = torch.tensor(2.0)
    assert twins.loss_in(Twin.BFLOAT16, loss).dtype == torch.bfloat16
    assert twins.loss_in(Twin.FLOAT32, loss.double()).dtype == torch.float64
    sent = {dtype: Traffic.expected(2, ("all_reduce", 3), dtype=dtype) for dtype in ("bfloat16", "float32", "float64")}
    for dtype, same in (("bfloat16", True), ("float32", True), ("float64", False)):
        assert (twins.observed(Twin.BFLOAT16, {"traffic": sent[dtype]})["traffic"] == sent["bfloat16"]) is same
    assert twins.observed(Twin.FLOAT32, {"traffic": sent["float32"]})["traffic"] == sent["float32"]
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
