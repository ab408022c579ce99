"""Draws pictures/moving/pause.svg: an all-reduce that takes a break between its two halves.

Which chunk each rank sends in which step, the bytes, and the tokens that a rank normalizes come from a run of the ring
of chapter 01 on four real ranks.
"""

from itertools import accumulate

import torch
from torch.nn import functional as F

from pictures.drawing import SMALL, arrow, box, card, text
from pictures.moving.animation import SECONDS, Lanes, Movie
from tplab import device, launch, record
from tplab.collectives.by_hand import all_gather_steps, reduce_scatter_steps
from tplab.viz.colors import FAINT, GOLD, INK, rank_color

P = TOKENS = 4
FEATURES = 256
RANKS = range(P)

HEIGHT, LANES = 376, Lanes(62, 66, 6)
CELL, CELL_GAP, CELL_HEIGHT = 72, 8, 40
CELLS, STAMPS, SAVED, UP = 80, 404, 564, 692  # left ends
SQUARE = 22
HALVES = (1.0, 7.2)  # when the steps of the two halves begin
STEP, MOVE = 0.75, 0.55
FINISHED, BREAK, UP_TIME, END = 3.3, 3.9, 9.6, 10.4
STAMPED = (4.5, 5.1, 5.7, 6.3)
TOLD = (
    (0.0, 0.9, "Each rank has one term of every token. A cell's colors show whose terms it contains."),
    (1.0, 2.4, "Reduce-scatter: each rank passes a sum on to the next rank, which adds its own term."),
    (3.3, 3.8, "After three steps, each token is complete on exactly one rank."),
    (3.9, 6.5, "Break! Each rank applies bias, dropout, residual, and norm to its own token only."),
    (6.6, 7.1, "So each rank saves one token for the backward pass instead of four."),
    (7.2, 8.6, "All-gather: each rank passes a complete token on to the next rank."),
    (9.6, SECONDS, "Now every rank has all the tokens for the next matmul."),
)


def run() -> dict:
    """Sum the ranks' terms, normalize, and return which chunks this rank had, what it sent, and what it normalized."""
    term = torch.randn(TOKENS, FEATURES, device=device())
    with record() as first:
        summed = list(reduce_scatter_steps(term))
    own = F.layer_norm(summed[-1][1], (FEATURES,))
    with record() as second:
        gathered = list(all_gather_steps(own))
    return {
        "normalized": len(own),
        "chunks": [[index for index, _ in half] for half in (summed, gathered)],  # at first, and after each step
        "sent": [sum(call.bytes for call in half if call.kind == "send") for half in (first, second)],
    }


