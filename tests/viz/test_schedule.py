"""The drawing of a schedule: every action is a box in its rank's lane, as long as it lasts, with its number."""

import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from tplab import viz
from tplab.pipeline.schedule_order import simulate
from tplab.pipeline.schedules import gpipe, interleaved, one_f_one_b, zero_bubble

SCHEDULES = {
    "GPipe": gpipe(4, 8),
    "1F1B": one_f_one_b(4, 8),
    "interleaved": interleaved(4, 8, 2),
    "zero bubble": zero_bubble(4, 8),
    "many": interleaved(4, 24, 3),
    "one rank": gpipe(1, 1),
}
PICTURES = {name: lambda made=made: viz.schedule(simulate(made), title="t") for name, made in SCHEDULES.items()}


def boxes(picture):
    return [patch for patch in picture.axes[0].patches if isinstance(patch, Rectangle)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_is_a_box_of_its_length_in_the_lane_of_its_rank(name):
    spans = simulate(SCHEDULES[name])
    found = {
        (box.get_x(), box.get_width(), round(box.get_y() + box.get_height() - 0.4))
        for box in boxes(viz.schedule(spans))
    }
    assert found == {(s.start, s.end - s.start, rank) for rank, row in enumerate(spans) for s in row}


def test_each_box_has_its_micro_batch():
    spans = simulate(gpipe(2, 3))
    numbers = [text.get_text() for text in viz.schedule(spans).axes[0].texts]
    assert sorted(numbers) == sorted(str(span.action.micro_batch) for row in spans for span in row)


def test_kinds_differ_in_grey_and_chunks_in_height():
    def grey(box):
        return sum(weight * part for weight, part in zip((0.3, 0.59, 0.11), to_rgb(box.get_facecolor()), strict=True))

    forward, backward = boxes(viz.schedule(simulate(gpipe(1, 1))))
    assert grey(forward) - grey(backward) > 0.2
    hatches = [box.get_hatch() or "" for box in boxes(viz.schedule(simulate(zero_bubble(1, 1))))]
    assert hatches == ["", "", "////"]
    heights = {box.get_height() for box in boxes(viz.schedule(simulate(interleaved(2, 2, 3))))}
    assert len(heights) == 3
