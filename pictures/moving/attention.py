"""Draws pictures/moving/attention.svg: attention with four heads on two ranks, in both directions.

The weights in the squares and the message sizes come from a run of ParallelAttention on two real ranks.
"""

import torch
from torch import Tensor

from pictures.drawing import BACKWARD, FORWARD, SMALL, box, card, rank_tint, text, wires
from pictures.moving.animation import SECONDS, Lanes, Movie
from tplab import device, launch, record
from tplab.tensor import ParallelAttention
from tplab.viz.colors import FAINT, GOLD, INK, NOBODY, rank_color

TOKENS, HEADS = 3, 4  # each head has a single element, d = 1
RANKS = (0, 1)
HELD = HEADS // len(RANKS)

HEIGHT, LANES = 452, Lanes(62, 146, 34)  # the space between the two lanes stays empty for a long time
CELL = 15  # pixels per token, or per element of a token
FORWARD_ROW, BACKWARD_ROW = 64, 122  # below the top of a lane: the middle of the tiles that travel each way
BAR = 22  # the width of f and g
# The left ends of everything in a lane, from left to right
X, F, WEIGHT, STRIPS, SCORES, VALUES, OUT, PARTIAL, G, Z = 16, 88, 124, 210, 302, 428, 502, 580, 656, 692
CORE = STRIPS, VALUES + HELD * CELL  # what each head computes on its own, from left to right
TOLD = (
    (0.0, 0.8, "Both ranks have all of X, so f doesn't send anything."),
    (1.2, 1.85, "Each rank computes queries, keys, and values for its own two heads."),
    (1.9, 3.6, "Each head compares its queries with its keys."),
    (3.7, 4.25, "The scores become weights: the darker, the larger."),
    (4.3, None, "The heads' outputs y lie side by side."),
    (5.1, 6.65, "Each rank's rows of Wo give only a term of Z, and g adds the terms."),
    (6.7, 7.6, "Backward, dZ goes straight through g."),
    (7.7, 9.3, "Each rank gets a term of dX, and f adds the terms."),
    (9.4, SECONDS, "You've seen this before: it's the MLP, with something else in the middle."),
)


def run() -> dict:
    """Run attention forward and backward on this rank, and return the weights of its heads and what it sent."""
    torch.manual_seed(3)
    attention = ParallelAttention(HEADS, HEADS, bias=False, device=device())
    torch.manual_seed(4)
    x = (2 * torch.randn(1, TOKENS, HEADS, device=device())).requires_grad_()  # the same on both ranks
    with record() as forward:
        out = attention(x)
    with record() as backward:
        out.sum().backward()
    q, k, _ = attention.qkv(x.detach())  # [1, heads on this rank, s, 1] each
    return {
        "weights": (q @ k.transpose(2, 3)).softmax(-1)[0].detach(),  # [heads on this rank, s, s]
        "forward": {kind: total.bytes for kind, total in forward.totals().items()},
        "backward": {kind: total.bytes for kind, total in backward.totals().items()},
        "bytes of x": x.nbytes,
    }


def movie() -> Movie:
    ranks = launch(run, len(RANKS))
    size = ranks[0]["bytes of x"]
    assert ranks[0]["forward"] == ranks[0]["backward"] == {"all_reduce": size}
    made = Movie(HEIGHT, "Attention with four heads on two ranks")
    for rank in RANKS:
        _lane(made, rank)
    _bar(made, F, "f", (0.6, "no message"), (8.4, f"all-reduce, {size} bytes"))
    _bar(made, G, "g", (5.9, f"all-reduce, {size} bytes"), (6.9, "no message"))
    for rank in RANKS:
        _forward(made, rank, ranks[rank]["weights"])
        _backward(made, rank)
    made.count_messages((0.2, 5.9, 8.4))
    quiet = [(1.9, "no messages here")]
    made.captions(sum(CORE) / 2, LANES.between() + 5, quiet, anchor="middle", color=FAINT, bold=True)
    # In the end, the three parts get the names of those of the MLP in chapter 05, in the same outline
    parts = ((WEIGHT - 6, WEIGHT + 68, "A"), (CORE[0] - 8, CORE[1] + 8, "GELU"), (OUT - 6, OUT + 68, "B"))
    for left, right, name in parts:
        around = box(
            left, LANES.first - 4, right - left, LANES.bottom(1) + 8 - LANES.first, "none", GOLD, 3, dashed=True
        )
        label = text((left + right) / 2, LANES.first - 8, name, color="#8A6A00", anchor="middle", bold=True)
        made.piece(around + label).show(9.4)
    made.tell(TOLD, 22, top=LANES.first - 26)
    return made


def _head_color(rank: int, head: int) -> str:
    return rank_tint(rank, 0.3 + 0.4 * head)


def _tile(columns: float, name: str, color: str, fill: str, dashed: bool = False) -> str:
    """Draw a tensor with a row per token, its left edge at x = 0 and its middle at y = 0."""
    width, height = columns * CELL, TOKENS * CELL
    look = fill, color, 2, 2, dashed
    return card(0, -height / 2, width, height, name, *look, size=SMALL, color=color, bold=True)


