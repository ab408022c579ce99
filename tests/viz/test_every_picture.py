"""What holds for every picture: it fits a notebook, its texts stay inside and apart, and nonsense is refused."""

import importlib
import itertools
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot

from tests import saying
from tests.viz.pictures import text_boxes
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


REFUSED = [
    (lambda: viz.split(torch.ones(8, 6), dim=1, p=4, title="t"), ["size 6", "dimension 1", "4"]),
    (lambda: viz.product(torch.ones(2, 3), torch.ones(4, 8), kind="row", p=2), ["X [2, 3]", "A [4, 8]"]),
    (lambda: viz.matrices({"wide": torch.ones(1, 30)}), ["matrices", "10", "[1, 30]"]),
    (lambda: viz.explore(print, p=(2, 4), start={"p": 3}), ["start=p=3", "p=[2, 4]"]),
    (lambda: viz.play(lambda p: [p, p], p=(2, 4), start={"step": 2}), ["start=step=2", "2 steps"]),
    (lambda: viz.live_memory(MemoryMeter(), title="t"), ["meter", "`with`"]),
    (lambda: viz.masks({"a": [torch.ones(3, 33)]}), ["masks", "32 x 32", "[3, 33]"]),
    (lambda: viz.overlap({"one": run(0), "two": [RankTrace(0, [])]}), ["'two'", "`with trace_rank()`"]),
    (lambda: viz.clock(mlp_backward(["dX", "dZ"]), kept="dY"), ["'dX'", "rank 0", "'dZ'"]),
]


@pytest.mark.parametrize(("draw", "says"), REFUSED, ids=[says[0] for _, says in REFUSED])
def test_what_a_picture_cannot_show_is_refused(draw, says) -> None:
    with pytest.raises(ValueError, match=saying(*says)):
        draw()


def test_a_table_is_escaped_html_in_a_notebook() -> None:
    html = viz.table([{"a < b": "<i>"}])._repr_html_()
    assert "a &lt; b" in html
    assert "&lt;i&gt;" in html
    assert "<i>" not in html
