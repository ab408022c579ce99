"""Pictures: one colour per rank, the numbers and names that belong on them, a size that fits a notebook, no window."""

import colorsys
import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from matplotlib.colors import to_rgb

from tests.viz.pictures import fills, texts
from tplab import viz
from tplab.runtime import Collective, Record
from tplab.viz.colors import rank_fill, rank_hatch

X, A = torch.arange(8.0).reshape(2, 4), torch.arange(32.0).reshape(4, 8)


def collective(rank: int, kind: str, size: int, start: float = 0.0, end: float | None = 1.0) -> Collective:
    return Collective(rank, kind, (0, 1), 1, (size // 4,), "float32", size, "sum", None, "file:1:f", start, end)


RECORD = Record(
    [collective(rank, "all_reduce", 2048, 0.1 + rank, 1.5) for rank in (0, 1)] + [collective(1, "barrier", 0)]
)
RESULTS = SimpleNamespace(record=RECORD, spans=[(0.0, 1.6), (0.0, 1.7)])

PICTURES = {
    "matrices": lambda: viz.matrices({"rank 0: X": X, "A": A}),
    "matrices with headings": lambda: viz.matrices({f"rank {r}": X[r] * 1000.25 for r in (0, 1)}, headings="wxyz"),
    "one wide matrix": lambda: viz.matrices({"wide": torch.full((1, 30), -12345.67)}, title="t"),
    "split": lambda: viz.split(A, 1, 4),
    "product, column": lambda: viz.product(X, A, kind="column", p=4),
    "product, row": lambda: viz.product(X, A, kind="row", p=4),
    "traffic": lambda: viz.traffic(RECORD),
    "timeline": lambda: viz.timeline(RESULTS),
    "curves": lambda: viz.curves({"one": [3, 2, 1], "two": [3, 2.5, 2]}),
}


def test_ranks_differ_in_colour_in_grey_and_in_hatch() -> None:
    colors = viz.rank_colors(8)
    assert len(set(colors)) == 8
    assert viz.rank_colors(4) == colors[:4]
    assert len({rank_hatch(rank) for rank in range(8)}) == 8
    greys = [colorsys.rgb_to_yiq(*to_rgb(color))[0] for color in colors[:4]]
    assert all(abs(a - b) > 0.04 for a, b in itertools.combinations(greys, 2))


def test_matrices_show_their_numbers_in_their_ranks_colour() -> None:
    picture = viz.matrices({"rank 1: X": X - 0.5, "whole": torch.tensor([1, -2])})
    assert {"rank 1: X", "[2, 4]", "0.5", "6.5", "−0.5", "whole", "[2]", "−2"} <= set(texts(picture))
    assert [rank_fill(1)] == [c for c in fills(picture) if c == rank_fill(1)]


def test_matrices_of_every_rank_and_given_ranks() -> None:
    assert {"out, rank 0", "out, rank 1"} <= set(texts(viz.matrices({"out": [X, X]})))
    assert fills(viz.matrices({"a": X, "b": X}, ranks=[1, 0])) == [rank_fill(1), rank_fill(0)]
    named = viz.matrices({"a": X, "b": X[0], "c": X.T}, headings=["z", "da", "db", "dx"])
    assert texts(named).count("da") == 2


@pytest.mark.parametrize(
    ("tensor", "shown"),
    [
        (torch.tensor(3.25), {"3.25"}),
        (torch.zeros(0, 3), {"empty"}),
        (torch.ones(2, 2, 2), {"[2, 2, 2]", "1"}),
        (torch.tensor([True, False]), {"True", "False"}),
        (torch.tensor([1e9, float("nan")]), {"1.0e+09", "nan"}),
        (torch.arange(400.0).reshape(20, 20), {"0", "399", "…"}),
        ([[1, 2], [3, 4]], {"[2, 2]", "4"}),
        (torch.tensor([-0.001, 0.0]), {"0.00"}),
    ],
    ids=["scalar", "empty", "three dimensions", "bool", "huge and NaN", "large", "nested lists", "minus nothing"],
)
def test_matrices_take_any_tensor(tensor, shown) -> None:
    assert shown <= set(texts(viz.matrices({"t": tensor})))


def test_split_names_ranks_and_shapes() -> None:
    picture = viz.split((8, 6), 0, 2, title="a title")
    assert {"a title", "each rank holds [4, 6] of [8, 6]", "rank 0", "rank 1", "8", "6"} <= set(texts(picture))
    assert fills(picture) == [rank_fill(0), rank_fill(1)]
    assert "each rank holds [4] of [8]" in texts(viz.split(torch.zeros(8), -1, 2))


def test_the_column_product_has_parts_and_the_row_product_terms() -> None:
    column = texts(viz.product(X, A, kind="column", p=2))
    assert {"A₀", "A₁", "XA₀", "XA₁", "[2, 8]", "[2, 4] each", "on every rank"} <= set(column)
    row = texts(viz.product(X, A, kind="row", p=2))
    assert {"Z₀", "B₁", "Z₀ B₀", "Z B"} <= set(texts(viz.product(X, A, kind="row", p=2, names=("Z", "B"))))
    assert {"X₀", "X₁", "X₀ A₀", "X₁ A₁", "+", "[2, 8] each", "rank 0", "rank 1", "the sum"} <= set(row)


def test_traffic_shows_calls_and_bytes_of_every_rank() -> None:
    picture = viz.traffic(RESULTS, title="seen")
    assert texts(picture) == ["1 call, 2.05 kB", "1 call, 2.05 kB", "1 call, 0 B"]
    labels = [label.get_text() for label in picture.axes[0].get_yticklabels()]
    assert labels == ["all_reduce  rank 0", "rank 1", "barrier  rank 1"]
    assert [patch.get_width() for patch in picture.axes[0].patches] == [2048, 2048, 0]
    assert "nothing was sent" in texts(viz.traffic(Record()))[0]
    alone, to_scale = viz.traffic(RESULTS), viz.traffic(RESULTS, scale=4096)
    assert to_scale.axes[0].get_xlim()[1] == pytest.approx(2 * alone.axes[0].get_xlim()[1])


def test_the_timeline_has_a_lane_per_rank_and_a_box_per_collective() -> None:
    picture = viz.timeline(RESULTS)
    assert [label.get_text() for label in picture.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]
    boxes = [patch for patch in picture.axes[0].patches if patch.get_hatch()]
    assert len(picture.axes[0].patches) - len(boxes) == 2, "two lanes"
    assert [round(box.get_width()) for box in boxes] == [1400, 400, 1000]
    legend = {text.get_text() for text in picture.axes[0].get_legend().get_texts()}
    assert legend == {"computes", "in all_reduce", "in barrier"}
    unfinished = SimpleNamespace(record=Record([collective(0, "all_reduce", 4, 1.0, None)]), spans=[(0.5, 3.0)])
    assert [round(patch.get_width()) for patch in viz.timeline(unfinished).axes[0].patches] == [2500, 2000]
    assert viz.timeline(SimpleNamespace(record=Record(), spans=[(0.0, 1.0), (0.0, 2.0)])).png()


def test_curves_that_coincide_stay_visible() -> None:
    picture = viz.curves({"one process": torch.tensor([3.0, 2.0]), "p = 2": [3.0, 2.0], "p = 4": [3.0, 2.0]}, title="t")
    lines = picture.axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines] == [[3.0, 2.0]] * 3
    widths = [line.get_linewidth() for line in lines]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == 3
    assert len({line.get_color() for line in lines}) == 3


def test_explore_outside_a_notebook_gives_the_first_picture_or_that_where_it_is_told_to_start() -> None:
    choices, start = {"p": (2, 4), "kind": ["column", "row"]}, {"p": 4}
    assert viz.explore(lambda p, kind: (p, kind), **choices) == (2, "column")
    assert viz.explore(lambda p, kind: (p, kind), **choices, start=start) == (4, "column")
    assert start == {"p": 4}


def test_play_outside_a_notebook_gives_the_picture_of_the_step_where_it_is_told_to_start() -> None:
    frames = {2: ["a", "b"], 4: ["c", "d", "e"]}
    assert viz.play(lambda p: frames[p], p=(2, 4)) == "a"
    start = {"p": 4, "step": 2}
    assert viz.play(lambda p: frames[p], p=(2, 4), start=start) == "e"
    assert start == {"p": 4, "step": 2}


NOTEBOOK = """
from tplab import viz
seen = []
def draw(p, kind):
    seen.append((p, kind))
    print("drawing")
    return viz.split((8, 8), 0 if kind == "row" else 1, p)
box = viz.explore(draw, p=(1, 2, 4), kind=["column", "row"], start={"p": 2})
box
---
box.children[0].value = 4
box.children[1].value = "row"
seen, [type(child).__name__ for child in box.children]
---
viz.split((4, 4), 0, 2)
"""


def executed(source: str) -> dict:
    """The notebook with these cells, run in a real kernel."""
    program = """
import json, sys
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
cells = [new_code_cell(source) for source in sys.stdin.read().split("---")]
client = NotebookClient(new_notebook(cells=cells), timeout=120)
print(json.dumps(client.execute()))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], input=source, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def shown_in_widgets(notebook: dict) -> list[list[dict]]:
    """The pictures that each Output widget of the notebook holds in the end."""
    state = notebook["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    held = [widget["state"]["outputs"] for widget in state.values() if widget["model_name"] == "OutputModel"]
    return [[output for output in outputs if "image/png" in output.get("data", {})] for outputs in held]


@pytest.mark.slow
def test_in_a_real_kernel_moving_a_slider_redraws_the_picture() -> None:
    notebook = executed(NOTEBOOK)
    first, second, third = (cell["outputs"] for cell in notebook["cells"])
    assert "widget-view" in str(first)
    assert "[(2, 'column'), (4, 'column'), (4, 'row')]" in second[-1]["data"]["text/plain"]
    assert "['SelectionSlider', 'SelectionSlider', 'Output']" in second[-1]["data"]["text/plain"]
    assert [set(output["data"]) for output in third] == [{"image/png", "text/plain"}]
    assert third[0]["data"]["text/plain"].startswith("<[4, 4] cut along dimension 0")
    (pictures,) = shown_in_widgets(notebook)
    assert len(pictures) == 1, "the old picture goes when the new one comes"


PLAYED = """
from tplab import viz
ran, drawn = [], []
def draw(p, step):
    drawn.append((p, step))
    return viz.split((8, 8), 0, p, title=f"p = {p}, step {step}")
def run(p):
    ran.append(p)
    return viz.Frames(p + 1, lambda step: draw(p, step))
box = viz.play(run, p=(1, 2, 4), start={"p": 2, "step": 1}, seconds=0.5)
box
---
slider, player, steps, output = box.children
before = player.value, player.max, steps.value, steps.max, player.interval
steps.value = 2         # as the page does while it plays
player.playing = True
slider.value = 4        # another run: it begins at its start, and waits for the button
steps.value = 3
[type(child).__name__ for child in box.children], before, player.playing, (player.value, player.max, steps.max)
---
slider.value = 1        # a run that's shorter than the step shown before
ran, drawn, steps.value, steps.max
"""


@pytest.mark.slow
def test_in_a_real_kernel_play_shows_each_step_of_the_run_that_was_chosen() -> None:
    notebook = executed(PLAYED)
    first, second, third = (cell["outputs"] for cell in notebook["cells"])
    assert "widget-view" in str(first)
    assert second[-1]["data"]["text/plain"].replace("\n", "") == (
        "(['SelectionSlider', 'Play', 'IntSlider', 'Output'], (1, 2, 1, 2, 500), False, (0, 4, 4))"
    )
    assert third[-1]["data"]["text/plain"] == ("([2, 4, 1], [(2, 1), (2, 2), (4, 0), (4, 3), (1, 0)], 0, 1)"), (
        "each picture is drawn once"
    )
    (pictures,) = shown_in_widgets(notebook)
    assert len(pictures) == 1, "the old picture goes when the new one comes"
    assert "p = 1, step 0" in pictures[0]["metadata"]["image/png"]["alt"]
