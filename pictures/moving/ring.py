"""Draws pictures/moving/ring.svg: an all-reduce around a ring of four ranks, and beside it a star that does the same.

Four real ranks run the course's own ring, and `record_ring` tells what they send, as for the pictures in chapter 01.
In the star, every other rank sends its tensor to rank 0 and gets the sum back, which is not run.
Every rank begins with its own chunk, so it finishes its right-hand neighbor's. Exercise 1.2 asks for the other order,
so the movie doesn't give it away.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from pictures.drawing import BACKWARD, SMALL, box, card, line, rank_tint, text
from pictures.moving.animation import SECONDS, Movie
from tplab.collectives import record_ring, reduce_scatter_steps, ring_all_gather
from tplab.collectives.ring_run import Message
from tplab.viz.colors import FAINT, GOLD, INK, rank_color

P, ELEMENTS = 4, 1000  # float32, so a tensor has 4,000 bytes
START, STEP = 1.2, 1.25  # seconds: when the first step begins, and how long a step takes

CENTER, ACROSS, DOWN = (236, 236), 146, 128  # of the ring, and how far from it the ranks stand
SLOT_WIDTH, SLOT_HEIGHT, GAP = 34, 40, 3
HUB, HEIGHT = (612, 212), 440
GLOW = BACKWARD  # the red of the overloaded link


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Sum x around the ring. Each rank starts with its own chunk."""
    *_, (_, finished) = reduce_scatter_steps(x, offset=1)  # rank r's is chunk r + 1
    return ring_all_gather(finished).roll(len(finished), dims=0)


def movie() -> Movie:
    run = record_ring(all_reduce, P)
    assert not run.note, run.note
    link, tensor = sum(step[0].bytes for step in run.messages), run.size
    assert tensor == 4 * ELEMENTS
    made = Movie(HEIGHT, "Ring all-reduce on four ranks")
    _ring(made, run.messages)
    _steps(made, run.messages)
    _star(made, tensor)
    _tell(made, link / tensor, tensor)
    return made


def _begin(step: int) -> float:
    """When a step begins, counted from 1."""
    return START + (step - 1) * STEP


def _place(rank: int, chunk: int) -> tuple[float, float]:
    """The top left corner of a slot. Rank 0 is at the top, and the others follow clockwise."""
    across, down = ((0, -1), (1, 0), (0, 1), (-1, 0))[rank]
    left = CENTER[0] + across * ACROSS - (P * SLOT_WIDTH + (P - 1) * GAP) / 2
    return left + chunk * (SLOT_WIDTH + GAP), CENTER[1] + down * DOWN - SLOT_HEIGHT / 2


def _slot(ranks: frozenset[int]) -> str:
    """Draw a chunk: a stripe for each rank in the sum, and a gold frame around the complete sum."""
    high = SLOT_HEIGHT / P
    stripes = [box(0, rank * high, SLOT_WIDTH, high, rank_tint(rank, 0.75), INK, 0, 0) for rank in sorted(ranks)]
    edge, stroke = (GOLD, 5) if len(ranks) == P else (INK, 1)
    paper = box(0, 0, SLOT_WIDTH, SLOT_HEIGHT, "#FFFFFF", stroke=0, radius=0)
    return paper + "".join(stripes) + box(0, 0, SLOT_WIDTH, SLOT_HEIGHT, "none", edge, stroke, radius=2)


def _ring(made: Movie, steps: Sequence[Sequence[Message]]) -> None:
    x, y = CENTER
    made.draw(f'<ellipse cx="{x}" cy="{y}" rx="{ACROSS}" ry="{DOWN}" fill="none" stroke="#C4C4C4" stroke-width="2"/>')
    for rank in range(P):
        left, top = _place(rank, 0)
        around = left - 5, top - 5, P * SLOT_WIDTH + (P - 1) * GAP + 10, SLOT_HEIGHT + 10
        made.draw(box(*around, "#FFFFFF", rank_color(rank), 2))
        below = top - 13 if rank == 0 else top + SLOT_HEIGHT + 22
        made.draw(text(left + (72, 116, 72, 28)[rank], below, f"rank {rank}", size=SMALL, anchor="middle", bold=True))
        # the link to the right-hand neighbor, with its direction and how much it has carried
        across, down = ((1, -1), (1, 1), (-1, 1), (-1, -1))[rank]
        at_x, at_y = x + across * ACROSS * 0.707, y + down * DOWN * 0.707
        turned = f"translate({at_x:.0f},{at_y:.0f}) rotate({(41, 139, 221, 319)[rank]})"
        made.draw(f'<path d="M8,0L-6,-7V7z" fill="{FAINT}" transform="{turned}"/>')
        carried = accumulate(step[rank].bytes for step in steps)
        counts = [(0.01, "0 bytes")] + [(_begin(step) + 0.8, f"{size:,} bytes") for step, size in enumerate(carried, 1)]
        anchor = "start" if across > 0 else "end"
        made.captions(at_x + across * 16, at_y + (2 if down < 0 else 12), counts, size=SMALL, anchor=anchor, bold=True)


