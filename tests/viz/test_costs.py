"""Pictures of a cost model: bars as long as their parts, and pairs of figures with how far they are apart."""

from tests.viz.pictures import texts
from tplab import viz

ROWS = {
    "p = 1": {"compute": 8e-3, "communicate": 0.0},
    "p = 2": {"compute": 4e-3, "communicate": 1e-3},
    "p = 8": {"compute": 1e-3, "communicate": 2e-3},
}
PAIRS = {"1 GPU": (30.0, 33.0), "8 GPUs": (24.0, 22.8), "64 GPUs": (20.0, 20.0)}
SAVED = {"plain": {"attention": 3000, "MLP": 5000}, "recomputed": {"input": 1000}}
PICTURES = {
    "bars": lambda: viz.time_bars(ROWS, title="t"),
    "pairs": lambda: viz.against(PAIRS, title="t"),
    "saved activations": lambda: viz.saved_activations(SAVED),
}


def test_parts_lie_behind_each_other_in_one_unit_and_bars_say_their_sum_or_the_note_they_are_given():
    picture = viz.time_bars(ROWS, notes={"p = 8": "33 %"})
    (axes,) = picture.axes
    drawn = [(round(bar.get_x(), 9), round(bar.get_width(), 9)) for bar in axes.patches]
    assert drawn == [(0, 8), (8, 0), (0, 4), (4, 1), (0, 1), (1, 2)]
    assert axes.get_xlabel() == "milliseconds"
    assert texts(picture) == ["8 ms", "5 ms", "33 %"]
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in axes.patches}) == 2
    assert texts(viz.saved_activations(SAVED)) == ["8 kB", "1 kB"]
    assert viz.time_bars({"a": {"x": 2e-5}}).axes[0].get_xlabel() == "microseconds"
    assert viz.time_bars({"a": {"x": 2.0}}).axes[0].get_xlabel() == "seconds"


def test_pairs_are_drawn_where_they_are_and_say_how_far_the_second_is_off():
    picture = viz.against(PAIRS, unit="teraFLOP/s")
    lines = {line.get_label(): list(line.get_xdata()) for line in picture.axes[0].lines if line.get_marker() == "o"}
    assert lines == {"published": [30, 24, 20], "the model": [33, 22.8, 20]}
    assert texts(picture) == ["+10%", "-5%", "+0%"]