def _lane(made: Movie, rank: int) -> None:
    y = LANES.top(rank)
    made.lane(rank, LANES)
    made.draw(*wires(X, Z + 50, y + FORWARD_ROW, y + BACKWARD_ROW))
    for left, name in ((WEIGHT, "Wqkv"), (OUT, "Wo")):
        made.draw(box(left, y + 26, 62, 112, "#FFFFFF", rank_color(rank), 2))
        made.draw(text(left + 31, y + 42, name, size=SMALL, anchor="middle", bold=True))
        for head in range(HELD):  # columns of the first weights, and rows of the last one
            at = (left + 13 + 18 * head, y + 52, 18, 36) if name == "Wqkv" else (left + 13, y + 52 + 18 * head, 36, 18)
            made.draw(box(*at, _head_color(rank, head), INK, 1, radius=0))


def _bar(made: Movie, x: float, name: str, forward: tuple[float, str], backward: tuple[float, str]) -> None:
    """Draw an operator across both lanes, and say what it sends each way from the given time on."""
    bar = x, LANES.top(0) + 22, BAR, LANES.bottom(1) - LANES.top(0) - 26
    made.draw(box(*bar), text(x + BAR / 2, LANES.first - 8, name, anchor="middle", bold=True))
    for (time, said), color, below in ((forward, FORWARD, 18), (backward, BACKWARD, 36)):
        label = text(x + BAR / 2, LANES.bottom(1) + below, said, size=SMALL, color=color, anchor="middle")
        made.piece(label).show(time)
        if said.startswith("all"):
            made.message(bar, LANES.between(), color, time)


def _forward(made: Movie, rank: int, weights: Tensor) -> None:
    y = LANES.top(rank) + FORWARD_ROW
    x = _tile(HEADS, "X", FORWARD, NOBODY)
    made.travel(x, y, X, 0.2)
    made.travel(x, y, X, 0.4, WEIGHT, 1.1, 1.1)
    for head in range(HELD):
        middle = y + (head - 0.5) * (TOKENS * CELL + 6)
        for place, name in enumerate("qkv"):  # a strip with one element per token
            strip = _tile(1, name, INK, _head_color(rank, head))
            made.travel(strip, middle, WEIGHT + 24, 1.2, STRIPS + place * 24 + 4, 1.7)
        _scores(made, middle - TOKENS * CELL / 2, weights[head], rank_color(rank))
        out = _tile(1, "y", INK, _head_color(rank, head))
        made.piece(out, SCORES + TOKENS * CELL, middle).show(4.3).move(4.4, 4.8, VALUES + head * CELL, y)
    made.travel(_tile(HELD, "", FORWARD, "none"), y, VALUES, 4.8)
    made.travel(_tile(HEADS, f"Z{'₀₁'[rank]}", FORWARD, rank_tint(rank, 0.3), True), y, OUT + 10, 5.1, PARTIAL, 5.5)
    made.travel(_tile(HEADS, "Z", FORWARD, NOBODY), y, G - 18, 6.1, Z, 6.6)


def _scores(made: Movie, top: float, weights: Tensor, color: str) -> None:
    """Draw the scores of a head, which appear row by row, and then become weights: the darker, the larger."""
    lefts = [SCORES + key * CELL for key in range(TOKENS)]
    for query in range(TOKENS):
        cells = [box(left, top + query * CELL, CELL, CELL, "#FFFFFF", INK, 1, 0) for left in lefts]
        made.piece("".join(cells)).show(1.9 + 0.6 * query)
    for query, row in enumerate(weights.tolist()):
        y, side = top + query * CELL + 1, CELL - 2
        cells = [box(left + 1, y, side, side, color, stroke=0, radius=0) for left in lefts]
        filled = [f'<g opacity="{weight:.2f}">{cell}</g>' for weight, cell in zip(row, cells, strict=True)]
        made.piece("".join(filled)).show(3.7)


def _backward(made: Movie, rank: int) -> None:
    y = LANES.top(rank) + BACKWARD_ROW
    dz = _tile(HEADS, "dZ", BACKWARD, NOBODY)
    made.travel(dz, y, Z, 6.7)
    made.travel(dz, y, Z, 6.8, OUT, 7.3, 7.3)
    around = CORE[0] - 6, LANES.top(rank) + 6, CORE[1] - CORE[0] + 12, LANES.height - 12
    made.piece(box(*around, "none", BACKWARD, 3)).show(7.3).hide(7.9)
    term = _tile(HEADS, f"dX{'₀₁'[rank]}", BACKWARD, rank_tint(rank, 0.3), True)
    made.travel(term, y, WEIGHT, 7.7, F - 30, 8.2, 8.4)
    made.travel(_tile(HEADS, "dX", BACKWARD, NOBODY), y, F - 30, 8.5, X, 9.0)