def _steps(made: Movie, steps: Sequence[Sequence[Message]]) -> None:
    """Move the chunks. In the first half a chunk is added to the neighbor's, in the second half it is copied."""
    slots = {
        (rank, chunk): made.piece(_slot(frozenset({rank})), *_place(rank, chunk)).fade(0, 1)
        for rank in range(P)
        for chunk in range(P)
    }
    for step, messages in enumerate(steps, 1):
        begin, adding = _begin(step), step < P
        travelers = []
        for source, target, chunk, ranks, _ in messages:
            traveler = made.piece(_slot(ranks), *_place(source, chunk)).fade(begin, 1, 0.05)
            travelers.append(traveler.move(begin + 0.05, begin + 0.8, *_place(target, chunk)))
            if adding:
                slots[source, chunk].fade(begin, 0.15)
        for traveler, (_, target, chunk, ranks, _) in zip(travelers, messages, strict=True):
            if adding:
                traveler.fade(begin + 0.85, 0, 0.15)
                slots[target, chunk].fade(begin + 0.85, 0, 0.15)
                traveler = made.piece(_slot(ranks | {target}), *_place(target, chunk)).fade(begin + 0.8, 1, 0.15)
            slots[target, chunk] = traveler


def _star(made: Movie, tensor: int) -> None:
    """Draw a star. The link of rank 0 carries what all the others send and receive, which is a tensor each."""
    x, y = HUB
    begin = _begin(2 * P - 1) + 0.1
    places = [(x, y + 110), (x - 88, y - 84), (x, y - 108), (x + 88, y - 84)]
    drawn = [line(x, y, *place, FAINT, stroke) for place, stroke in zip(places, (12, 4, 4, 4), strict=True)]
    drawn.append(f'<circle cx="{x}" cy="{y}" r="9" fill="{INK}"/>')
    drawn.append(text(x, y - 158, "A star: rank 0 sums everything", size=SMALL, anchor="middle", bold=True))
    nodes = []
    for rank, (at_x, at_y) in enumerate(places):
        look = rank_tint(rank), rank_color(rank), 2
        nodes.append(card(at_x - 32, at_y - 15, 64, 30, f"rank {rank}", *look, size=SMALL, bold=True))
    for at_x, at_y, anchor in ((x - 58, y - 36, "end"), (x + 58, y - 36, "start")):
        for at, way in ((0, "out"), (16, "in")):
            drawn.append(text(at_x, at_y + at, f"{tensor:,} {way}", size=SMALL, anchor=anchor))
    made.piece("".join(drawn)).show(begin)
    halo = f'<path d="M{x},{y + 9}V{places[0][1]}" stroke="{GLOW}" stroke-width="34" stroke-linecap="round"/>'
    glowing = made.piece(halo)
    for pulse, opacity in enumerate((0.45, 0.1, 0.45, 0.1, 0.45)):
        glowing.fade(begin + 0.6 + 0.3 * pulse, opacity, 0.3)
    made.piece(line(x, y + 9, *places[0], GLOW, 14)).show(begin + 0.6)
    made.piece("".join(nodes)).show(begin)
    for at, way in ((50, "in"), (68, "out")):
        label = text(x + 21, y + at, f"{(P - 1) * tensor:,} bytes {way}", size=SMALL, color=GLOW, bold=True)
        made.piece(label).show(begin + 0.6)


def _tell(made: Movie, link: float, tensor: int) -> None:
    last = 2 * (P - 1)
    end = _begin(last + 1)
    told = [
        (0.01, f"Each rank has its own tensor of {tensor:,} bytes, in {P} chunks. Every rank wants the sum."),
        (START - 0.1, "Each rank sends one chunk to its right-hand neighbor, which adds its own values."),
        (_begin(P) - 0.25, "Now each rank has one finished chunk, in gold. The finished chunks are passed on."),
        (end, f"Each link carried {link:g} times the tensor. The red link: {P - 1} times in and {P - 1} times out."),
    ]
    made.captions(10, 28, told, bold=True)
    x, y = CENTER
    legend = "A chunk has a stripe for each rank in its sum, and a gold frame once all ranks are in."
    made.draw(text(10, HEIGHT - 8, legend, size=SMALL, color=FAINT))
    names = [(0.01, "")] + [(_begin(step), f"step {step} of {last}") for step in range(1, last + 1)]
    made.captions(x, y - 2, names, size=20, anchor="middle", bold=True)
    phases = [(0.01, ""), (START, "reduce-scatter: add"), (_begin(P), "all-gather: copy")]
    made.captions(x, y + 20, phases, size=SMALL, color=FAINT, anchor="middle")
    made.frame(START - 0.2, told[0][1], top=40)
    for step in range(1, last + 1):
        done = "chunk is added to the next rank's chunk" if step < P else "finished chunk is copied to the next rank"
        made.frame(_begin(step) + 1.0, f"Step {step} of {last}: each {done}.", top=40)
    made.frame(SECONDS, told[-1][1], top=40)
