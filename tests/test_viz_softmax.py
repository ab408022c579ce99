"""The picture of a softmax put together from shards: every column and every number that a rank sent is on it."""

import pytest
import torch
from matplotlib.colors import to_rgb
from torch import Tensor

from tests.pictures import assert_fits_a_notebook, assert_texts_apart, assert_texts_inside
from tplab import viz
from tplab.viz.colors import rank_fill

LOGITS = torch.tensor([1.5, -0.5, 0.25, 2.0, -1.0, 0.5, 3.0, -torch.inf])


def parts(logits: Tensor = LOGITS, p: int = 2, target: int | None = 3) -> list[dict[str, Tensor]]:
    """What p ranks return: pieces of the whole, computed here on one process."""
    m, softmax = logits.max(), logits.softmax(0)
    one_hot = torch.zeros_like(logits)
    if target is not None:
        one_hot[target] = 1
    exp = (logits - m).exp()
    rows = []
    for z, e, s, g in zip(*(t.chunk(p) for t in (logits, exp, softmax, softmax - one_hot)), strict=True):
        row = {"logits": z, "max": z.max(), "m": m, "exp": e, "sum": e.sum(), "S": exp.sum(), "softmax": s}
        rows.append(row if target is None else row | {"gradient": g})
    return rows


PICTURES = {
    "two ranks": lambda: viz.softmax(parts(), target=3, title="t"),
    "four ranks": lambda: viz.softmax(parts(p=4), target=3),
    "four ranks of four columns": lambda: viz.softmax(parts(torch.linspace(-9, 8, 16), 4, None)),
    "large logits": lambda: viz.softmax(parts(LOGITS + 10000, target=None)),
    "negative logits": lambda: viz.softmax(parts(-LOGITS.abs() - 1, target=None)),
    "a rank with only padding": lambda: viz.softmax(parts(torch.tensor([1.0, 2.0, -torch.inf, -torch.inf]))),
    "one rank": lambda: viz.softmax(parts(p=1)),
    "logits only": lambda: viz.softmax([{"logits": [1.0, 2.0]}, {"logits": [0.0, 0.0]}]),
}


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_a_picture_is_small_fits_a_notebook_and_keeps_its_texts_inside(draw) -> None:
    assert_fits_a_notebook(draw)
    assert_texts_inside(draw())


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_no_two_texts_overlap(draw) -> None:
    assert_texts_apart(draw())


def bars(axes) -> list[tuple[float, float, int]]:
    """(column, height, rank by its colour) of every bar."""
    fills = {tuple(to_rgb(rank_fill(rank))): rank for rank in range(4)}
    found = [(bar, fills.get(tuple(bar.get_facecolor()[:3]))) for group in axes.containers for bar in group]
    return [(bar.get_x() + bar.get_width() / 2, bar.get_height(), rank) for bar, rank in found]


def test_every_column_is_a_bar_of_its_rank_in_every_row() -> None:
    picture = viz.softmax(parts(), target=3)
    assert len(picture.axes) == 4
    whole = [torch.cat([part[name] for part in parts()]) for name in ("logits", "exp", "softmax", "gradient")]
    for axes, numbers in zip(picture.axes, whole, strict=True):
        right = [(column, number, column // 4) for column, number in enumerate(numbers.tolist()) if abs(number) < 1e9]
        assert [pytest.approx(bar) for bar in right] == bars(axes)
    assert [text.get_text() for text in picture.axes[0].texts].count("-∞") == 1


def test_the_numbers_of_each_rank_and_of_all_are_written() -> None:
    texts = [text.get_text() for axes in viz.softmax(parts()).axes for text in axes.texts]
    for number in ("max 2.00", "max 3.00", "m = 3.00", "sum 0.69", "S = 1.79"):
        assert sum(number in text for text in texts) == 1, number


def test_the_row_of_the_gradient_is_there_only_with_a_gradient() -> None:
    assert len(viz.softmax(parts(target=None)).axes) == 3


def test_parts_without_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="logits"):
        viz.softmax([{"softmax": [0.5, 0.5]}])
