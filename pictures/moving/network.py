"""Draws pictures/moving/network.svg, a still: the network with which chapter 03 begins.

Each rank multiplies the same x by its own weight, and both compute the loss from the sum of the two terms.
"""

from pictures.drawing import FORWARD, SMALL, arrow, box, card, rank_tint, text
from pictures.moving.animation import Lanes, Movie
from tplab.viz.colors import INK, NOBODY

TALL, WIDE = 44, 132
LANES = Lanes(first=44, height=TALL, gap=26)
HEIGHT = LANES.bottom(1) + 20
TERMS = ("z₀ = a₀ · x", "z₁ = a₁ · x")
X, TERM, SUM, LOSS = 18, 180, 420, 610  # left edges of the boxes


def movie() -> Movie:
    made = Movie(
        HEIGHT, "The smallest network that goes wrong",
        "Both ranks start with the same x. Rank 0 computes z₀ = a₀ · x, and rank 1 computes z₁ = a₁ · x. "
        "An all-reduce adds the two terms, so both ranks get z = z₀ + z₁ and the loss L = z²/2.",
    )  # fmt: skip
    middle = LANES.between()
    made.draw(_shared(X, 70, "x"))
    for rank, term in enumerate(TERMS):
        top, center = LANES.top(rank), LANES.top(rank) + TALL / 2
        made.draw(arrow(X + 70, middle, TERM - 4, center, INK, 1.6))
        made.draw(box(TERM, top, WIDE, TALL, rank_tint(rank, 0.4), INK, 1.2))
        made.draw(text(TERM + WIDE / 2, center + 5, term, anchor="middle", bold=True))
        made.draw(arrow(TERM + WIDE, center, SUM - 4, middle, FORWARD, 1.6))
        outside = LANES.top(0) - 8 if rank == 0 else LANES.bottom(1) + 16
        made.draw(text(TERM + WIDE / 2, outside, f"rank {rank}", size=SMALL, anchor="middle"))
    made.draw(text((TERM + WIDE + SUM) / 2 + 8, LANES.top(0) + 4, "all-reduce", size=SMALL, color=FORWARD))
    made.draw(_shared(SUM, WIDE, "z = z₀ + z₁"))
    made.draw(arrow(SUM + WIDE, middle, LOSS - 4, middle, INK, 1.6))
    made.draw(_shared(LOSS, WIDE, "L = z²/2"))
    made.draw(text(LOSS + WIDE, LANES.bottom(1) + 16, "gray: the same on both ranks", size=SMALL, anchor="end"))
    return made


def _shared(x: float, width: float, said: str) -> str:
    """A box for a tensor that is the same on both ranks."""
    return card(x, LANES.between() - TALL / 2, width, TALL, said, NOBODY, INK, 1.2, bold=True)
