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
    "four ranks": lambda: viz.softmax(parts(p=4), target=3),
    "four ranks of four columns": lambda: viz.softmax(parts(torch.linspace(-9, 8, 16), 4, None)),
    "large logits": lambda: viz.softmax(parts(LOGITS + 10000, target=None)),
    "negative logits": lambda: viz.softmax(parts(-LOGITS.abs() - 1, target=None)),
    "a rank with only padding": lambda: viz.softmax(parts(torch.tensor([1.0, 2.0, -torch.inf, -torch.inf]))),
    "one rank": lambda: viz.softmax(parts(p=1)),
    "logits only": lambda: viz.softmax([{"logits": [1.0, 2.0]}, {"logits": [0.0, 0.0]}]),
}


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


def test_infinities_stand_in_their_columns_and_ranks_above_the_middle_of_theirs() -> None:
    top = viz.softmax(parts(), target=3).axes[0]
    at = {text.get_text(): text.get_position() for text in top.texts}
    assert at["-∞"][0] == 7
    assert at["rank 0\nmax 2.00"][0] == 1.5
    assert at["rank 1\nmax 3.00"][0] == 5.5
    assert all(y > 3.0 for text, (_, y) in at.items() if text.startswith("rank"))


def test_every_row_is_named_and_says_what_each_rank_has_and_what_all_have() -> None:
    picture = viz.softmax(parts(), target=3)
    assert [axes.get_ylabel() for axes in picture.axes] == ["logits z", "exp(z - m)", "softmax", "softmax\n- one-hot"]
    said = [[text.get_text() for text in axes.texts] for axes in picture.axes]
    assert said[0] == ["rank 0\nmax 2.00", "-∞", "rank 1\nmax 3.00", "all ranks\nm = 3.00"]
    assert said[1] == ["rank 0\nsum 0.69", "rank 1\nsum 1.10", "all ranks\nS = 1.79"]
    assert said[2] == said[3] == ["rank 0", "rank 1"]


def lines(axes, *, upright: bool) -> list[float]:
    """Where its lines across the whole row stand, upright or lying."""
    found = []
    for line in axes.lines:
        x, y = list(line.get_xdata()), list(line.get_ydata())
        if upright and y == [0, 1] and x[0] == x[1]:
            found.append(x[0])
        if not upright and x == [0, 1] and y[0] == y[1]:
            found.append(y[0])
    return found


def test_lines_stand_between_ranks_at_the_maximum_and_at_zero() -> None:
    picture = viz.softmax(parts(p=4), target=3)
    assert all(lines(axes, upright=True) == [1.5, 3.5, 5.5] for axes in picture.axes)
    assert [lines(axes, upright=False) for axes in picture.axes] == [[3.0, 0], [0], [0], [0]]


@pytest.mark.parametrize("target", [0, 3, None])
def test_a_grey_stripe_marks_the_target_in_every_row(target) -> None:
    for axes in viz.softmax(parts(target=target), target=target).axes:
        stripes = [patch.get_extents() for patch in axes.patches if patch.get_alpha() == 0.07]
        left, right = axes.transData.transform([((target or 0) - 0.5, 0), ((target or 0) + 0.5, 0)])[:, 0]
        assert [(box.x0, box.x1) for box in stripes] == ([] if target is None else [pytest.approx((left, right))])


def test_no_bar_is_cut_off_or_as_wide_as_the_way_to_the_next() -> None:
    for axes in viz.softmax(parts(), target=3).axes:
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        for bar in (bar for group in axes.containers for bar in group):
            assert left < bar.get_x() < bar.get_x() + bar.get_width() < right
            assert low <= min(0, bar.get_height()) <= max(0, bar.get_height()) < high
            assert 0.5 < bar.get_width() < 1


def test_bars_have_the_edge_and_the_hatch_of_their_rank() -> None:
    for axes in viz.softmax(parts(p=4), target=3).axes:
        for bar in (bar for group in axes.containers for bar in group):
            rank = round(bar.get_x() + bar.get_width() / 2) // 2
            assert bar.get_edgecolor()[:3] == to_rgb(rank_color(rank))
            assert bar.get_hatch() == rank_hatch(rank)


@pytest.mark.parametrize(
    ("target", "words"), [(3, "id; the grey stripe is the target, 3"), (0, "target, 0"), (None, "id")]
)
def test_ids_stand_below_the_last_row_only(target, words) -> None:
    picture = viz.softmax(parts(target=target), target=target)
    picture.png()
    shown = [[label.get_text() for label in axes.get_xticklabels() if label.get_visible()] for axes in picture.axes]
    assert shown[-1] == [str(column) for column in range(8)]
    assert not any(any(labels) for labels in shown[:-1])
    assert picture.axes[-1].get_xlabel().endswith(words)
    assert not any(axes.get_xlabel() for axes in picture.axes[:-1])


def test_numbers_are_short_and_infinity_is_a_sign() -> None:
    rows = [{"logits": [1.0], "max": value, "m": 1234.56} for value in (-torch.inf, 99.994, -123.4)]
    said = [text.get_text() for text in viz.softmax(rows).axes[0].texts]
    assert said == ["rank 0\nmax -∞", "rank 1\nmax 99.99", "rank 2\nmax -123", "all ranks\nm = 1235"]


def test_title_and_caption() -> None:
    assert viz.softmax(parts(), title="mine").get_suptitle() == viz.softmax(parts(), title="mine").caption == "mine"
    assert viz.softmax(parts()).get_suptitle() == ""
    assert viz.softmax(parts()).caption == "a softmax over 8 columns of 2 ranks"


def test_ranks_may_have_different_numbers_of_columns() -> None:
    picture = viz.softmax([{"logits": [1.0, 2.0, 3.0]}, {"logits": [4.0]}])
    assert bars(picture.axes[0]) == [(0, 1.0, 0), (1, 2.0, 0), (2, 3.0, 0), (3, 4.0, 1)]
    assert lines(picture.axes[0], upright=True) == [2.5]
    assert picture.axes[0].get_xlim() == pytest.approx((-0.6, 3.6))


def test_a_row_is_there_only_where_every_rank_has_it() -> None:
    assert len(viz.softmax(parts(target=None)).axes) == 3
    some = [{"logits": [1.0], "softmax": [0.5]}, {"logits": [1.0]}]
    assert len(viz.softmax(some).axes) == 1
