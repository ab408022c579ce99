"""Draws pictures/moving/fg.svg: the operators f and g on two ranks, forward and backward, and what happens without f.

Every number comes from two runs on two real ranks, one with f and one without: the network of chapter 03, above a layer
with the weight w that is replicated, and one step of SGD.
"""

from itertools import pairwise

import torch
import torch.distributed as dist

from pictures.drawing import BACKWARD, FORWARD, SMALL, box, card, dot, line, number, placed, rank_tint, text
from pictures.moving.animation import SECONDS, Movie
from tplab import device, launch
from tplab.tensor import copy_to_region, reduce_from_region
from tplab.viz.colors import FAINT, INK, rank_color

W, A, RATE = 2.0, (3.0, -5.0), 0.05
RANKS = (0, 1)

# The columns of the picture, from left to right: boxes and bars, and between them a place for a value and its gradient
BELOW, F, SHARD, G, LOSS = (22, 118), (214, 246), (342, 462), (558, 590), (686, 740)  # left and right ends
THERE, BACK = (142, 270, 486, 614), (190, 318, 534, 662)  # between two neighbors of these
LANE, WIRE = 94, 56  # the height of a rank's lane, and of the wire in it
TOP, SECOND = 66, 350  # the top of the first lane, in the upper and in the lower network
HEIGHT = 560


def one_step(with_f: bool) -> dict[str, float]:
    """Run on each rank: x = w, z = sum of a_r·x, L = z²/2, one step. Returns all numbers of the picture."""
    rank = dist.get_rank()
    w = torch.tensor(W, device=device(), requires_grad=True)
    x = w * 1.0  # the layer below, whose input is 1
    copied = copy_to_region(x) if with_f else x.view_as(x)
    partial = copied * A[rank]
    z = reduce_from_region(partial)
    loss = z * z / 2
    for tensor in (x, copied, partial, z):
        tensor.retain_grad()
    loss.backward()
    numbers = {
        "x": x, "partial": partial, "z": z, "loss": loss,
        "dz": z.grad, "dpartial": partial.grad, "dcopied": copied.grad, "dx": x.grad, "w": w - RATE * w.grad,
    }  # fmt: skip
    return {name: round(value.item(), 6) for name, value in numbers.items()}


def movie() -> Movie:
    right, wrong = (launch(one_step, len(RANKS), args=(with_f,)) for with_f in (True, False))
    made = Movie(HEIGHT, "f and g, forward and backward")
    made.draw(*_network(TOP, with_f=True))
    for column, said in ((BELOW, "layer below"), (SHARD, "sharded layers"), (LOSS, "loss")):
        made.draw(text(sum(column) / 2, TOP - 10, said, size=SMALL, color=FAINT, anchor="middle"))
    _forward(made, right)
    _backward(made, right)
    _without_f(made, wrong)
    _tell(made, right, wrong)
    return made


def _two(results: list[dict], name: str) -> str:
    return " and ".join(number(result[name]) for result in results)


def _sum(results: list[dict], name: str, total: str) -> str:
    first, second = (number(result[name]) for result in results)
    return f"{first} + {f'({second})' if second.startswith('−') else second} = {number(results[0][total])}"


def _wire(top: float, rank: int) -> float:
    return top + rank * (LANE + 8) + WIRE


def _network(top: float, with_f: bool) -> list[str]:
    """Return both ranks' lanes, the boxes in them, and the bars of f and g across them."""
    drawn = []
    for rank in RANKS:
        y = _wire(top, rank)
        drawn += [
            box(10, y - WIRE, 740, LANE, rank_tint(rank, 0.16), stroke=0),
            box(10, y - WIRE, 5, LANE, rank_color(rank), stroke=0, radius=0),
            text(24, y - WIRE + 20, f"rank {rank}", bold=True),
            line(BELOW[1], y, LOSS[0], y),
            _box_with(SHARD, y, f"× {number(A[rank])}", edge=rank_color(rank)),
            _box_with(LOSS, y, "z²/2"),
            _layer_below(W, y),
        ]
    low, high = _wire(top, 0) - 30, _wire(top, 1) + 30
    for name, (left, end) in {"f": F, "g": G}.items():
        there = with_f or name != "f"
        edge, fill = (INK, "#FFFFFF") if there else (FAINT, "none")
        drawn.append(box(left, low, end - left, high - low, fill, edge, dashed=not there))
        if there:
            drawn.append(text((left + end) / 2, (low + high) / 2 + 6, name, size=20, anchor="middle", bold=True))
    return drawn


def _box_with(ends: tuple[float, float], y: float, said: str, fill: str = "#FFFFFF", edge: str = INK) -> str:
    return card(ends[0], y - 21, ends[1] - ends[0], 42, said, fill, edge, 2)


def _layer_below(w: float, y: float) -> str:
    """Draw a copy of the layer below. The larger its weight, the darker it is."""
    gray = round(250 - 42 * w)
    return _box_with(BELOW, y, f"w = {number(w)}", fill=f"#{gray:02X}{gray:02X}{gray:02X}")


def _dots(found: dict[str, float], color: str, *names: str) -> list[str]:
    return [dot(number(found[name]), color) for name in names]