def movie() -> Movie:
    ranks = launch(run, P)
    sent = ranks[0]["sent"]
    assert all(rank["sent"] == sent for rank in ranks)
    made = Movie(HEIGHT, "An all-reduce that takes a break")
    for rank in RANKS:
        made.lane(rank, LANES, label=(18, LANES.height / 2 + 5))
        up = card(UP, -24, 54, 48, "up", "#FFFFFF", rank_color(rank), 2, bold=True)
        made.piece(up, 0, _middle(rank)).fade(0, 0.35).fade(UP_TIME, 1)
    _reduce_scatter(made, [rank["chunks"][0] for rank in ranks])
    _break(made, ranks[0]["normalized"])
    _all_gather(made, [rank["chunks"][1] for rank in ranks])
    made.tell(TOLD, 22, top=LANES.first - 26)
    times = [0.0] + [start + step * STEP + MOVE for start in HALVES for step in range(P - 1)]
    counts = accumulate([0] + [size // (P - 1) for size in sent for _ in range(P - 1)])
    told = [(time, f"sent by each rank: {count:,} bytes") for time, count in zip(times, counts, strict=True)]
    made.captions(18, LANES.top(P) + 18, told, bold=True)
    same = f"without a break: {sum(sent):,} bytes, and {TOKENS} tokens to save"
    made.piece(text(made.width - 12, LANES.top(P) + 18, same, color=FAINT, anchor="end", bold=True)).show(END)
    return made


def _middle(rank: int) -> float:
    return LANES.top(rank) + LANES.height / 2


def _left(token: int) -> float:
    return CELLS + token * (CELL + CELL_GAP)


def _cell(ranks: frozenset[int], edge: str = INK) -> str:
    """Draw a token's sum over some of the ranks, a stripe for each. Its left end is at x = 0, its middle at y = 0."""
    top, wide = -CELL_HEIGHT / 2, CELL / P
    stripes = [box(rank * wide, top, wide, CELL_HEIGHT, rank_color(rank), INK, 0, 0) for rank in sorted(ranks)]
    around = box(0, top, CELL, CELL_HEIGHT, "none", edge, 1.5, 0)
    return box(0, top, CELL, CELL_HEIGHT, stroke=0, radius=0) + "".join(stripes) + around


def _done(token: int) -> str:
    return card(0, -CELL_HEIGHT / 2, CELL, CELL_HEIGHT, f"token {token}", GOLD, INK, 1.5, 0, size=SMALL, bold=True)


def _reduce_scatter(made: Movie, chunks: list[list[int]]) -> None:
    """Draw the terms, and in each step the sums that travel to the next rank. `chunks`: of each rank, in each step."""
    sums = {(rank, token): frozenset({rank}) for rank in RANKS for token in range(TOKENS)}
    shown = {place: made.piece(_cell(ranks), _left(place[1]), _middle(place[0])) for place, ranks in sums.items()}
    for piece in shown.values():
        piece.show(0.2)
    for step in range(P - 1):
        start = HALVES[0] + step * STEP
        arrived = {}
        for rank in RANKS:
            token, target = chunks[rank][step], (rank + 1) % P
            assert chunks[target][step + 1] == token
            moving = made.piece(_cell(sums[rank, token], GOLD), _left(token), _middle(rank))
            moving.show(start).move(start + 0.05, start + MOVE, _left(token), _middle(target)).hide(start + MOVE)
            shown[rank, token].fade(start, 0.25)
            arrived[target, token] = sums[rank, token] | {target}
        for place, ranks in arrived.items():
            sums[place] = ranks
            shown[place].hide(start + MOVE)
            shown[place] = made.piece(_cell(ranks), _left(place[1]), _middle(place[0])).show(start + MOVE)
    for (rank, token), piece in shown.items():
        piece.hide(BREAK if token != rank else FINISHED + 0.2)
        assert token != rank or len(sums[rank, token]) == P
    for rank in RANKS:
        made.piece(_done(rank), _left(rank), _middle(rank)).show(FINISHED)


def _break(made: Movie, kept: int) -> None:
    made.draw(text(STAMPS, LANES.first - 10, "on its own token", size=SMALL, color=FAINT))
    made.draw(text(SAVED, LANES.first - 10, "saved for backward", size=SMALL, color=FAINT))
    for rank in RANKS:
        for number, (name, time) in enumerate(zip(("bias", "dropout", "+ x", "norm"), STAMPED, strict=True)):
            at = number % 2 * 70, number // 2 * 26 - 26
            stamp = card(*at, 66, 22, name, "#FFFFFF", GOLD, 2, 3, size=SMALL, bold=True)
            made.piece(stamp, STAMPS, _middle(rank)).show(time)
        for square in range(TOKENS):
            drawn = box(0, -SQUARE / 2, SQUARE, SQUARE, rank_color(rank), INK, 1, radius=0)
            piece = made.piece(drawn, SAVED + square * (SQUARE + 4), _middle(rank)).show(0.2)
            if square >= kept:
                piece.fade(STAMPED[-1] + 0.3, 0.12)


def _all_gather(made: Movie, chunks: list[list[int]]) -> None:
    for step in range(P - 1):
        start = HALVES[1] + step * STEP
        for rank in RANKS:
            token, target = chunks[rank][step], (rank + 1) % P
            assert chunks[target][step + 1] == token
            moving = made.piece(_done(token), _left(token), _middle(rank))
            moving.show(start).move(start + 0.05, start + MOVE, _left(token), _middle(target)).hide(start + MOVE + 0.2)
            made.piece(_done(token), _left(token), _middle(target)).show(start + MOVE)
    for rank in RANKS:
        there = arrow(SAVED + 4 * (SQUARE + 4) + 4, _middle(rank), UP - 6, _middle(rank), GOLD, 3, 7)
        made.piece(there).show(UP_TIME)
