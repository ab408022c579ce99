"""Pictures of matrices, products, traffic and curves, and the controls that choose a picture."""

import re
from types import SimpleNamespace

import pytest
import torch

from tests import saying
from tests.viz.pictures import fills, texts
from tplab import viz
from tplab.runtime import Collective, Record, Results
from tplab.viz import controls
from tplab.viz.colors import RED, rank_color, rank_fill, rank_hatch, tint

X, A = torch.arange(8.0).reshape(2, 4), torch.arange(32.0).reshape(4, 8)


def collective(rank: int, kind: str, size: int, start: float = 0.0, end: float = 1.0) -> Collective:
    return Collective(rank, kind, (0, 1), 1, (size // 4,), "float32", size, "sum", None, "file:1:f", start, end)


SAME = Record([collective(rank, "all_reduce", 2048, 0.1 + rank, 1.5) for rank in (0, 1)])
RESULTS = SimpleNamespace(record=Record([*SAME, collective(1, "barrier", 0)]), spans=[(0.0, 1.6), (0.0, 1.7)])

PICTURES = {
    "matrices": lambda: viz.matrices({"rank 0: X": X, "A": A}),
    "matrices with headings": lambda: viz.matrices({f"rank {r}": X[r] * 1000.25 for r in (0, 1)}, headings="wxyz"),
    "one wide matrix": lambda: viz.matrices({"wide": torch.full((1, 10), -12345.67)}),
    "split": lambda: viz.split(A, dim=1, p=4, title="t"),
    "product, column": lambda: viz.product(X, A, kind="column", p=4),
    "product, row": lambda: viz.product(X, A, kind="row", p=4),
    "traffic": lambda: viz.traffic(Results([1, 2], [], SAME, []), title="t", scale=4096),
    "timeline": lambda: viz.timeline(RESULTS),
    "curves": lambda: viz.curves({"one": [3, 2, 1], "two": [3, 2.5, 2]}),
}


@pytest.mark.parametrize(
    ("tensor", "shown"),
    [
        (torch.tensor([1e9, float("nan")]), {"1.0e+09", "nan"}),
        ([[1, 2], [3, 4]], {"[2, 2]", "4"}),
        (X - 0.5, {"[2, 4]", "0.5", "6.5", "−0.5"}),
    ],
)
def test_matrices_show_values_with_as_many_decimals_as_they_need(tensor, shown) -> None:
    assert shown <= set(texts(viz.matrices({"t": tensor})))


def test_matrices_have_the_color_of_their_rank() -> None:
    assert len({rank_color(rank) for rank in range(8)}) == len({rank_hatch(rank) for rank in range(8)}) == 8
    assert fills(viz.matrices({"rank 0: out": X, "rank 1: out": X})) == [rank_fill(0), rank_fill(1)]


def test_a_split_and_products_name_ranks_shapes_parts_and_terms() -> None:
    picture = viz.split(torch.ones(8, 6), dim=0, p=2, title="t")
    assert any(re.search(saying("[4, 6]", "[8, 6]"), text) for text in texts(picture))
    assert fills(picture) == [rank_fill(0), rank_fill(1)]
    column = texts(viz.product(X, A, kind="column", p=2))
    assert {"A₀", "A₁", "XA₀", "XA₁", "[2, 8]"} <= set(column)
    row = texts(viz.product(X, A, kind="row", p=2))
    assert {"X₀", "X₁", "X₀ A₀", "X₁ A₁", "+", "rank 0", "rank 1"} <= set(row)
    for shown, shape, times, word in ((column, "[2, 4]", 2, "every"), (row, "[2, 8]", 4, "sum")):
        assert "".join(shown).count(shape) == times
        assert any(word in text for text in shown)


def test_traffic_has_a_bar_per_kind_of_collective_and_the_ranks_must_do_the_same() -> None:
    record = Record([*SAME, *(collective(rank, "barrier", 0) for rank in (0, 1))])
    picture = viz.traffic(Results([1, 2], [], record, []), title="t", scale=4096)
    assert texts(picture) == ["1 call, 2.05 kB", "1 call, 0 B"]
    assert [patch.get_width() for patch in picture.axes[0].patches] == [2048, 0]
    for uneven in (Record([collective(0, "all_reduce", 2048)]), Record([*SAME, collective(1, "barrier", 0)])):
        with pytest.raises(ValueError, match=saying("traffic", "rank 1", "rank 0")):
            viz.traffic(Results([1, 2], [], uneven, []), title="t", scale=4096)


def test_the_timeline_has_a_lane_per_rank_and_a_box_per_collective() -> None:
    (axes,) = viz.timeline(RESULTS).axes
    boxes = [patch for patch in axes.patches if patch.get_hatch()]
    assert len(axes.patches) - len(boxes) == 2, "two lanes"
    assert [round(box.get_width()) for box in boxes] == [1400, 400, 1000]


def test_below_curves_that_coincide_stand_their_differences_from_the_first() -> None:
    plain = torch.linspace(4.0, 2.0, 5)
    shift = torch.tensor([0.0, 1e-3, -2e-3, 0.0, 4e-3])
    picture = viz.curves({"one process": plain, "p = 2": plain + shift, "p = 4": plain[:3]})
    _, below = picture.axes
    _, two, four = below.lines
    assert list(two.get_ydata()) == pytest.approx(shift.tolist(), abs=1e-6)
    assert list(four.get_ydata()) == [0.0] * 3
    assert "0.004" in picture.description
    assert len(viz.curves({"one": plain, "two": plain + 0.1}).axes) == 1, "the eye sees this difference"


def test_values_that_differ_from_the_correct_ones_are_red() -> None:
    shown = {"yours": [[1.0, 2.0], [3.0, 4.0]], "correct": [[1.0, 3.0], [2.0, 4.0]], "rank 0": [[0.0, 0.0]]}
    assert fills(viz.matrices(shown)).count(tint(RED, 0.45)) == 0
    picture = viz.matrices(shown, compare={"yours": "correct"})
    assert fills(picture).count(tint(RED, 0.45)) == 2


def test_outside_a_notebook_controls_give_the_picture_where_they_are_told_to_start() -> None:
    choices = {"p": (2, 4), "kind": ["column", "row"]}
    assert viz.explore(lambda p, kind: (p, kind), **choices) == (2, "column")
    assert viz.explore(lambda p, kind: (p, kind), **choices, start={"p": 4}) == (4, "column")
    frames = {2: ["a", "b"], 4: ["c", "d", "e"]}
    assert viz.play(lambda p: frames[p], p=(2, 4)) == "a"
    assert viz.play(lambda p: frames[p], p=(2, 4), start={"p": 4, "step": 2}) == "e"


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    """The pictures that the controls display, as in a notebook's kernel. (tests/browser presses them on a page.)"""
    displayed: list[str] = []
    monkeypatch.setattr(controls, "_in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda shown, raw=False, **_: raw or displayed.append(shown))
    return displayed


def test_controls_draw_the_picture_of_each_selection_once(shown) -> None:
    drawn = []

    def draw(p: int, kind: str) -> str:
        drawn.append((p, kind))
        return f"{p} {kind}"

    box = viz.explore(draw, p=(1, 2, 4), kind=["column", "row"], start={"p": 2})
    parts, kind, output = box.children
    parts.value = 4
    kind.value = "row"
    parts.value = 2
    parts.value = 4
    assert shown == ["2 column", "4 column", "4 row", "2 row", "4 row"]
    assert drawn == [(2, "column"), (4, "column"), (4, "row"), (2, "row")]
    assert not output._dom_classes, "the last picture is not pale"


def test_play_shows_each_step_of_the_chosen_run_and_begins_another_run_at_its_start(shown) -> None:
    ran, drawn = [], []

    def show(p: int, step: int) -> tuple[int, int]:
        drawn.append((p, step))
        return p, step

    def run(p: int) -> viz.Frames:
        ran.append(p)
        return viz.Frames(p + 1, lambda step: show(p, step))

    box = viz.play(run, p=(1, 2, 4), start={"p": 2, "step": 1}, seconds=0.5)
    slider, button, steps, _ = box.children
    assert (button.value, button.max, steps.value, steps.max, button.interval) == (1, 2, 1, 2, 500)
    steps.value = 2  # as the page does while it plays
    button.playing = True
    slider.value = 4
    assert (button.playing, button.value, steps.value, button.max, steps.max) == (False, 0, 0, 4, 4)
    steps.value = 3
    slider.value = 2  # a run that's known, from its start
    slider.value = 1  # a run that's shorter than the step shown before
    assert (steps.value, steps.max) == (0, 1)
    assert ran == [2, 4, 1]
    assert drawn == [(2, 1), (2, 2), (4, 0), (4, 3), (2, 0), (1, 0)], "and nothing is drawn twice for one event"
    assert shown == drawn
