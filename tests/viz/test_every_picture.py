"""What holds for every picture: it fits a notebook, its texts stay inside and apart, and nonsense is refused."""

import importlib
import itertools
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot

from tests.viz.pictures import text_boxes
from tests.viz.test_ranks import SMALL, mask
from tests.viz.test_times import run
from tplab import viz
from tplab.cost.backward import mlp_backward
from tplab.memory.meter import MemoryMeter
from tplab.trace.rank_trace import RankTrace

NAMES = [path.stem for path in sorted(Path(__file__).parent.glob("test_*.py")) if "\nPICTURES" in path.read_text()]
LABELS_ONLY = {"timeline", "curves", "many"}  # titles, ticks and legends


@pytest.mark.parametrize("file", NAMES)
def test_a_picture_is_small_and_described_and_its_texts_stay_inside_and_apart(file) -> None:
    for number, (name, draw) in enumerate(importlib.import_module(f"tests.viz.{file}").PICTURES.items()):
        picture = draw()
        png, shown = picture._repr_png_()
        assert png.startswith(b"\x89PNG"), name
        assert len(png) < 100_000, name
        assert shown["width"] <= 960, f"{name} is wider than a cell"
        assert shown["alt"] == f"{picture.caption}. {picture.description}"
        assert len(picture.description) > 20, f"{name} needs a description, not a name"
        if not number:
            assert png == draw().png(), f"{name} isn't the same every time"
        found, frame = text_boxes(picture), picture.bbox
        assert bool(found) == (name not in LABELS_ONLY), name
        for text, box in found:
            assert frame.x0 - 1 < box.x0 < box.x1 < frame.x1 + 1, (name, text)
            assert frame.y0 - 1 < box.y0 < box.y1 < frame.y1 + 1, (name, text)
        for (one, a), (other, b) in itertools.combinations(found, 2):
            assert not a.overlaps(b), (name, one, other)
    assert pyplot.get_fignums() == []


CHOICES = {"p": (2, 4), "kind": ["column", "row"]}
NINE_PARTS = {str(part): 1.0 for part in range(9)}
X, A = (2, 4), (4, 8)
# fmt: off
REFUSED = [
    (lambda: viz.split((8, 6), 1, 4),                                   "size 6"),
    (lambda: viz.split((2, 2, 2), 0, 2),                                r"\[2, 2, 2\]"),
    (lambda: viz.product((2, 3), A),                                    "can't be multiplied"),
    (lambda: viz.product((2, 6), (6, 8), p=4, kind="row"),              "size 6"),
    (lambda: viz.product(X, A, kind="diagonal"),                        "diagonal"),
    (lambda: viz.explore(print, **CHOICES, start={"p": 3}),             "start=p="),
    (lambda: viz.explore(print, **CHOICES, start={"q": 2}),             "start=q="),
    (lambda: viz.explore(print, p=()),                                  "at least one value"),
    (lambda: viz.play(lambda p: [p, p], p=(2, 4), start={"step": 2}),   "start=step=2 is none of the 2 steps"),
    (lambda: viz.play(print, step=(1, 2)),                              "its own slider for 'step'"),
    (lambda: viz.ring([[(2, torch.tensor([3]))]]),                      "one number per rank and step, not 2"),
    (lambda: viz.table([{"p": 1}, {"q": 1}]),                           "the same columns"),
    (lambda: viz.heads([{"q": [0], "k": [0]}, {"q": [1]}]),             "rank 1 has"),
    (lambda: viz.layer([SMALL], [SMALL] * 2, ranks=2),                  "a layer communicates twice"),
    (lambda: viz.saved_activations({}),                                 "1 to 8 different parts"),
    (lambda: viz.live_memory(MemoryMeter()),                            "the meter saw no tensor"),
    (lambda: viz.parallelism("model"),                                  "not 'model'"),
    (lambda: viz.masks({"a": [mask(0)], "b": [mask(0)] * 2}),           "same number for all, not {'a': 1, 'b': 2}"),
    (lambda: viz.masks({"a": [torch.ones(3)]}),                         r"'a' is \[3\]"),
    (lambda: viz.masks({"a": [torch.ones(3, 33)]}),                     "at most 32 x 32"),
    (lambda: viz.schedule([[], []]),                                    "no actions"),
    (lambda: viz.overlap({"one": run(0), "two": [RankTrace(0, [])]}), "nothing was traced in 'two'"),
    (lambda: viz.against({}),                                           "no figures"),
    (lambda: viz.time_bars({"too many": NINE_PARTS}),                   "1 to 8 different parts"),
    (lambda: viz.clock(mlp_backward(["dX", "dZ"]), kept="dY"),          "'dX' on rank 0 can't start without 'dZ'"),
    (lambda: mlp_backward(["dY"]),                                      "'dY' is none of the steps"),
    (lambda: viz.mesh({"tp": [[0, 1]]}, rank=2),                       "ranks 0 to 1, and rank 2"),
    (lambda: viz.mesh({}),                                              "at least one axis"),
    (lambda: viz.mesh({"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1]]}),   "dp don't hold each of the ranks 0 to 3 once"),
]
# fmt: on


@pytest.mark.parametrize(("draw", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_a_picture_cannot_show_is_refused(draw, says) -> None:
    with pytest.raises(ValueError, match=says):
        draw()


def test_a_table_is_aligned_text_in_a_terminal_and_escaped_html_in_a_notebook() -> None:
    rows = [{"run": "one process", "loss": "1.50", "bytes": 0}, {"run": "p = 4", "loss": "11.25", "bytes": None}]
    lines = ["run           loss  bytes", "one process   1.50      0", "p = 4        11.25"]
    assert repr(viz.table(rows)).splitlines() == lines
    html = viz.table([{"a < b": "<i>"}])._repr_html_()
    assert "a &lt; b" in html
    assert "&lt;i&gt;" in html
    assert "<i>" not in html
