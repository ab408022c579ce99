"""Pictures of collectives, rings and times: the right numbers, colours and places, inside the frame, no overlap."""

import math
from pathlib import Path

import torch
from matplotlib.colors import to_hex

from tests.viz.pictures import fills, texts
from tplab import viz
from tplab.viz.colors import FAINT, NOBODY, rank_color, rank_fill


def held(p: int) -> list[torch.Tensor]:
    return [torch.arange(1, p + 1) * 10**rank for rank in range(p)]


def all_reduced(p: int) -> list[tuple]:
    return [(x, sum(held(p))) for x in held(p)]


def gathered(p: int, root: int = 1) -> list[tuple]:
    return [(x[:1], [y[:1] for y in held(p)] if rank == root else None) for rank, x in enumerate(held(p))]


def sums_in_a_ring(p: int) -> list[list[torch.Tensor]]:
    """What each rank holds in each step, by the definition: chunk c started at rank c + 1."""

    def at(rank: int, step: int) -> torch.Tensor:
        chunk = (rank - 1 - step) % p
        return sum(held(p)[(rank - back) % p][chunk] for back in range(step + 1))

    return [[at(rank, step) for step in range(p)] for rank in range(p)]


POINTS = [(4.0**k, 5e-5 + 4.0**k / 4e9) for k in range(1, 12)]
LINKS = {
    "here": lambda n: 5e-5 + n / 4e9,
    "slow": lambda n: 1.4e-5 + n / 25e9,
    "a": lambda n: 5e-6 + n / 31e9,
    "b": lambda n: 3e-6 + n / 33e9,
}

PICTURES = {
    **{f"all-reduce, p = {p}": lambda p=p: viz.collective(all_reduced(p), name="all_reduce") for p in (1, 2, 4)},
    "gather": lambda: viz.collective(gathered(4), name="gather", title="gather on rank 1, a long title for it"),
    **{f"ring of sums, p = {p}": lambda p=p: viz.ring(sums_in_a_ring(p), title=f"p = {p}") for p in (2, 3, 4)},
    "times": lambda: viz.times(LINKS, {"here": POINTS}, title="one message"),
    "lines only": lambda: viz.times({"ring": LINKS["a"], "tree": LINKS["here"]}),
}


def test_every_number_before_and_after_stands_on_the_colours_of_its_sources() -> None:
    picture = viz.collective(all_reduced(3), name="all_reduce")
    shown = texts(picture)
    assert shown.count("222") == 3
    assert shown.count("20") == 1
    assert {"before", "after", "all_reduce", "rank 0", "rank 1", "rank 2"} <= set(shown)
    before = [rank_fill(rank) for rank in range(3) for _ in range(3)]
    after = [rank_fill(rank) for _ in range(9) for rank in range(3)]
    *cells, _ = fills(picture)  # the last is the arrow
    assert cells == before + after


def test_a_rank_that_holds_nothing_gets_a_dash_and_a_zero_no_colour() -> None:
    picture = viz.collective([(torch.tensor([0, 2]), None), (torch.tensor([0, 20]), torch.tensor([22, 0]))])
    assert texts(picture).count("–") == 1
    assert texts(picture).count("0") == 3
    neutral = [color for color in fills(picture) if to_hex(color) == NOBODY.lower()]
    assert len(neutral) == 3
    assert fills(picture).count(rank_fill(0)[:3]) == 2


def test_a_list_of_tensors_is_one_column() -> None:
    assert [text for text in texts(viz.collective(gathered(2, root=0))) if text.isdecimal()] == ["1", "10", "1", "10"]


def test_a_ring_shows_which_sum_is_where_and_what_it_has_met() -> None:
    picture = viz.ring(sums_in_a_ring(3), title="t")
    shown = texts(picture)
    assert [text for text in shown if text.isdecimal()] == ["3", "10", "200", "202", "33", "110", "111", "222", "333"]
    assert {"t", "start", "step 1", "step 2"} <= set(shown)
    assert len(fills(picture)) == 3 * (1 + 2 + 3) + _arrows(picture)


def _arrows(picture: viz.Picture) -> int:
    return sum(type(patch).__name__ == "FancyArrowPatch" for axes in picture.axes for patch in axes.patches)


def test_a_ring_has_an_arrow_for_every_message() -> None:
    assert _arrows(viz.ring(sums_in_a_ring(4))) == 4 * 3
    assert _arrows(viz.ring(sums_in_a_ring(2))) == 2
    drawn = [patch for axes in viz.ring(sums_in_a_ring(4)).axes for patch in axes.patches]
    styles = [patch.get_linestyle() for patch in drawn if hasattr(patch, "get_arrowstyle")]
    assert len(styles) - styles.count("solid") == 3, "one in each step comes in again on the left"


def test_times_draws_points_and_lines_where_they_are_and_names_each_line_at_its_end() -> None:
    picture = viz.times(LINKS, {"here": POINTS}, sizes=(4, 2**30))
    (axes,) = picture.axes
    *lines, dots = axes.lines
    assert [list(point) for point in dots.get_xydata()] == [list(point) for point in POINTS]
    for line, function in zip(lines, LINKS.values(), strict=True):
        x, y = line.get_data()
        assert x[0] == 4
        assert math.isclose(x[-1], 2**30)
        assert all(math.isclose(seconds, function(size)) for size, seconds in zip(x, y, strict=True))
    assert [line.get_color() for line in lines] == [rank_color(0), FAINT, FAINT, FAINT]
    assert [line.get_linewidth() for line in lines] == [2, 1.1, 1.1, 1.1]
    assert len({str(line.get_linestyle()) + str(line._dash_pattern) for line in lines}) == 4
    assert sorted(text.get_text() for text in axes.texts) == sorted(LINKS)
    heights = {text.get_text(): text.xyann[1] for text in axes.texts}
    assert heights["b"] < heights["a"] < heights["slow"] < heights["here"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_axes_are_labelled_in_bytes_and_seconds() -> None:
    (axes,) = PICTURES["times"]().axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["100 B", "10 kB", "1 MB", "100 MB"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["10 µs", "100 µs", "1 ms", "10 ms", "100 ms"]
    assert len(axes.get_xticks(minor=True)) == len(axes.get_yticks(minor=True)) == 0


def test_lines_without_points_have_colours_of_their_own() -> None:
    (axes,) = PICTURES["lines only"]().axes
    assert [line.get_color() for line in axes.lines] == [rank_color(0), rank_color(1)]


def test_the_pictures_module_computes_nothing_of_a_collective() -> None:
    for file in ("collectives.py", "times.py"):
        source = (Path(viz.__file__).parent / file).read_text()
        assert "torch.distributed" not in source
        assert "tplab.collectives.by_hand" not in source
