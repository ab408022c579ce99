"""Pictures of memory: bars beside what a GPU has, live memory over a run, the three parallelisms."""

import re
from functools import partial

import pytest
import torch
from torch import nn

from tests import saying
from tests.viz.pictures import texts
from tplab import viz
from tplab.memory.config import PRESETS
from tplab.memory.memory_bill import Bill, bill
from tplab.memory.meter import MemoryMeter
from tplab.viz.colors import tint
from tplab.viz.memory import RED

GB = 10**9
BILLS = {"one": Bill(10 * GB, 20 * GB, 30 * GB, 5 * GB), "two": Bill(5 * GB, 10 * GB, 15 * GB, 5 * GB)}


def measured(capacity: int | None = None) -> MemoryMeter:
    with MemoryMeter(capacity) as meter:
        meter.mark("build")
        model = nn.Linear(50, 50)
        meter.mark("forward")
        loss = model(torch.ones(9, 50)).square().sum()
        meter.mark("backward")
        loss.backward()
    return meter


def many_marks() -> MemoryMeter:
    with MemoryMeter() as meter:
        kept = []
        for name, tensors in (("build", 1), ("forward", 1), ("backward", 1), ("optimizer step", 40), ("the end", 9)):
            meter.mark(name)
            kept += [torch.ones(9) for _ in range(tensors)]
        del kept
    return meter


PICTURES = {
    "bill": lambda: viz.bill(BILLS, capacity=40 * GB, title="t"),
    "bill of published models": lambda: viz.bill({n: bill(c) for n, c in PRESETS.items()}, capacity=80 * GB, title="t"),
    "bill without a capacity": lambda: viz.bill({"one": {"weights": 3 * GB, "gradients": GB}}, title="t"),
    "live memory": lambda: viz.live_memory(measured(10**6), title="t"),
    "live memory with marks side by side": lambda: viz.live_memory(many_marks(), title="t"),
    **{f"{kind} parallelism": partial(viz.parallelism, kind) for kind in ("data", "tensor", "pipeline")},
}


def test_what_lies_beyond_the_capacity_is_red_and_the_first_part_that_does_not_fit_is_named() -> None:
    picture, red = viz.bill(BILLS, capacity=40 * GB, title="t"), pytest.approx(tint(RED, 0.72))
    bars = [(bar.get_x(), bar.get_width(), bar.get_facecolor()[:3] == red) for bar in picture.axes[0].patches]
    assert bars == [
        (0, 10, False), (10, 20, False), (30, 10, False), (40, 20, True), (60, 5, True),
        (0, 5, False), (5, 10, False), (15, 15, False), (30, 5, False),
    ]  # fmt: skip
    over, fits = texts(picture)
    assert re.search(saying("65 GB", "optimizer state"), over)
    for text, size in ((fits, "35 GB"), (texts(viz.bill(BILLS, capacity=65 * GB, title="t"))[0], "65 GB")):
        assert size in text
        assert not any(part in text for part in BILLS["one"].parts())


def test_live_memory_draws_the_meter_s_curve_its_marks_and_its_limit() -> None:
    meter = measured(10**6)
    picture = viz.live_memory(meter, title="t")
    line = next(line for line in picture.axes[0].get_lines() if len(line.get_ydata()) == len(meter.curve))
    assert [round(value * 1e6) for value in line.get_ydata()] == meter.curve
    *marks, _ = texts(picture)  # the last stands at the limit
    assert marks == ["build", "forward", "backward"]
    assert f"{meter.peak / 1e6:.3g} MB" in picture.description
