"""Pictures of collectives, rings and times: the right numbers, colors and places, and arrows from sender to receiver.

The recorded rings are made up from the closed formulas of tests/collectives/test_ring_run.py, which holds real runs to
them.
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, Rectangle

from tests.collectives.rings import held_after, messages_to_the_right, mirrored
from tests.viz.pictures import fills, places, texts
from tplab import viz
from tplab.viz.colors import rank_color, rank_fill, tint

GOLD = "#d4a017"


def held(p: int) -> list[torch.Tensor]:
    return [torch.arange(1, p + 1) * 10**rank for rank in range(p)]


def all_reduced(p: int) -> list[tuple]:
    return [(x, sum(held(p))) for x in held(p)]


def gathered(p: int) -> list[tuple]:
    return [(x[:1], [y[:1] for y in held(p)] if rank == 1 else None) for rank, x in enumerate(held(p))]


def sums_in_a_ring(p: int) -> list[list[torch.Tensor]]:
    """What each rank holds in each step, by the definition: chunk c started at rank c + 1."""

    def at(rank: int, step: int) -> torch.Tensor:
        chunk = (rank - 1 - step) % p
        return sum(held(p)[(rank - back) % p][chunk] for back in range(step + 1))

    return [[at(rank, step) for step in range(p)] for rank in range(p)]


class Message(NamedTuple):
    source: int
    target: int
    chunk: int
    ranks: frozenset[int]
    bytes: int


def made_up(p: int, name: str = "your ring_all_reduce", note: str = "", left: bool = False) -> SimpleNamespace:
    steps, turn = messages_to_the_right(p), -1 if left else 1
    steps = mirrored(p, steps) if left else steps

    def has(step: int, rank: int, chunk: int) -> frozenset[int]:
        return frozenset(turn * r % p for r in held_after(step, turn * rank % p, turn * chunk % p, p))

    after = [[[has(step, rank, chunk) for chunk in range(p)] for rank in range(p)] for step in range(2 * p - 1)]
    messages = [[Message(*sent) for sent in row] for row in steps]
    return SimpleNamespace(name=name, note=note, size=1000 * p, messages=messages, held=after)


NOTE = "This is tplab's ring, because your ring_all_reduce failed with RuntimeError on rank 0."
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
    **{
        f"recorded, p = {p}, step {step}": lambda p=p, step=step: viz.ring_run(made_up(p))[step]
        for p, step in ((2, 0), (4, 4), (8, 8))
    },
    "to the left, with a note": lambda: viz.ring_run(made_up(4, "tplab's ring_all_reduce", NOTE, left=True))[3],
}


def test_every_number_before_and_after_stands_on_the_colors_of_its_sources() -> None:
    picture = viz.collective(all_reduced(3), name="all_reduce")
    assert [texts(picture).count(number) for number in ("222", "20")] == [3, 1]
    before = [rank_fill(rank) for rank in range(3) for _ in range(3)]
    after = [rank_fill(rank) for _ in range(9) for rank in range(3)]
    *cells, _ = fills(picture)  # the last is the arrow
    assert cells == before + after


def test_a_ring_shows_which_sum_is_where_what_it_has_met_and_an_arrow_for_every_message() -> None:
    picture = viz.ring(sums_in_a_ring(3), title="t")
    shown = [text for text in texts(picture) if text.isdecimal()]
    assert shown == ["3", "10", "200", "202", "33", "110", "111", "222", "333"]
    arrows = [patch for patch in picture.axes[0].patches if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) == 3 * 2
    assert len(fills(picture)) == 3 * (1 + 2 + 3) + len(arrows)
    assert [arrow.get_linestyle() for arrow in arrows].count("solid") == 4, "one a step comes in again on the left"


def test_times_draws_points_and_lines_where_they_are() -> None:
    (axes,) = viz.times(LINKS, {"here": POINTS}, title="t").axes
    *lines, dots = axes.lines
    assert [list(point) for point in dots.get_xydata()] == [list(point) for point in POINTS]
    for line, function in zip(lines, LINKS.values(), strict=True):
        assert all(math.isclose(seconds, function(size)) for size, seconds in line.get_xydata())


# A recorded ring


class Slot(NamedTuple):
    x: float  # of its center
    y: float
    ranks: frozenset[int]
    gold: bool


def slots(picture: viz.Picture, p: int) -> list[Slot]:
    """The slots in the order in which they were drawn. A stripe counts for the rank of its color and of its place."""
    colors = {to_hex(tint(rank_color(rank), 0.8)): rank for rank in range(p)}
    found, stripes = [], {}
    for patch in (patch for patch in picture.axes[0].patches if isinstance(patch, Rectangle)):
        if patch.get_facecolor()[3]:
            rank = colors.get(to_hex(patch.get_facecolor()))
            stripes |= {} if rank is None else {rank: patch}
            continue
        (x, y), width, height = patch.get_xy(), patch.get_width(), patch.get_height()
        for rank, stripe in stripes.items():
            assert stripe.get_xy() == pytest.approx((x, y + rank * height / p))
        gold = to_hex(patch.get_edgecolor()) == GOLD
        found.append(Slot(x + width / 2, y + height / 2, frozenset(stripes), gold))
        stripes = {}
    return found


@pytest.mark.parametrize(("p", "left"), [(2, False), (3, True)])
def test_every_step_shows_its_own_messages_what_the_ranks_have_after_it_and_the_bytes_so_far(p, left):
    run = made_up(p, left=left)
    frames = viz.ring_run(run)
    assert len(frames) == 2 * p - 1
    for step, picture in enumerate(frames):
        sent = run.messages[step - 1] if step else []
        shown = slots(picture, p)
        after = [ranks for chunks in run.held[step] for ranks in chunks]
        assert [slot.ranks for slot in shown] == [*(message.ranks for message in sent), *after]
        assert [slot.gold for slot in shown] == [len(slot.ranks) == p for slot in shown]
        links = [f"chunk {message.chunk}\n{1000 * step:,} bytes" for message in sent] or ["0 bytes"] * p
        assert [text for text in texts(picture) if text.endswith(" bytes") and "tensor" not in text] == links


def angle(center: tuple[float, float], point: tuple[float, float]) -> float:
    return math.atan2(point[1] - center[1], point[0] - center[0])


@pytest.mark.parametrize(("p", "left"), [(3, False), (4, True)])
def test_a_message_is_between_its_ranks_and_its_arrow_leads_from_the_sender_to_the_receiver(p, left):
    run = made_up(p, left=left)
    picture = viz.ring_run(run)[2]
    arrows = [patch for patch in picture.axes[0].patches if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) == p
    at = {rank: places(picture)[f"rank {rank}"][0] for rank in range(p)}
    (center,) = next(at for text, at in places(picture).items() if text.startswith("step 2"))
    for message, slot, arrow in zip(run.messages[1], slots(picture, p), arrows, strict=False):
        tail, head = arrow._posA_posB
        for point in ((slot.x, slot.y), tail, head):
            by_distance = sorted(at, key=lambda rank: math.dist(point, (at[rank][0], at[rank][1] + 0.39)))
            assert set(by_distance[:2]) == {message.source, message.target}  # a rank's name is on top of it
        clockwise = math.remainder(angle(center, head) - angle(center, tail), 2 * math.pi) > 0
        assert clockwise == ((message.target - message.source) % p == 1)
