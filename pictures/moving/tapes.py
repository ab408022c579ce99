"""Draws pictures/moving/tapes.svg: the random numbers of two ranks as tapes, of which dropout reads a piece at a time.

All masks come from a real tracker on two real ranks, also those of the second run, with torch's own checkpointing and
with that of chapter 09.
"""

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pictures.drawing import BACKWARD, SMALL, box, placed, text
from pictures.moving.animation import SECONDS, Lanes, Movie
from tplab import device, launch
from tplab.tensor.rng import checkpoint, seed_all
from tplab.viz.colors import GOLD, INK, rank_color

PIECE, PIECES = 4, 4  # elements of a mask, and masks that a tape shows
STREAMS = ("torch's own", "replicated", "sharded")
RANKS = (0, 1)
SEED = 6

CELL, TALL = 19, 18
TAPE, FIRST, SECOND, AGAIN = 122, 452, 552, 660  # the left ends of a tape and of the masks
LANES, ROW = Lanes(78, 142, 12), 40  # ROW: from one tape to the next
HEIGHT = LANES.bottom(1) + 8
GRAY = "#8A8A8A"
TOLD = (
    (0.0, 1.1, "The gray random numbers are the same on both ranks. The colored ones aren't."),
    (1.2, 2.5, "Dropout inside the MLP draws from “sharded”, so each rank drops its own elements."),
    (2.6, 3.9, "Dropout after g draws from “replicated”, so both ranks drop the same elements."),
    (4.0, 4.9, "Rank 0 draws an extra number. Only torch's default generator advances."),
    (5.0, 7.1, "In step 2, both streams continue where they stopped. (We'll need the flags later.)"),
    (7.2, 8.9, "Torch's checkpointing recomputes step 2 with new random numbers, so the masks are wrong!"),
    (9.1, SECONDS, "Yours returns to the flags first, so the recomputation drops the same elements."),
)


def run() -> dict:
    """Draw masks for two steps, and run the second step again, in two ways. Return all masks of this rank."""

    def mask() -> torch.Tensor:
        return F.dropout(torch.ones(PIECE, device=device()), 0.5) > 0

    def step(x: torch.Tensor) -> torch.Tensor:
        for name in ("sharded", "replicated"):
            with tracker.fork(name):
                runs[-1][name] = mask()
        return (x**2).sum()

    def twice(how) -> list[dict]:
        nonlocal tracker, runs
        tracker, runs = seed_all(SEED), [{}]
        x = torch.ones(2, device=device(), requires_grad=True)
        step(x)  # the first step
        runs.append({})
        loss = how(step, x)  # the second step
        runs.append({})
        loss.backward()  # runs it again
        return runs

    tracker, runs = seed_all(SEED), [{}]
    tapes = {"torch's own": [mask() for _ in range(PIECES)]}
    for name in ("replicated", "sharded"):
        with tracker.fork(name):
            tapes[name] = [mask() for _ in range(PIECES)]
    torchs = twice(lambda function, x: torch_checkpoint(function, x, use_reentrant=False))
    ours = twice(lambda function, x: checkpoint(function, x, tracker=tracker))
    return {"tapes": tapes, "torch's": torchs, "ours": ours}


def movie() -> Movie:
    ranks = launch(run, len(RANKS))
    made = Movie(HEIGHT, "Random streams on each of two ranks")
    for left, name in ((FIRST, "step 1"), (SECOND, "step 2"), (AGAIN, "step 2 again")):
        made.draw(text(left + PIECE * CELL / 2, LANES.first - 12, name, size=SMALL, anchor="middle", bold=True))
    for rank in RANKS:
        _lane(made, rank, ranks[rank])
    made.tell(TOLD, 24, top=LANES.first - 30)
    return made


def _cells(mask, color: str, marked=None, mark: str = INK) -> str:
    """Draw a mask. Elements that are kept are filled, and those in `marked` get a thick edge."""
    drawn = ""
    for index, keeps in enumerate(mask.tolist()):
        edge, stroke = (mark, 3) if marked is not None and marked[index] else (GRAY, 1)
        drawn += box(index * CELL, 0, CELL - 2, TALL, color if keeps else "#FFFFFF", edge, stroke, radius=2)
    return drawn


def _lane(made: Movie, rank: int, seen: dict) -> None:
    top = LANES.top(rank)
    made.lane(rank, LANES, label=(18, 17))
    for row, name in enumerate(STREAMS):
        y = top + 28 + row * ROW
        color = rank_color(rank) if name == "sharded" else GRAY
        made.draw(text(TAPE - 8, y + 14, name, size=SMALL, anchor="end"))
        for number, piece in enumerate(seen["tapes"][name]):
            made.draw(placed(_cells(piece, color), TAPE + number * PIECE * CELL, y))
        _head(made, rank, name, y)
    for row, name, start in ((2, "sharded", 1.2), (1, "replicated", 2.6)):
        y = top + 28 + row * ROW
        color = rank_color(rank) if name == "sharded" else GRAY
        first, second, again = (each[name] for each in seen["torch's"])
        ours = seen["ours"][2][name]
        for drawn, read in zip((first, second, again, ours), (0, 1, 2, 1), strict=True):
            assert torch.equal(drawn, seen["tapes"][name][read])
        _stamp(made, first, color, y, 0, FIRST, start)
        _stamp(made, second, color, y, 1, SECOND, start + 4.0 - (name == "replicated") * 0.8)
        wrong = _stamp(made, again, color, y, 2, AGAIN, 7.4, again != second, BACKWARD)
        wrong.hide(9.0)
        _stamp(made, ours, color, y, 1, AGAIN, 9.9, torch.ones(PIECE), GOLD)
        flag = box(0, -9, 2, TALL + 12, GOLD, stroke=0, radius=0) + box(2, -9, 9, 7, GOLD, stroke=0, radius=0)
        made.piece(flag, TAPE + PIECE * CELL - 3, y).show(4.9)


def _head(made: Movie, rank: int, name: str, y: float) -> None:
    """Draw the read head below a tape, at the left end of what it reads next."""
    triangle = f'<path d="M0,0L6,9L-6,9z" fill="{INK}"/>'
    head = made.piece(triangle, TAPE - 1, y + TALL + 1).show(0.0)
    place = [TAPE - 1 + number * PIECE * CELL for number in range(PIECES)]
    if name == "torch's own":
        if rank == 0:
            head.move(4.1, 4.5, TAPE - 1 + CELL)
        return
    first, second = (1.2, 5.2) if name == "sharded" else (2.6, 5.8)
    head.move(first, first + 0.5, place[1]).move(second, second + 0.5, place[2])
    head.move(7.4, 7.9, place[3]).move(9.2, 9.7, place[1]).move(9.9, 10.4, place[2])


def _stamp(made: Movie, mask, color: str, y: float, piece: int, to: float, at: float, marked=None, mark: str = INK):
    """Copy a piece of a tape to its place among the masks."""
    copy = made.piece(_cells(mask, color), TAPE + piece * PIECE * CELL, y).fade(at, 1, 0.05)
    copy.move(at + 0.1, at + 0.9, to).fade(at + 0.95, 0, 0.05)
    return made.piece(_cells(mask, color, marked, mark), to, y).fade(at + 0.9, 1, 0.05)
