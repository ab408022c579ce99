"""The picture of a softmax put together from shards: every column and every number that a rank sent is on it."""

import pytest
import torch
from matplotlib.colors import to_rgb
from torch import Tensor

from tplab import viz
from tplab.viz.colors import rank_color, rank_fill, rank_hatch

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
    "four ranks of four columns": lambda: viz.softmax(parts(torch.linspace(-9, 8, 16), 4, None)),
    "large logits": lambda: viz.softmax(parts(LOGITS + 10000, target=None)),
    "negative logits": lambda: viz.softmax(parts(-LOGITS.abs() - 1, target=None)),
    "a rank with only padding": lambda: viz.softmax(parts(torch.tensor([1.0, 2.0, -torch.inf, -torch.inf]))),
    "logits only": lambda: viz.softmax([{"logits": [1.0, 2.0]}, {"logits": [0.0, 0.0]}]),
}


def lines(axes, *, upright: bool) -> list[float]:
    """Where its lines across the whole row stand, upright or lying."""
    ends = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    return [x[0] for x, y in ends if y == [0, 1]] if upright else [y[0] for x, y in ends if x == [0, 1]]


@pytest.mark.parametrize("p", [2, 4])
def test_every_column_is_a_bar_of_its_rank_in_every_row_and_lines_stand_between_ranks(p) -> None:
    picture = viz.softmax(parts(p=p), target=3)
    names = ("logits", "exp", "softmax", "gradient")
    for axes, name in zip(picture.axes, names, strict=True):
        numbers = torch.cat([part[name] for part in parts(p=p)]).tolist()
        bars = [bar for group in axes.containers for bar in group]
        drawn = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in bars]
        right = [(column, number) for column, number in enumerate(numbers) if abs(number) < 1e9]
        assert drawn == [pytest.approx(bar) for bar in right]
        (left, end), (low, high) = axes.get_xlim(), axes.get_ylim()
        for bar, (column, number) in zip(bars, right, strict=True):
            rank = column * p // 8
            assert bar.get_facecolor()[:3] == to_rgb(rank_fill(rank))
            assert bar.get_edgecolor()[:3] == to_rgb(rank_color(rank))
            assert bar.get_hatch() == rank_hatch(rank)
            assert left < bar.get_x() < bar.get_x() + bar.get_width() < end
            assert low <= min(0, number) <= max(0, number) < high, "no bar is cut off"
            assert 0.5 < bar.get_width() < 1
        assert lines(axes, upright=True) == [8 / p * rank - 0.5 for rank in range(1, p)]
        assert lines(axes, upright=False) == ([3.0, 0] if name == "logits" else [0])


def test_every_row_says_what_each_rank_has_and_what_all_have() -> None:
    picture = viz.softmax(parts(), target=3)
    assert [axes.get_ylabel() for axes in picture.axes] == ["logits z", "exp(z - m)", "softmax", "softmax\n- one-hot"]
    said = [[text.get_text() for text in axes.texts] for axes in picture.axes]
    assert said[0] == ["rank 0\nmax 2.00", "-∞", "rank 1\nmax 3.00", "all ranks\nm = 3.00"]
    assert said[1] == ["rank 0\nsum 0.69", "rank 1\nsum 1.10", "all ranks\nS = 1.79"]
    assert said[2] == said[3] == ["rank 0", "rank 1"]
    at = {text.get_text(): text.get_position() for text in picture.axes[0].texts}
    assert at["-∞"][0] == 7
    assert at["rank 0\nmax 2.00"][0] == 1.5
    assert at["rank 1\nmax 3.00"][0] == 5.5
    rows = [{"logits": [1.0], "max": value, "m": 1234.56} for value in (-torch.inf, 99.994, -123.4)]
    short = [text.get_text() for text in viz.softmax(rows).axes[0].texts]
    assert short == ["rank 0\nmax -∞", "rank 1\nmax 99.99", "rank 2\nmax -123", "all ranks\nm = 1235"]


@pytest.mark.parametrize("target", [0, 3, None])
def test_a_grey_stripe_marks_the_target_in_every_row_and_ids_stand_below_the_last(target) -> None:
    picture = viz.softmax(parts(target=target), target=target)
    for axes in picture.axes:
        stripes = [patch.get_extents() for patch in axes.patches if patch.get_alpha() == 0.07]
        left, right = axes.transData.transform([((target or 0) - 0.5, 0), ((target or 0) + 0.5, 0)])[:, 0]
        assert [(box.x0, box.x1) for box in stripes] == ([] if target is None else [pytest.approx((left, right))])
    picture.png()
    shown = [[label.get_text() for label in axes.get_xticklabels() if label.get_visible()] for axes in picture.axes]
    assert shown[-1] == [str(column) for column in range(8)]
    assert not any(any(labels) for labels in shown[:-1])
    assert picture.axes[-1].get_xlabel().endswith("id" if target is None else f", {target}")


def test_ranks_may_have_different_numbers_of_columns_and_a_row_is_there_only_where_every_rank_has_it() -> None:
    axes = viz.softmax([{"logits": [1.0, 2.0, 3.0]}, {"logits": [4.0]}]).axes[0]
    assert [bar.get_height() for group in axes.containers for bar in group] == [1, 2, 3, 4]
    assert lines(axes, upright=True) == [2.5]
    assert len(viz.softmax(parts(target=None)).axes) == 3
    assert len(viz.softmax([{"logits": [1.0], "softmax": [0.5]}, {"logits": [1.0]}]).axes) == 1
