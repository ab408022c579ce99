"""The picture of computing and communicating: two lanes a rank, every span a bar at its time, all runs to one scale."""

import pytest
from matplotlib.colors import to_hex

from tests.viz.pictures import texts
from tplab import viz
from tplab.trace.rank_trace import RankTrace, Span
from tplab.viz.colors import RED, tint


def run(shift, p=2):
    spans = [
        Span("compute", "mm", 5.0, 5.004),
        Span("compute", "mm", 5.004, 5.009),
        Span("compute", "t", 5.009, 5.00901),
        Span("communicate", "all_reduce", 5.009 + shift, 5.012 + shift),
    ]
    return [RankTrace(rank, spans) for rank in range(p)]


RUNS = {"before": run(0.00001), "after": run(-0.004)}
PICTURES = {"two runs of a layer": lambda: viz.overlap(RUNS, title="a column-parallel layer")}


@pytest.mark.parametrize("runs", [RUNS, {"one": run(0.001, p=1)}, {"four": run(0, p=4)}])
def test_every_span_is_a_bar_at_its_time_in_the_lane_of_its_rank(runs):
    picture = viz.overlap(runs)
    assert len(picture.axes) == len(runs)
    for axes, traces in zip(picture.axes, runs.values(), strict=True):
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
    assert sorted(texts(picture)) == sorted(["all_reduce", "mm", "mm"] * sum(map(len, runs.values())))


def test_a_rank_that_waits_is_red():
    before, after = viz.overlap(RUNS).axes
    red = [[b for b in axes.patches if to_hex(b.get_facecolor()) == to_hex(tint(RED, 0.6))] for axes in (before, after)]
    assert [len(bars) for bars in red] == [2, 0], "one bar per rank, and none if the sum is done before the matmul"
    assert red[0][0].get_width() == pytest.approx(3.0)


def test_both_runs_have_one_scale_and_say_what_was_hidden():
    before, after = viz.overlap(RUNS, title="t").axes
    assert before.get_xlim() == after.get_xlim()
    assert before.get_title(loc="left") == "before: 0% and 0% of the communication hidden"
    assert after.get_title(loc="left") == "after: 100% and 100% of the communication hidden"
