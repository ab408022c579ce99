"""Draws pictures/moving/layers.svg: a column-parallel and a row-parallel layer on two ranks, in both directions.

With `joined=True`, the layers are pushed together in the end (joined.svg).

Shapes, collectives and message sizes come from runs of ColumnParallelLinear and RowParallelLinear on two real ranks.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pictures.drawing import BACKWARD, FORWARD, SMALL, box, card, line, rank_tint, text, wires
from pictures.moving.animation import SECONDS, Lanes, Movie, Piece
from tplab import device, launch, record
from tplab.tensor import ColumnParallelLinear, RowParallelLinear
from tplab.viz.colors import FAINT, INK, NOBODY, rank_color

TOKENS, HIDDEN, INNER = 4, 4, 8
RANKS = (0, 1)
# The pieces move as in the picture that ends with the joining. Without the joining, these times become those below,
# so that there is time to read each of the four captions
JOINED, APART = (0, 2.9, 5.4, 7.1, 9), (0, 3, 6, 9, SECONDS)
TOLD = (
    "Column-parallel, forward: each rank computes a slice of Y, and gather collects the slices.",
    "Column-parallel, backward: each rank gets a term of dX, and f adds the terms.",
    "Row-parallel, forward: each rank computes a term of Z, and g adds the terms.",
    "Row-parallel, backward: each rank gets a slice of dY, and scatter collects the slices.",
)
STILLS = {
    1.65: "Each rank multiplies X by its columns of A and gets a slice of Y.",
    2.85: "Gather sends the slices around, so that every rank has all of Y.",
    4.1: "Backward, each rank takes its slice of dY. Nothing is sent.",
    4.75: "Each rank gets only a term of dX.",
    5.35: "f adds the terms with an all-reduce, so that both ranks get dX.",
    6.6: "Row-parallel: each rank multiplies its slice of Y by its rows of B and gets a term of Z.",
    7.05: "g adds the terms with an all-reduce, so that both ranks get Z.",
    8.75: "Backward, each rank gets a slice of dY, and scatter collects the slices.",
}
LEGEND = "gray: same on both ranks", "rank color: own slice", "dashed: term of a sum", "thick arrow: large message"

UNIT = 8  # pixels per element
HEIGHT, TITLES, LANES = 430, 54, Lanes(90, 124, 8)  # TITLES: the baseline of the layers' names
FORWARD_ROW, BACKWARD_ROW = 50, 96  # below the top of a lane: where tiles travel forward and backward
BAR = 22  # the width of f, gather, scatter and g

# The left ends of everything in a lane, from left to right. The row-parallel layer mirrors the column-parallel one
X, F, A, Y_SHARD, GATHER, Y = 14, 68, 104, 192, 250, 296
MIRROR = 2 * 380


def pass_both_ways(model: nn.Module, features: int) -> dict:
    """Return the messages of both passes (kind of collective -> bytes), and the shape of the (first) weight's shard."""
    x = torch.randn(TOKENS, features, device=device(), requires_grad=True)
    with record() as forward:
        y = model(x)
    with record() as backward:
        y.backward(torch.ones_like(y))
    sent = {"forward": forward, "backward": backward}
    seen = {way: {kind: total.bytes for kind, total in section.totals().items()} for way, section in sent.items()}
    return seen | {"weight": list(next(model.parameters()).shape)}


def run() -> dict[str, dict]:
    """Run on each rank: both layers on their own, and then one right after the other."""
    torch.manual_seed(dist.get_rank())
    options = {"bias": False, "device": device()}
    column, row = ColumnParallelLinear(HIDDEN, INNER, **options), RowParallelLinear(INNER, HIDDEN, **options)
    return {
        "column": pass_both_ways(ColumnParallelLinear(HIDDEN, INNER, gather_output=True, **options), HIDDEN),
        "row": pass_both_ways(RowParallelLinear(INNER, HIDDEN, input_is_parallel=False, **options), INNER),
        "joined": pass_both_ways(nn.Sequential(column, row), HIDDEN),
    }


