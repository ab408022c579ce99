"""Draws pictures/moving/layers.svg: a column-parallel and a row-parallel layer on two ranks, in both directions.

With `joined=True`, the layers are pushed together in the end (joined.svg).

Shapes, collectives and message sizes come from runs of ColumnParallelLinear and RowParallelLinear on two real ranks.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from pictures.drawing import BACKWARD, FORWARD, SMALL, box, line, rank_tint, text
from pictures.moving.animation import SECONDS, WIDTH, Lanes, Movie, Piece
from tplab import device, launch, record
from tplab.tensor import ColumnParallelLinear, RowParallelLinear
from tplab.viz.colors import FAINT, INK, NOBODY, rank_color

TOKENS, HIDDEN, INNER = 4, 4, 8
RANKS = (0, 1)
# The pieces move as in the picture that ends with the joining. Without the joining, these times become those below,
# so that there is time to read each of the four captions
JOINED, APART = (0, 2.9, 5.4, 7.1, 9), (0, 3, 6, 9, SECONDS)

UNIT = 8  # pixels per element
HEIGHT, TITLES, LANES = 430, 54, Lanes(90, 124, 8)  # TITLES: the baseline of the layers' names
FORWARD_ROW, BACKWARD_ROW = 50, 96  # below the top of a lane: where tiles travel forward and backward
BAR = 22  # the width of f, gather, scatter and g

# The left ends of everything in a lane, from left to right. The row-parallel layer mirrors the column-parallel one
X, F, A, Y_SHARD, GATHER, Y = 14, 68, 104, 192, 250, 296
MIRROR = 2 * 380


@dataclass
class Traffic:
    """What a layer, or both, sent in one forward and one backward pass, as the recorder saw it on rank 0."""

    forward: dict[str, int]  # kind of collective -> bytes
    backward: dict[str, int]
    weight: list[int]  # the shape of this rank's shard of the (first) weight


def pass_both_ways(model: nn.Module, features: int) -> Traffic:
    x = torch.randn(TOKENS, features, device=device(), requires_grad=True)
    with record() as forward:
        y = model(x)
    with record() as backward:
        y.backward(torch.ones_like(y))
    sections = ({kind: total.bytes for kind, total in section.totals().items()} for section in (forward, backward))
    return Traffic(*sections, list(next(model.parameters()).shape))


def run() -> dict[str, Traffic]:
    """Run on each rank: both layers on their own, and then one right after the other."""
    torch.manual_seed(dist.get_rank())
    options = {"bias": False, "device": device()}
    column, row = ColumnParallelLinear(HIDDEN, INNER, **options), RowParallelLinear(INNER, HIDDEN, **options)
    return {
        "column": pass_both_ways(ColumnParallelLinear(HIDDEN, INNER, gather_output=True, **options), HIDDEN),
        "row": pass_both_ways(RowParallelLinear(INNER, HIDDEN, input_is_parallel=False, **options), INNER),
        "joined": pass_both_ways(nn.Sequential(column, row), HIDDEN),
    }


def movie(joined: bool = False) -> Movie:
    traffic = launch(run, len(RANKS))[0]
    column, row, both = traffic["column"], traffic["row"], traffic["joined"]
    before = sum(sum(part.values()) for one in (column, row) for part in (one.forward, one.backward))
    after = sum(both.forward.values()) + sum(both.backward.values())
    made = Movie(HEIGHT, "A column-parallel and a row-parallel layer")
    _lanes(made)
    assert [one.weight for one in (column, row)] == [[INNER // 2, HIDDEN], [HIDDEN, INNER // 2]]  # torch's [out, in]
    left, right = _layer(made, column, row=False), _layer(made, row, row=True)
    if joined:
        _join(made, left, right)
    else:
        _separate(made)
    _tell(made, before, after, joined)
    return made


def _said(collectives: dict[str, int]) -> str:
    """Return something like "all-reduce, 64 bytes"."""
    ((kind, size),) = collectives.items()
    return f"{kind.replace('_', '-')}, {size} bytes"


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


def _layer(made: Movie, seen: Traffic, row: bool) -> Layer:
    """Draw the column-parallel layer from 0.2 s on, or its mirror image, the row-parallel layer, from 5.4 s on."""

    def place(left: float, width: float = 0) -> float:
        return MIRROR - left - width if row else left

    there = Layer()
    for rank in RANKS:
        there.stays.append(_wires(made, rank, place(X + 16), place(Y_SHARD + 16)))
        there.stays.append(_weight(made, rank, place(A, 64), "B" if row else "A", columns=not row))
        there.fades.append(_wires(made, rank, place(Y_SHARD + 16), place(Y + 32)))
    for left, *layers in BARS:
        name, *times, sends = layers[row]
        sent = [getattr(seen, way) if way == sends else {} for way in ("forward", "backward")]
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


def _lanes(made: Movie) -> None:
    for rank in RANKS:
        made.lane(rank, LANES, label=(15, 18), strength=0.16)
    told = "gray: same on both ranks", "rank color: own slice", "dashed: term of a sum", "thick arrow: large message"
    legend = "   ·   ".join(told)
    made.draw(text(WIDTH / 2, HEIGHT - 10, legend, size=SMALL, color=FAINT, anchor="middle"))


def _wires(made: Movie, rank: int, left: float, right: float) -> Piece:
    """Draw the two wires of a lane, an upper one for the way forward and a lower one for the way back."""
    upper, lower = LANES.top(rank) + FORWARD_ROW, LANES.top(rank) + BACKWARD_ROW
    return made.piece(line(left, upper, right, upper, "#B4B4B4") + line(left, lower, right, lower, "#DDB0AC")).fade(
        0, 1
    )


def _tile(rank: int, name: str) -> tuple[float, float, str]:
    """Draw an activation or gradient with TOKENS rows, and return its width, its middle's y, and what was drawn."""
    backward, tensor, own = name.startswith("d"), name.strip("d#"), name.endswith("#")
    color, row = (BACKWARD, BACKWARD_ROW) if backward else (FORWARD, FORWARD_ROW)
    width = UNIT * (HIDDEN if tensor != "Y" else INNER // 2 if own else INNER)
    drawn = box(0, -16, width, 32, rank_tint(rank) if own else NOBODY, color, 2.5, 3, dashed=own and tensor != "Y")
    said = name.replace("#", "₀₁"[rank])
    drawn += text(width / 2, 5, said, size=SMALL, color=color, anchor="middle", bold=True)
    return width, LANES.top(rank) + row, drawn


def _weight(made: Movie, rank: int, left: float, name: str, columns: bool) -> Piece:
    """Draw a full weight with this rank's half filled: its columns, or else its rows."""
    y = LANES.top(rank)
    wide, high = (64, 32) if columns else (32, 64)
    x, top = left + (64 - wide) / 2, y + 80 - high / 2
    half = (wide / 2, high) if columns else (wide, high / 2)
    at = (x + rank * half[0], top) if columns else (x, top + rank * half[1])
    drawn = box(left - 4, y + 26, 72, 92, "#FFFFFF", rank_color(rank), 2)
    drawn += text(left + 32, y + 42, f"{name}{'₀₁'[rank]}", size=SMALL, anchor="middle", bold=True)
    drawn += box(x, top, wide, high, "none", FAINT, 1, radius=0)
    drawn += box(*at, *half, rank_tint(rank, 0.6), INK, 1.5, radius=0)
    return made.piece(drawn).fade(0, 1)


def _bar(
    made: Movie, x: float, name: str, forward: tuple[float, dict[str, int]], backward: tuple[float, dict[str, int]]
) -> list[Piece]:
    """Draw an operator across both lanes, and what it sends each way from the given time on."""
    bar = x, LANES.top(0) + 26, BAR, LANES.bottom(1) - LANES.top(0) - 32
    pieces = [
        made.piece(box(*bar)).fade(0, 1),
        made.piece(text(x + BAR / 2, LANES.first - 8, name, anchor="middle", bold=True)).fade(0, 1),
    ]
    for (time, collectives), color, below in ((forward, FORWARD, 22), (backward, BACKWARD, 42)):
        if collectives:
            ((_, size),) = collectives.items()
            thickness = size / 16
            pieces.append(made.message(bar, LANES.between(), color, time, 2, 30, thickness, 4 + thickness / 2))
        said = _said(collectives) if collectives else "no message"
        label = text(x + BAR / 2, LANES.bottom(1) + below, said, size=SMALL, color=color, anchor="middle")
        pieces.append(made.piece(label).show(time))
    return pieces


def _join(made: Movie, left: Layer, right: Layer) -> None:
    """Fade what stands between the two layers, and push them together until both slices of Y are the same one."""
    shift = MIRROR / 2 - Y_SHARD - 16
    for piece in left.fades + right.fades:
        piece.fade(9.0, 0, 0.5)
    for layer, way in ((left, shift), (right, -shift)):
        for piece in layer.stays:
            piece.move(9.6, 10.4, piece.places[-1][1] + way)


def _separate(made: Movie) -> None:
    """Name the two layers and their options, draw a line between them, and change the times from JOINED to APART."""
    for x, said in (
        (MIRROR / 4, "ColumnParallelLinear, gather_output=True"),
        (MIRROR * 3 / 4, "RowParallelLinear, input_is_parallel=False"),
    ):
        made.draw(text(x, TITLES, said, size=SMALL, color=FAINT, anchor="middle"))
    made.draw(line(MIRROR / 2, TITLES - 12, MIRROR / 2, LANES.bottom(1) + 46))
    for piece in made.pieces:
        piece.opacities = [(_apart(time), value) for time, value in piece.opacities]
        piece.places = [(_apart(time), x, y) for time, x, y in piece.places]


def _apart(time: float) -> float:
    """Return what a time becomes without the joining: JOINED is stretched to APART, piece by piece."""
    part = max(index for index in range(len(JOINED) - 1) if JOINED[index] <= time)
    share = (time - JOINED[part]) / (JOINED[part + 1] - JOINED[part])
    return APART[part] + share * (APART[part + 1] - APART[part])


def _tell(made: Movie, before: int, after: int, joined: bool) -> None:
    told = [
        "Column-parallel, forward: each rank computes a slice of Y, and gather collects the slices.",
        "Column-parallel, backward: each rank gets a term of dX, and f adds the terms.",
        "Row-parallel, forward: each rank computes a term of Z, and g adds the terms.",
        "Row-parallel, backward: each rank gets a slice of dY, and scatter collects the slices.",
    ]
    if joined:
        told[2:] = [
            "Row-parallel: g adds the terms of Z, and scatter collects the slices of dY.",
            f"Gather and scatter undo each other. Without them, {before} message bytes become {after}.",
        ]
    starts = (0, 2.9, 5.4, 8.8) if joined else APART
    made.captions(10, 30, list(zip(starts, told, strict=False)), bold=True)
    stills = {
        1.65: "Each rank multiplies X by its columns of A and gets a slice of Y.",
        2.85: "Gather sends the slices around, so that every rank has all of Y.",
        4.1: "Backward, each rank takes its slice of dY. Nothing is sent.",
        4.75: "Each rank gets only a term of dX.",
        5.35: "f adds the terms with an all-reduce, so that both ranks get dX.",
        6.6: "Row-parallel: each rank multiplies its slice of Y by its rows of B and gets a term of Z.",
        7.05: "g adds the terms with an all-reduce, so that both ranks get Z.",
        8.75: "Backward, each rank gets a slice of dY, and scatter collects the slices.",
    }
    if joined:  # shown without stills
        made.description = " ".join([
            *stills.values(), "But gather and scatter undo each other. Each rank already has the slice that B needs.",
            f"What is left is one all-reduce each way: {after} message bytes instead of {before}.",
        ])  # fmt: skip
        return
    for time, said in stills.items():
        made.frame(_apart(time), said, top=TITLES - 14)
