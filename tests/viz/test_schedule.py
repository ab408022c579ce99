"""The drawing of a schedule: every action is a box in its rank's lane, as long as it lasts, with its number."""

import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from tests.viz.pictures import texts
from tplab import viz
from tplab.pipeline.schedule_order import simulate
from tplab.pipeline.schedules import gpipe, interleaved, one_f_one_b, zero_bubble

SCHEDULES = {
    "1F1B": one_f_one_b(4, 8),
    "zero bubble": zero_bubble(4, 8),
    "many": interleaved(4, 24, 3),
    "one rank": gpipe(1, 1),
}
PICTURES = {name: lambda made=made: viz.schedule(simulate(made), title="t") for name, made in SCHEDULES.items()}


def drawn(schedule):
    return [patch for patch in viz.schedule(simulate(schedule)).axes[0].patches if isinstance(patch, Rectangle)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_is_a_box_of_its_length_in_the_lane_of_its_rank(name):
    spans = simulate(SCHEDULES[name])
    found = {
        (box.get_x(), box.get_width(), round(box.get_y() + box.get_height() - 0.4)) for box in drawn(SCHEDULES[name])
    }
    assert found == {(s.start, s.end - s.start, rank) for rank, row in enumerate(spans) for s in row}
    numbers = sorted(str(span.action.micro_batch) for row in spans for span in row)
    assert sorted(texts(viz.schedule(spans))) == (numbers if name != "many" else [])


def test_kinds_differ_in_grey_and_chunks_in_height():
    forward, backward = (sum(to_rgb(box.get_facecolor())) / 3 for box in drawn(gpipe(1, 1)))
    assert forward - backward > 0.2
    assert [box.get_hatch() or "" for box in drawn(zero_bubble(1, 1))] == ["", "", "////"]
    assert len({box.get_height() for box in drawn(interleaved(2, 2, 3))}) == 3