BARS = (  # of the column-parallel layer, and of its mirror image: name, times forward and backward, and what it sends
    (F, ("f", 1.0, 4.85, "backward"), ("g", 6.7, 7.5, "forward")),
    (GATHER, ("gather", 2.1, 3.6, "forward"), ("scatter", 5.9, 8.2, "backward")),
)
TRIPS = (  # from and to, and for both layers: the tile, and when it appears, arrives and vanishes. # is a rank's number
    (X, X, ("X", 0.2), ("dZ", 7.1)),
    (X, A + 16, ("X", 0.4, 1.0, 1.0), ("dZ", 7.2, 7.6, 7.6)),
    (A + 16, Y_SHARD, ("Y#", 1.1, 1.6), ("dY#", 7.6, 7.9)),
    (Y_SHARD, GATHER - 5, ("Y#", 1.7, 2.1, 2.1), ("dY#", 7.9, 8.2, 8.2)),
    (GATHER - 5, Y, ("Y", 2.3, 2.8), ("dY", 8.3, 8.6)),
    (Y, Y, ("dY", 3.0), ("Y", 5.4)),
    (GATHER - 5, Y_SHARD, ("dY#", 3.2, 3.6), ("Y#", 5.5, 5.9)),
    (Y_SHARD, A + 16, ("dY#", 3.7, 4.1, 4.1), ("Y#", 5.9, 6.2, 6.2)),
    (A + 16, F - 5, ("dX#", 4.2, 4.6, 4.8), ("Z#", 6.2, 6.5, 6.65)),
    (F - 5, X, ("dX", 4.9, 5.3), ("Z", 6.7, 7.0)),
)


@dataclass
class Layer:
    """The pieces of one layer: those that stay when the layers are joined, and those in the middle, which fade."""

    stays: list[Piece] = field(default_factory=list)
    fades: list[Piece] = field(default_factory=list)


