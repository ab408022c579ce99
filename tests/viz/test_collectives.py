"""Pictures of collectives, rings and times: the right numbers, colours and places, inside the frame, no overlap."""

import math

import torch
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch

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
    **{f"all-reduce, p = {p}": lambda p=p: viz.collective(all_reduced(p), name="all_reduce") for p in (1, 4)},
    "gather": lambda: viz.collective(gathered(4), name="gather"),
    **{f"ring of sums, p = {p}": lambda p=p: viz.ring(sums_in_a_ring(p), title=f"p = {p}") for p in (2, 4)},
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

    nothing = viz.collective(
        [(torch.tensor([0, 2]), None), (torch.tensor([0, 20]), torch.tensor([22, 0]))], name="all_reduce"
    )
    assert texts(nothing).count("–") == 1
    assert texts(nothing).count("0") == 3
    assert len([color for color in fills(nothing) if to_hex(color) == NOBODY.lower()]) == 3, "a zero is nobody's"
    column = viz.collective(gathered(2, root=0), name="gather")
    assert [text for text in texts(column) if text.isdecimal()] == ["1", "10", "1", "10"]


def test_a_ring_shows_which_sum_is_where_what_it_has_met_and_an_arrow_for_every_message() -> None:
    picture = viz.ring(sums_in_a_ring(3), title="t")
    shown = texts(picture)
    assert [text for text in shown if text.isdecimal()] == ["3", "10", "200", "202", "33", "110", "111", "222", "333"]
    assert {"t", "start", "step 1", "step 2"} <= set(shown)
    arrows = [patch for patch in picture.axes[0].patches if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) == 3 * 2
    assert len(fills(picture)) == 3 * (1 + 2 + 3) + len(arrows)
    assert [arrow.get_linestyle() for arrow in arrows].count("solid") == 4, "one a step comes in again on the left"


def test_times_draws_points_and_lines_where_they_are_and_names_each_line_at_its_end() -> None:
    (axes,) = viz.times(LINKS, {"here": POINTS}).axes
    *lines, dots = axes.lines
    assert [list(point) for point in dots.get_xydata()] == [list(point) for point in POINTS]
    for line, function in zip(lines, LINKS.values(), strict=True):
        assert all(math.isclose(seconds, function(size)) for size, seconds in line.get_xydata())
    assert [line.get_color() for line in lines] == [rank_color(0), FAINT, FAINT, FAINT]
    assert len({str(line.get_linestyle()) + str(line._dash_pattern) for line in lines}) == 4
    heights = {text.get_text(): text.xyann[1] for text in axes.texts}
    assert heights["b"] < heights["a"] < heights["slow"] < heights["here"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["100 B", "10 kB", "1 MB", "100 MB"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["10 µs", "100 µs", "1 ms", "10 ms", "100 ms"]
    (alone,) = PICTURES["lines only"]().axes
    assert [line.get_color() for line in alone.lines] == [rank_color(0), rank_color(1)]
