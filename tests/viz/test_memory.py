"""Pictures of memory: bars beside what a GPU has, live memory over a run, the three parallelisms."""

import itertools

import pytest
import torch
from matplotlib.colors import to_rgb
from torch import nn

from tests.viz.pictures import texts
from tplab import viz
from tplab.memory.config import PRESETS
from tplab.memory.memory_bill import Bill, Layout, bill
from tplab.memory.meter import MemoryMeter
from tplab.viz.colors import rank_fill, tint
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
    "bill": lambda: viz.bill(BILLS, capacity=40 * GB),
    "bill of published models": lambda: viz.bill({n: bill(c) for n, c in PRESETS.items()}, capacity=80 * GB, title="t"),
    "bill without a capacity": lambda: viz.bill({"one": {"weights": 3 * GB, "something else": GB}}),
    "live memory": lambda: viz.live_memory(measured(10**6), title="t"),
    "live memory with marks side by side": lambda: viz.live_memory(many_marks()),
    **{
        f"{kind} parallelism on {p}": lambda kind=kind, p=p: viz.parallelism(kind, p)
        for kind in ("data", "tensor", "pipeline")
        for p in (2, 4)
    },
}


def bars(picture: viz.Picture) -> list[tuple[float, float, bool]]:
    """(left, width, red) of every piece of every bar, in GB."""
    red = tint(RED, 0.72)
    return [
        (patch.get_x(), patch.get_width(), patch.get_facecolor()[:3] == pytest.approx(red))
        for patch in picture.axes[0].patches
    ]


def test_what_lies_beyond_the_capacity_is_red_and_the_first_part_that_does_not_fit_is_named() -> None:
    picture = viz.bill(BILLS, capacity=40 * GB)
    assert bars(picture) == [
        (0, 10, False), (10, 20, False), (30, 10, False), (40, 20, True), (60, 5, True),
        (0, 5, False), (5, 10, False), (15, 15, False), (30, 5, False),
    ]  # fmt: skip
    assert texts(picture) == ["65 GB: optimizer state does not fit", "35 GB: fits"]
    assert texts(viz.bill(BILLS, capacity=60 * GB))[0] == "65 GB: activations do not fit"
    assert texts(viz.bill(BILLS, capacity=9 * GB))[0] == "65 GB: weights do not fit"
    assert texts(viz.bill(BILLS)) == ["65 GB", "35 GB"]
    assert not any(red for _, _, red in bars(viz.bill(BILLS, capacity=65 * GB)))


def test_the_parts_of_a_bar_differ_in_grey() -> None:
    picture = viz.bill({"one": BILLS["one"]})
    greys = [sum(to_rgb(patch.get_facecolor())) / 3 for patch in picture.axes[0].patches]
    assert all(later - earlier > 0.1 for earlier, later in itertools.pairwise(greys))


def test_several_bills_can_be_drawn_to_one_scale() -> None:
    widths = [viz.bill({"one": BILLS[name]}, scale=100 * GB).axes[0].get_xlim()[1] for name in BILLS]
    assert widths[0] == widths[1]


def test_live_memory_draws_the_meter_s_curve_its_marks_and_its_limit() -> None:
    meter = measured(10**6)
    picture = viz.live_memory(meter)
    line = next(line for line in picture.axes[0].get_lines() if len(line.get_ydata()) == len(meter.curve))
    assert [round(value * 1e6) for value in line.get_ydata()] == meter.curve
    assert texts(picture) == ["build", "forward", "backward", "all there is"]
    assert f"{meter.peak / 1e6:.3g} MB" in repr(picture)
    assert "all there is" not in texts(viz.live_memory(measured()))


def held(kind: str, p: int) -> dict[int, float]:
    """The area of the model's blocks that each rank holds, as a share of its outline."""
    picture = viz.parallelism(kind, p)
    boxes = [patch for patch in picture.axes[0].patches if hasattr(patch, "get_width")]
    whole = next(patch.get_width() for patch in boxes if patch.get_linestyle() != "-")
    fills = {rank: rank_fill(rank) for rank in range(p)}
    return {
        rank: sum(
            box.get_width() for box in boxes if box.get_height() == 0.17 and box.get_facecolor()[:3] == fill
        ) / (4 * whole)
        for rank, fill in fills.items()
    }  # fmt: skip


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize(("kind", "divided"), [("data", False), ("tensor", True), ("pipeline", True)])
def test_each_rank_holds_its_share_of_the_model(kind, divided, p) -> None:
    assert held(kind, p) == pytest.approx(dict.fromkeys(range(p), 1 / p if divided else 1.0))


@pytest.mark.parametrize("p", [2, 4])
def test_a_pipeline_works_in_an_order_that_is_possible(p) -> None:
    from tplab.viz.parallelisms import _pipeline

    begins = [{name: at for at, _, name in lane} for lane in _pipeline(p)]
    ends = [{name: at + length for at, length, name in lane} for lane in _pipeline(p)]
    for rank in range(p):
        assert len(begins[rank]) == 2 * p
        for i in range(p):
            if rank:
                assert begins[rank][f"F{i}"] >= ends[rank - 1][f"F{i}"]
                assert begins[rank - 1][f"B{i}"] >= ends[rank][f"B{i}"]
            assert begins[rank][f"B{i}"] >= ends[rank][f"F{i}"]
        pieces = sorted((begins[rank][name], ends[rank][name]) for name in begins[rank])
        assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(pieces))


def test_a_stage_of_a_real_bill_can_be_drawn() -> None:
    layout = Layout(tp=8, pp=16)
    assert texts(viz.bill({"a stage": bill(PRESETS["GPT-3 175B"], layout)}, capacity=80 * GB)) == ["79.4 GB: fits"]


def test_small_bills_are_in_megabytes():
    picture = viz.bill({"a small model": {"weights": 5 * 10**6, "activations": 24 * 10**6}})
    assert picture.axes[0].get_xlabel() == "MB"
    assert texts(picture) == ["29 MB"]
    assert [bar.get_width() for bar in picture.axes[0].patches] == [5, 24]
