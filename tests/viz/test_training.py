"""Pictures of a training run: its curves, two runs on each other, and the speed on more ranks."""

from tplab import viz

LOSSES = [(step, 7.0 - 0.05 * step) for step in range(1, 61)]
SPEEDS = [(step, 9000.0 + 100 * (step % 5)) for step in range(1, 61)]
HELD_OUT = [(20, 6.1), (60, 4.1)]
ONE = [7.0, 6.5, 6.2]
LINES = {"measured": {1: 1.0, 2: 1.7}, "cost model": {1: 1.0, 2: 1.8}, "published": {1: 1.0, 2: 1.64, 8: 2.98}}
PICTURES = {
    "a run": lambda: viz.training(LOSSES, SPEEDS, evaluations=HELD_OUT),
    "two runs": lambda: viz.compared({"one rank": ONE, "tp = 2": ONE}, [0.0, 1e-7, -3e-7]),
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
    above, below = viz.compared({"one rank": ONE, "tp = 2": ONE}, [0.0, 1e-7, -3e-7]).axes
    assert [list(line.get_ydata()) for line in above.lines] == [ONE, ONE]
    assert above.lines[0].get_linewidth() > 2 * above.lines[1].get_linewidth(), "the lower one has to be seen"
    assert list(below.lines[-1].get_ydata()) == [0.0, 1e-7, -3e-7]
    low, high = below.get_ylim()
    assert low == -high < -3e-7
    assert viz.compared({"a": ONE, "b": ONE}, [0.0] * 3).axes[1].get_ylim()[1] > 0


def test_losses_of_some_steps_stand_at_those_steps():
    above, below = viz.compared({"one rank": ONE, "tp = 2": ONE}, [0.0, 1e-7, -3e-7], steps=[10, 20, 30]).axes
    drawn = [*above.lines, below.lines[-1]]
    assert [list(line.get_xdata()) for line in drawn] == [[10, 20, 30]] * 3
    assert {line.get_marker() for line in drawn} == {"o"}
    every_one = viz.compared({"one rank": ONE, "tp = 2": ONE}, [0.0] * 3, steps=[1, 2, 3]).axes[0].lines
    assert [(list(line.get_xdata()), line.get_marker()) for line in every_one] == [([1, 2, 3], "None")] * 2


def test_speed_over_ranks_has_the_ideal_beside_it():
    axes = viz.scaling(LINES).axes[0]
    drawn = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in axes.lines}
    assert drawn == {"as many times as ranks": {1: 1, 2: 2, 8: 8}, **LINES}
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "8"]
    assert "as many times as ranks" not in {line.get_label() for line in viz.scaling(LINES, ideal=False).axes[0].lines}