def movie(joined: bool = False) -> Movie:
    seen = launch(run, len(RANKS))[0]
    assert [seen[name]["weight"] for name in ("column", "row")] == [[INNER // 2, HIDDEN], [HIDDEN, INNER // 2]]
    made = Movie(HEIGHT, "A column-parallel and a row-parallel layer")
    for rank in RANKS:
        made.lane(rank, LANES, label=(15, 18), strength=0.16)
    made.draw(text(made.width / 2, HEIGHT - 10, "   ·   ".join(LEGEND), size=SMALL, color=FAINT, anchor="middle"))
    layers = [_layer(made, seen[name], row) for row, name in enumerate(("column", "row"))]
    if joined:
        sizes = [sum(size for way in ("forward", "backward") for size in one[way].values()) for one in seen.values()]
        _join(made, *layers, before=sum(sizes[:2]), after=sizes[2])
    else:
        _separate(made)
    return made


def _layer(made: Movie, seen: dict, row: int) -> Layer:
    """Draw the column-parallel layer from 0.2 s on, or its mirror image, the row-parallel layer, from 5.4 s on."""

    def place(left: float, width: float = 0) -> float:
        return MIRROR - left - width if row else left

    there = Layer()
    for rank in RANKS:
        there.stays += made.draw(_wires(rank, place(X + 16), place(Y_SHARD + 16)), _weight(rank, place(A, 64), row))
        there.fades += made.draw(_wires(rank, place(Y_SHARD + 16), place(Y + 32)))
    for left, *layers in BARS:
        name, *times, sends = layers[row]
        sent = [seen[way] if way == sends else {} for way in ("forward", "backward")]
        bar = _bar(made, place(left, BAR), name, *zip(times, sent, strict=True))
        (there.stays if left == F else there.fades).extend(bar)
    for rank in RANKS:
        for start, end, *tiles in TRIPS:
            name, shown, arrives, until = (*tiles[row], 0, 0)[:4]
            width, y, drawn = _tile(rank, name)
            piece = made.travel(drawn, y, place(start, width), shown, place(end, width), arrives, until)
            if not until:
                (there.fades if name in ("Y", "dY") else there.stays).append(piece)
    return there


def _wires(rank: int, left: float, right: float) -> str:
    return "".join(wires(left, right, LANES.top(rank) + FORWARD_ROW, LANES.top(rank) + BACKWARD_ROW))


def _tile(rank: int, name: str) -> tuple[float, float, str]:
    """Draw an activation or gradient with TOKENS rows, and return its width, its middle's y, and what was drawn."""
    tensor, own = name.strip("d#"), name.endswith("#")
    color, row = (BACKWARD, BACKWARD_ROW) if name.startswith("d") else (FORWARD, FORWARD_ROW)
    width = UNIT * (HIDDEN if tensor != "Y" else INNER // 2 if own else INNER)
    look = rank_tint(rank) if own else NOBODY, color, 2.5, 3, own and tensor != "Y"
    said = name.replace("#", "₀₁"[rank])
    drawn = card(0, -16, width, 32, said, *look, size=SMALL, color=color, bold=True)
    return width, LANES.top(rank) + row, drawn


def _weight(rank: int, left: float, row: int) -> str:
    """Draw a full weight with this rank's half filled: its columns, or in the row-parallel layer its rows."""
    y, name = LANES.top(rank), "AB"[row] + "₀₁"[rank]
    wide, high = (32, 64) if row else (64, 32)
    x, top = left + (64 - wide) / 2, y + 80 - high / 2
    half = (x, top + rank * high / 2, wide, high / 2) if row else (x + rank * wide / 2, top, wide / 2, high)
    drawn = box(left - 4, y + 26, 72, 92, "#FFFFFF", rank_color(rank), 2)
    drawn += text(left + 32, y + 42, name, size=SMALL, anchor="middle", bold=True)
    return drawn + box(x, top, wide, high, "none", FAINT, 1, 0) + box(*half, rank_tint(rank, 0.6), INK, 1.5, 0)


def _bar(
    made: Movie, x: float, name: str, forward: tuple[float, dict[str, int]], backward: tuple[float, dict[str, int]]
) -> list[Piece]:
    """Draw an operator across both lanes, and what it sends each way from the given time on."""
    bar = x, LANES.top(0) + 26, BAR, LANES.bottom(1) - LANES.top(0) - 32
    pieces = made.draw(box(*bar), text(x + BAR / 2, LANES.first - 8, name, anchor="middle", bold=True))
    for (time, collectives), color, below in ((forward, FORWARD, 22), (backward, BACKWARD, 42)):
        said = "no message"
        for kind, size in collectives.items():  # at most one
            said, stroke = f"{kind.replace('_', '-')}, {size} bytes", size / 16
            pieces.append(made.message(bar, LANES.between(), color, time, 2, 30, stroke, 4 + stroke / 2))
        label = text(x + BAR / 2, LANES.bottom(1) + below, said, size=SMALL, color=color, anchor="middle")
        pieces.append(made.piece(label).show(time))
    return pieces


def _join(made: Movie, left: Layer, right: Layer, before: int, after: int) -> None:
    """Fade what stands between the two layers, and push them together until both slices of Y are the same one."""
    shift = MIRROR / 2 - Y_SHARD - 16
    for piece in left.fades + right.fades:
        piece.fade(9.0, 0, 0.5)
    for layer, way in ((left, shift), (right, -shift)):
        for piece in layer.stays:
            piece.move(9.6, 10.4, piece.places[-1][1] + way)
    told = [
        *zip((0, 2.9), TOLD, strict=False),
        (5.4, "Row-parallel: g adds the terms of Z, and scatter collects the slices of dY."),
        (8.8, f"Gather and scatter undo each other. Without them, {before} message bytes become {after}."),
    ]
    made.captions(10, 30, told, bold=True)
    made.description = (
        f"{' '.join(STILLS.values())} But gather and scatter undo each other. Each rank already has the slice that B "
        f"needs. What is left is one all-reduce each way: {after} message bytes instead of {before}."
    )


def _separate(made: Movie) -> None:
    """Name the two layers and their options, draw a line between them, and change the times from JOINED to APART."""
    names = "ColumnParallelLinear, gather_output=True", "RowParallelLinear, input_is_parallel=False"
    for part, said in zip((1 / 4, 3 / 4), names, strict=True):
        made.draw(text(MIRROR * part, TITLES, said, size=SMALL, color=FAINT, anchor="middle"))
    made.draw(line(MIRROR / 2, TITLES - 12, MIRROR / 2, LANES.bottom(1) + 46))
    for piece in made.pieces:
        piece.opacities = [(_apart(time), value) for time, value in piece.opacities]
        piece.places = [(_apart(time), x, y) for time, x, y in piece.places]
    made.captions(10, 30, list(zip(APART, TOLD, strict=False)), bold=True)
    for time, said in STILLS.items():
        made.frame(_apart(time), said, top=TITLES - 14)


def _apart(time: float) -> float:
    """Return what a time becomes without the joining: JOINED is stretched to APART, piece by piece."""
    return float(np.interp(time, JOINED, APART))