def _forward(made: Movie, results: list[dict]) -> None:
    for rank, found in enumerate(results):
        y = _wire(TOP, rank)
        x, partial, z = _dots(found, FORWARD, "x", "partial", "z")
        made.piece(x, BELOW[1] - 16, y).show(0.2).move(0.4, 0.9, THERE[0])
        made.travel(x, y, THERE[0], 0.9, THERE[1], 1.6)
        made.travel(x, y, THERE[1], 1.9, sum(SHARD) / 2, 2.5, 2.4)
        made.travel(partial, y, sum(SHARD) / 2, 2.6, THERE[2], 3.2)
        made.travel(partial, y, THERE[2], 3.4, sum(G) / 2, 3.9, 3.9)
        made.piece(z, sum(G) / 2, y).show(4.2).move(4.4, 4.9, THERE[3])
    _exchange(made, G, FORWARD, 3.9)
    _label(made, F, TOP - 10, "forward: no message", FORWARD, 1.3)
    _label(made, G, TOP - 10, f"forward: all-reduce, {_sum(results, 'partial', 'z')}", FORWARD, 3.9)


def _backward(made: Movie, results: list[dict]) -> None:
    for rank, found in enumerate(results):
        y = _wire(TOP, rank)
        dz, dpartial, dcopied, dx = _dots(found, BACKWARD, "dz", "dpartial", "dcopied", "dx")
        made.travel(dz, y, LOSS[0] + 16, 5.1, BACK[3], 5.5)
        made.travel(dpartial, y, BACK[3], 5.6, BACK[2], 6.2)
        made.travel(dpartial, y, BACK[2], 6.4, sum(SHARD) / 2, 6.8, 6.8)
        made.travel(dcopied, y, sum(SHARD) / 2, 6.9, BACK[1], 7.3)
        made.travel(dcopied, y, BACK[1], 7.5, sum(F) / 2, 7.9, 7.9)
        made.travel(dx, y, sum(F) / 2, 8.1, BACK[0], 8.5)
        made.piece(_layer_below(found["w"], y)).show(8.4)
    bottom = TOP + 2 * LANE + 8 + 22
    _exchange(made, F, BACKWARD, 7.9)
    _label(made, G, bottom, "backward: no message", BACKWARD, 6.0)
    _label(made, F, bottom, f"backward: all-reduce, {_sum(results, 'dcopied', 'dx')}", BACKWARD, 7.9)


def _exchange(made: Movie, bar: tuple[float, float], color: str, at: float) -> None:
    """Light up a bar while the ranks exchange numbers, with an arrow from lane to lane on either side of its name."""
    upper, height = _wire(TOP, 0) - 30, LANE + 68
    made.message((bar[0], upper, bar[1] - bar[0], height), upper + height / 2, color, at, 16, 39, 4, 7)


def _label(made: Movie, bar: tuple[float, float], y: float, said: str, color: str, at: float) -> None:
    made.piece(text(sum(bar) / 2, y, said, size=SMALL, color=color, anchor="middle")).show(at)


def _without_f(made: Movie, results: list[dict]) -> None:
    """Draw the same network without f below, faint until its turn comes; only the way back is shown moving."""
    drawn = _network(SECOND, with_f=False)
    for rank, found in enumerate(results):
        dots = _dots(found, FORWARD, "x", "x", "partial", "z") + _dots(found, BACKWARD, "dpartial", "dz")
        for x, there in zip(THERE + BACK[2:], dots, strict=True):
            drawn.append(placed(there, x, _wire(SECOND, rank)))
    made.piece("".join(drawn)).fade(0, 0.25).fade(8.8, 1, 0.3)
    for rank, found in enumerate(results):
        y = _wire(SECOND, rank)
        dcopied, dx = _dots(found, BACKWARD, "dcopied", "dx")
        made.travel(dcopied, y, sum(SHARD) / 2, 9.1, BACK[1], 9.6)
        made.travel(dx, y, BACK[1], 9.6, BACK[0], 10.3)
        made.piece(_layer_below(found["w"], y)).fade(10.4, 1, 0.5)


def _tell(made: Movie, right: list[dict], wrong: list[dict]) -> None:
    """Write the captions, and choose the stills: one before the end of each caption."""
    x, z, dz, dx = (number(right[0][name]) for name in ("x", "z", "dz", "dx"))
    upper = [
        (0.1, f"f hands x = {x} to both ranks. Each rank already has a copy, so nothing is sent."),
        (1.9, f"Each rank multiplies by its own weight: {_two(right, 'partial')}."),
        (3.4, f"g adds the two with an all-reduce. Both ranks now have z = {z}."),
        (5.1, f"The gradient {dz} goes back through g unchanged, to each rank. Nothing is sent."),
        (6.4, f"Each rank's path gives a different number: {_two(right, 'dcopied')}."),
        (7.5, f"f adds them with an all-reduce: {dx}. Both copies of w take the same step."),
        (8.8, "g sends a message forward, f sends one backward."),
    ]
    lower = [
        (8.8, f"Without f, each rank goes on with its own number: {_two(wrong, 'dx')}."),
        (10.4, f"After one step, the copies of w are {_two(wrong, 'w')}. The ranks now train different networks."),
    ]
    made.captions(10, 28, upper, bold=True)
    made.piece(text(10, SECOND - 14, "The same network without f:", bold=True)).fade(0, 0.35).fade(8.7, 0, 0.1)
    made.captions(10, SECOND - 14, lower, bold=True)
    for (_, said), (end, _) in pairwise(upper):
        made.frame(end - 0.02, said, top=36, height=SECOND - 36 - 36)
    for time, (_, said) in zip((lower[1][0] - 0.02, SECONDS), lower, strict=True):
        made.frame(time, said, top=SECOND - 4, height=HEIGHT - SECOND + 4)
