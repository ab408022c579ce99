"""The pictures of a recorded ring: each shows what was sent in its step, what the ranks have after it, and the bytes.

The runs are made up from the closed formulas of tests/collectives/test_ring_run.py, which holds real runs to them.
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, Rectangle

from tests.collectives.test_ring_run import held_after, messages_to_the_right, mirrored
from tests.viz.pictures import places, texts
from tplab import viz
from tplab.viz.colors import rank_color, tint

GOLD = "#d4a017"


class Message(NamedTuple):
    source: int
    target: int
    chunk: int
    ranks: frozenset[int]
    bytes: int


def made_up(p: int, name: str = "your ring_all_reduce", note: str = "", left: bool = False) -> SimpleNamespace:
    steps, turn = messages_to_the_right(p), -1 if left else 1
    steps = mirrored(p, steps) if left else steps

    def held(step: int, rank: int, chunk: int) -> frozenset[int]:
        return frozenset(turn * r % p for r in held_after(step, turn * rank % p, turn * chunk % p, p))

    after = [[[held(step, rank, chunk) for chunk in range(p)] for rank in range(p)] for step in range(2 * p - 1)]
    messages = [[Message(*sent) for sent in row] for row in steps]
    return SimpleNamespace(name=name, note=note, size=1000 * p, messages=messages, held=after)


NOTE = "This is tplab's ring, because your ring_all_reduce failed with RuntimeError on rank 0."
PICTURES = {
    **{
        f"p = {p}, step {step}": lambda p=p, step=step: viz.ring_run(made_up(p))[step]
        for p, steps in ((2, (0,)), (3, (1,)), (4, (4,)), (6, (10,)), (8, (8,)))
        for step in steps
    },
    "to the left, with a note": lambda: viz.ring_run(made_up(4, "tplab's ring_all_reduce", NOTE, left=True))[3],
}


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
            assert (stripe.get_width(), stripe.get_height()) == pytest.approx((width, height / p))
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
        words = texts(picture)
        when = f"after step {step} of {2 * (p - 1)}" if step else "before the first step"
        assert words[0] == f"Your ring_all_reduce on {p} ranks, {when}"
        links = [f"chunk {message.chunk}\n{1000 * step:,} bytes" for message in sent] or ["0 bytes"] * p
        assert [word for word in words if word.endswith(" bytes") and not word.startswith("tensor")] == links
        assert {f"step {step} of {2 * (p - 1)}", f"tensor: {1000 * p:,} bytes"} <= set(words)
        phase = "each rank has its own tensor" if not step else "chunks are summed" if step < p else None
        assert (phase or "finished chunks are copied") in words
        drawn = [text for text in picture.axes[0].texts if text.get_text().isdecimal()]
        bold = [text.get_text() for text in drawn if text.get_weight() == "bold"]
        assert bold == [str(message.chunk) for message in sorted(sent, key=lambda message: message.target)]


def angle(center: tuple[float, float], point: tuple[float, float]) -> float:
    return math.atan2(point[1] - center[1], point[0] - center[0])


@pytest.mark.parametrize(("p", "left"), [(3, False), (4, True)])
def test_a_message_is_between_its_ranks_and_its_arrow_leads_from_the_sender_to_the_receiver(p, left):
    run = made_up(p, left=left)
    picture = viz.ring_run(run)[2]
    arrows = [patch for patch in picture.axes[0].patches if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) == p
    at = {rank: places(picture)[f"rank {rank}"][0] for rank in range(p)}
    center = places(picture)[f"step 2 of {2 * (p - 1)}"][0]
    for message, slot, arrow in zip(run.messages[1], slots(picture, p), arrows, strict=False):
        tail, head = arrow._posA_posB
        for point in ((slot.x, slot.y), tail, head):
            by_distance = sorted(at, key=lambda rank: math.dist(point, (at[rank][0], at[rank][1] + 0.39)))
            assert set(by_distance[:2]) == {message.source, message.target}  # a rank's name is on top of it
        clockwise = math.remainder(angle(center, head) - angle(center, tail), 2 * math.pi) > 0
        assert clockwise == ((message.target - message.source) % p == 1)


def test_a_picture_says_whose_ring_it_is_and_why_and_describes_what_moved():
    frames = viz.ring_run(made_up(3, "tplab's ring_all_reduce", NOTE))
    assert texts(frames[1])[:2] == ["tplab's ring_all_reduce on 3 ranks, after step 1 of 4", NOTE]
    assert frames[1].description.startswith(NOTE)
    frames = viz.ring_run(made_up(3))
    assert frames[0].description == "No rank has a complete chunk. Each link has carried 0 bytes so far."
    for part in (
        "rank 1 sent chunk 1, summed over ranks 0, 1, 2, to rank 2",
        "rank 0 has the complete chunks 0, 2; rank 1 has the complete chunks 0, 1",
        "3,000 bytes",
    ):
        assert part in frames[3].description
    assert "rank 0 sent chunk 2, summed over rank 0, to rank 1" in frames[1].description
