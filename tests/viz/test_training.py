"""Pictures of a training run: its curves, two runs on each other, and the speed on more ranks."""

from tplab import viz

LOSSES = [(step, 7.0 - 0.05 * step) for step in range(1, 61)]
SPEEDS = [(step, 9000.0 + 100 * (step % 5)) for step in range(1, 61)]
HELD_OUT = [(20, 6.1), (60, 4.1)]
TWO = {"one rank": [7.0, 6.5, 6.2], "tp = 2": [7.0, 6.5, 6.2]}
APART = [0.0, 1e-7, -3e-7]
LINES = {"measured": {1: 1.0, 2: 1.7}, "cost model": {1: 1.0, 2: 1.8}, "published": {1: 1.0, 2: 1.64, 8: 2.98}}
PICTURES = {
    "a run": lambda: viz.training(LOSSES, SPEEDS, evaluations=HELD_OUT),
    "two runs": lambda: viz.compared(TWO, APART),
    "scaling": lambda: viz.scaling(LINES),
}


def test_a_run_is_drawn_as_it_was():
    left, right = viz.training(LOSSES, SPEEDS, evaluations=HELD_OUT).axes
    assert [tuple(map(float, point)) for point in left.lines[0].get_xydata()] == LOSSES
    assert [tuple(point) for point in left.lines[1].get_xydata()] == HELD_OUT
    assert [tuple(point) for point in right.lines[0].get_xydata()] == SPEEDS
    assert right.get_ylim()[0] == 0
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["training text", "held-out text"]
    assert len(viz.training(LOSSES).axes) == 1


def test_two_runs_lie_on_each_other_and_their_difference_below():
    for steps, marker in (([1, 2, 3], "None"), ([10, 20, 30], "o")):
        above, below = viz.compared(TWO, APART, steps=steps).axes
        assert [list(line.get_ydata()) for line in above.lines] == [*TWO.values()]
        assert above.lines[0].get_linewidth() > 2 * above.lines[1].get_linewidth(), "the lower one has to be seen"
        assert list(below.lines[-1].get_ydata()) == APART
        low, high = below.get_ylim()
        assert low == -high < -3e-7
        drawn = [*above.lines, below.lines[-1]]
        assert [(list(line.get_xdata()), line.get_marker()) for line in drawn] == [(steps, marker)] * 3
    assert viz.compared(TWO, [0.0] * 3).axes[1].get_ylim()[1] > 0


def test_speed_over_ranks_has_the_ideal_beside_it():
    axes = viz.scaling(LINES).axes[0]
    drawn = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in axes.lines}
    assert drawn == {"as many times as ranks": {1: 1, 2: 2, 8: 8}, **LINES}
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "8"]
