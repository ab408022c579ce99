"""Pictures of times: operations on the clock, cost models, overlap, and pipeline schedules."""

import re

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from tests import saying
from tests.viz.pictures import texts
from tplab import viz
from tplab.cost.backward import mlp_backward
from tplab.pipeline.schedule_order import simulate
from tplab.pipeline.schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from tplab.trace.rank_trace import RankTrace, Span
from tplab.viz.colors import RED, tint

WAITING = ["dZ", "dB", "dX", "start", "wait", "dA"]
HIDDEN = ["dZ", "dX", "start", "dB", "dA", "wait"]
ROWS = {
    "p = 1": {"computes": 8e-3, "waits": 0.0},
    "p = 2": {"computes": 4e-3, "waits": 1e-3},
    "p = 8": {"computes": 1e-3, "waits": 2e-3},
}
NOTES = {"p = 1": "100%", "p = 2": "80%", "p = 8": "33%"}
RATIOS = {"1 GPU": 1.1, "8 GPUs": 0.95, "64 GPUs": 1.0}
SAVED = {
    "plain": {"attention scores": 3000, "Q, K and V": 3000, "input of the MLP norm": 2000},
    "recomputed": {"input of the layer": 1000},
}
SCHEDULES = {
    "1F1B": one_f_one_b(4, 8),
    "zero bubble": zero_bubble(4, 8),
    "many": interleaved(4, 24, 3),
    "one rank": gpipe(1, 1),
}


def clock(order, **times):
    return viz.clock(mlp_backward(order, **times), kept="dY")


def run(shift, p=2):
    """Two matmuls, a transposition, and a sum that begins `shift` seconds after them."""
    spans = [
        Span("compute", "mm", 5.0, 5.004),
        Span("compute", "mm", 5.004, 5.009),
        Span("compute", "t", 5.009, 5.00901),
        Span("communicate", "all_reduce", 5.009 + shift, 5.012 + shift),
    ]
    return [RankTrace(rank, spans) for rank in range(p)]


RUNS = {"before": run(0.00001), "after": run(-0.004)}
PICTURES = {
    "an order that waits": lambda: clock(WAITING)[-1],
    "a message that takes four times as long": lambda: clock(HIDDEN, message=32)[-1],
    "one operation": lambda: clock(WAITING)[0],
    "bars": lambda: viz.time_bars(ROWS, notes=NOTES, title="t"),
    "predictions": lambda: viz.against(RATIOS, title="t"),
    "saved activations": lambda: viz.saved_activations(SAVED, scale=16_000, title="t"),
    "two runs of a layer": lambda: viz.overlap(RUNS, title="a column-parallel layer"),
    **{name: lambda made=made: viz.schedule(simulate(made), title="t") for name, made in SCHEDULES.items()},
}


def red(axes):
    """The bars that show a wait."""
    return [bar for bar in axes.patches if to_hex(bar.get_facecolor()) == to_hex(tint(RED, 0.6))]


@pytest.mark.parametrize(
    ("order", "message", "total", "waits", "kept"),
    [(WAITING, 8, 28, 8, 10), (HIDDEN, 8, 20, 0, 15), (HIDDEN, 16, 26, 6, 15)],
)
def test_the_last_picture_of_a_clock_shows_all_times(order, message, total, waits, kept):
    *_, picture = frames = clock(order, message=message)
    assert len(frames) == 4 + 1 + bool(waits), "one for each operation that takes time, and one for each wait"
    assert re.search(saying(f"{total} ms", f" {waits} ms"), picture.caption)
    assert sum(bar.get_width() for bar in red(picture.axes[0])) == waits
    (line,) = picture.axes[0].lines
    assert list(line.get_xdata()) == [0, kept]


def test_parts_lie_behind_each_other_in_one_unit_and_bars_say_their_note_or_their_sum():
    picture = viz.time_bars(ROWS, notes=NOTES, title="t")
    drawn = [(round(bar.get_x(), 9), round(bar.get_width(), 9)) for bar in picture.axes[0].patches]
    assert drawn == [(0, 8), (8, 0), (0, 4), (4, 1), (0, 1), (1, 2)]
    assert texts(picture) == list(NOTES.values())
    saved = viz.saved_activations(SAVED, scale=16_000, title="t")
    assert texts(saved) == ["8 kB", "1 kB"]
    assert [bar.get_width() for bar in saved.axes[0].patches] == [3, 3, 2, 0, 0, 1]


@pytest.mark.parametrize("runs", [RUNS, {"four": run(0, p=4)}])
def test_every_span_is_a_bar_at_its_time_in_the_lane_of_its_rank(runs):
    for axes, traces in zip(viz.overlap(runs).axes, runs.values(), strict=True):
        begin = min(span.start for trace in traces for span in trace.spans)
        drawn = {
            (round(b.get_x(), 6), round(b.get_width(), 6), round(b.get_y() + b.get_height() / 2), bool(b.get_hatch()))
            for b in axes.patches
        }
        for rank, trace in enumerate(traces):
            for span in trace.spans:
                sends = span.lane == "communicate"
                bar = round((span.start - begin) * 1e3, 6), round((span.end - span.start) * 1e3, 6), 2 * rank + sends
                assert (*bar, sends) in drawn, "communication is hatched and computation is not"


def test_two_runs_have_one_scale_say_what_was_hidden_and_show_waits_in_red():
    before, after = viz.overlap(RUNS, title="t").axes
    assert before.get_xlim() == after.get_xlim()
    assert re.match(saying("before", " 0%", " 0%"), before.get_title(loc="left"))
    assert re.match(saying("after", " 100%", " 100%"), after.get_title(loc="left"))
    assert [bar.get_width() for bar in red(before)] == pytest.approx([3.0, 3.0]), "one bar per rank"
    assert red(after) == [], "the sum is done before the matmul"


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_is_a_box_of_its_length_in_the_lane_of_its_rank(name):
    spans = simulate(SCHEDULES[name])
    picture = viz.schedule(spans, title="t")
    drawn = [patch for patch in picture.axes[0].patches if isinstance(patch, Rectangle)]
    found = {(box.get_x(), box.get_width(), round(box.get_y() + box.get_height() / 2)) for box in drawn}
    assert found == {(s.start, s.end - s.start, rank) for rank, row in enumerate(spans) for s in row}
    numbers = sorted(str(span.action.micro_batch) for row in spans for span in row)
    assert sorted(texts(picture)) == (numbers if name != "many" else [])
    lanes = {round(box.get_y() - round(box.get_y() + box.get_height() / 2), 9) for box in drawn}
    assert len(lanes) == (3 if name == "many" else 1), "one lane per chunk"
