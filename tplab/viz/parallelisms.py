"""Data, tensor and pipeline parallelism in one picture each: what a rank has, gets and sends, and when it waits."""

from matplotlib.axes import Axes

from tplab.viz.blocks import arrow, block, centered, label, rectangle
from tplab.viz.colors import FAINT, INK, WIDTH, Picture, canvas, rank_color, style, tint

P = LAYERS = 4
_LEFT = 0.95  # where the ranks' columns begin
_HOLDS = {"data": "the whole model", "tensor": "a part of every layer", "pipeline": "some whole layers"}
_TITLE = {
    "data": "Data parallelism: the batch is divided",
    "tensor": "Tensor parallelism: every matrix is divided",
    "pipeline": "Pipeline parallelism: the layers are divided",
}


def parallelism(kind: str) -> Picture:
    """Draw a model of four layers on four ranks. kind: "data", "tensor" or "pipeline"."""
    if kind not in _TITLE:
        raise ValueError(f"parallelism draws 'data', 'tensor' or 'pipeline', not {kind!r}")
    with style():
        picture, axes = canvas(WIDTH, 3.42 + 0.25 * P, f"{_TITLE[kind]}, {P} ranks", _TITLE[kind])
        width = (WIDTH - _LEFT - 0.15) / P
        for text, y in (("holds", 1.05), ("gets", 1.88), ("sends", 2.36)):
            axes.text(0.12, y, text, fontsize=9.5, va="center")
        for rank in range(P):
            _holds(axes, kind, rank, _LEFT + rank * width, width - 0.25)
        _sends(axes, kind, width)
        _lanes(axes, kind)
    picture.description = "What part of the model each rank stores, what it gets and sends, and when it waits."
    return picture


def _holds(axes: Axes, kind: str, rank: int, x: float, width: float) -> None:
    """Draw a rank's layers as filled boxes, and the layers that it doesn't have as empty outlines."""
    centered(axes, x + width / 2, 0.5, f"rank {rank}", 9.5, bold=True)
    for layer in range(LAYERS):
        y = 0.66 + layer * 0.22
        rectangle(axes, x, y, width, 0.17, "none", FAINT, linestyle=(0, (2, 2)))
        if kind == "tensor":
            block(axes, x + rank * width / P, y, width / P, 0.17, rank)
        elif kind == "data" or layer == rank:
            block(axes, x, y, width, 0.17, rank)
    centered(axes, x + width / 2, 1.64, _HOLDS[kind], 8.5)
    gets = {
        "data": "its own sequences",
        "tensor": "all sequences",
        "pipeline": f"rank {rank - 1}'s output" if rank else "all sequences",
    }[kind]
    centered(axes, x + width / 2, 1.88, gets, 8.5)


def _sends(axes: Axes, kind: str, width: float) -> None:
    first, last = _LEFT + (width - 0.25) / 2, _LEFT + (P - 1) * width + (width - 0.25) / 2
    if kind == "pipeline":
        for rank in range(P - 1):
            x = first + rank * width
            arrow(axes, (x + 0.2, 2.28), (x + width - 0.2, 2.28), color=INK)
            arrow(axes, (x + width - 0.2, 2.46), (x + 0.2, 2.46), color=INK)
        text = "→ activations of a micro-batch to the next rank, ← their gradients back"
    else:
        rectangle(axes, first, 2.28, last - first, 0.16, tint(INK, 0.18), INK)
        text = {
            "data": "all-reduce: every gradient, as large as the model, once a step",
            "tensor": "all-reduce: activations, in every layer",
        }[kind]
    centered(axes, (first + last) / 2, 2.66, text, 9)


def _lanes(axes: Axes, kind: str) -> None:
    """Draw one step over time: F is forward, B backward, gray a collective, and empty means that the rank waits."""
    top = 2.92
    pieces = {"data": _data, "tensor": _tensor, "pipeline": _pipeline}[kind]()
    end = max(at + length for lane in pieces for at, length, _ in lane)
    unit = (WIDTH - _LEFT - 0.4) / end
    axes.text(0.12, top + 0.125 * P - 0.01, "time →", fontsize=9.5, va="center")
    for rank, lane in enumerate(pieces):
        y = top + 0.25 * rank
        rectangle(axes, _LEFT, y, end * unit, 0.2, "none", FAINT, linestyle=(0, (2, 2)))
        for at, length, name in lane:
            color = tint(INK, 0.18) if name == "" else tint(rank_color(rank), 0.3 if name[0] == "F" else 0.6)
            edge = INK if name == "" else rank_color(rank)
            rectangle(axes, _LEFT + at * unit, y, length * unit, 0.2, color, edge)
            if name:
                centered(axes, _LEFT + (at + length / 2) * unit, y + 0.1, name, 7.5, va="center_baseline")
    waits = {
        "data": "Each rank waits once, for the slowest one, until all gradients are added up (gray).",
        "tensor": "Each rank waits for all others in every layer (gray), forward and backward.",
        "pipeline": "Each rank waits (empty) for its first input, and for the gradients that come back.",
    }[kind]
    label(axes, (WIDTH + _LEFT) / 2 - 0.1, top + 0.25 * P + 0.18, waits, 9)


_Lane = list[tuple[float, float, str]]  # (begin, length, name)


def _data() -> list[_Lane]:
    return [[(0, 4, "F"), (4, 8, "B"), (12, 2, "")] for _ in range(P)]


def _tensor() -> list[_Lane]:
    lane: _Lane = []
    at = 0.0
    for name, length in [("F", 0.8)] * LAYERS + [("B", 1.6)] * LAYERS:
        for _ in range(2):
            lane += [(at, length / 2, name), (at + length / 2, 0.35, "")]
            at += length / 2 + 0.35
    return [lane] * P


def _pipeline() -> list[_Lane]:
    """Return the lanes of a pipeline with P micro-batches: all forward passes, and then all backward passes."""
    lanes: list[_Lane] = []
    for rank in range(P):
        forward = [(float(rank + i), 1.0, f"F{i}") for i in range(P)]
        turn = 2 * P - 1 + 2 * (P - 1 - rank)
        lanes.append(forward + [(float(turn + 2 * i), 2.0, f"B{i}") for i in range(P)])
    return lanes
