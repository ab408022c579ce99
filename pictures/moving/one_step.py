"""Draws pictures/moving/one_step.svg: a training step of a transformer layer on two ranks, along the residual stream.

All numbers are those of a single token with two features, from a run of ParallelTransformerLayer on two real ranks. The
norm is an RMSNorm, because a LayerNorm of two features returns the same two values whatever it gets.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from pictures.drawing import BACKWARD, FORWARD, SMALL, box, line, number, rank_tint, text
from pictures.moving.animation import SECONDS, WIDTH, Lanes, Movie
from tplab import device, launch, record
from tplab.gpt import ParallelTransformerLayer
from tplab.tensor import region
from tplab.viz.colors import FAINT, GOLD, NOBODY, rank_color

BLOCKS = ("attention", "mlp")
RANKS = (0, 1)

HEIGHT, LANES = 452, Lanes(58, 164, 26)
PIPE, ROW, BACK_ROW = 134, 46, 84  # below the top of a lane: the middle of the stream, and of what travels each way
TILE, TALL = 74, 24
X, Z = 12, WIDTH - 12 - TILE  # where the stream's tile starts and ends
LEFT = {"attention": 96, "mlp": 396}  # where each block begins: its norm
NORM, F_BAR, BLOCK, G_BAR, BIAS = 0, 64, 92, 180, 210  # from there on
AFTER = 254  # where a block's output enters the stream
TOLD = (
    (0.0, 0.6, "The stream, the same on both ranks."),
    (0.7, 1.6, "A copy of it goes through the norm and f, without a message."),
    (2.0, 2.65, "Each rank has a partial sum, and g adds the two."),
    (2.8, 3.55, "The bias is added once, and the sum goes back into the stream."),
    (3.6, 5.55, "The MLP does the same."),
    (6.4, 7.15, "Backward, the gradient goes straight through g."),
    (7.6, 8.25, "Each rank has a partial gradient, and f adds the two."),
    (8.8, 10.15, "The attention does the same."),
    (10.6, SECONDS, "Gold: a full gradient on every rank, without any message."),
)


def run() -> dict:
    """Run a layer forward and backward on this rank, and return every tensor that the picture shows."""
    torch.manual_seed(5)
    layer = ParallelTransformerLayer(2, 2, ffn_hidden_size=8, norm="rms", device=device())
    generator = torch.Generator().manual_seed(1)  # the same values on both ranks
    with torch.no_grad():
        small = layer.attention_norm.weight, layer.mlp_norm.weight, layer.attention.out.bias, layer.mlp.down.bias
        for param in small:
            param.copy_(torch.randn(2, generator=generator))
        for param in layer.parameters():
            param.mul_(2.5 if param.dim() == 2 else 1)  # so that no number in the picture is almost 0
    x = torch.tensor([[[3.0, 1.0]]], device=device(), requires_grad=True)
    seen: dict[str, list[Tensor]] = {name: [] for name in ("normed", "term", "sum", "gradient", "stream", "dy")}
    for norm, last in ((layer.attention_norm, layer.attention.out), (layer.mlp_norm, layer.mlp.down)):
        norm.register_forward_hook(lambda _, given, out: seen["normed"].append(out))
        norm.register_forward_hook(lambda _, given, out: seen["stream"].append(watched(given[0], seen["dy"])))
        last.register_forward_hook(lambda last, given, out: seen["term"].append(F.linear(given[0], last.weight)))
        last.register_forward_hook(lambda last, given, out: seen["sum"].append(out - last.bias))
    share = region.share_with_region  # f
    region.share_with_region = lambda x, group: watched(share(x, group), seen["gradient"])
    try:
        with record() as forward:
            out = layer(x)
        with record() as backward:
            (out.square().sum() / 2).backward()  # so that dz is z
    finally:
        region.share_with_region = share
    assert x.grad is not None
    params = {name: param.grad for name, param in layer.named_parameters() if not hasattr(param, "tensor_parallel")}
    return {
        "x": numbers(x), "z": numbers(out), "dx": numbers(x.grad),
        "y": numbers(seen["stream"][1]), "dy": numbers(seen["dy"][0]), "messages": [len(forward), len(backward)],
        **{name: [numbers(each) for each in seen[name]] for name in ("normed", "term", "sum", "gradient")},
        "replicated": {name: numbers(grad) for name, grad in params.items() if grad is not None},
    }  # fmt: skip


def watched(x: Tensor, gradients: list[Tensor]) -> Tensor:
    x.register_hook(gradients.append)
    return x


def numbers(tensor: Tensor) -> list[float]:
    return [round(value, 1) + 0.0 for value in tensor.detach().flatten().tolist()]


def movie() -> Movie:
    ranks = launch(run, len(RANKS))
    one, other = ranks
    shared = ("x", "z", "dx", "y", "dy", "normed", "sum", "replicated")
    assert all(one[name] == other[name] for name in shared), "these are the same on both ranks"
    assert one["messages"] == other["messages"] == [2, 2]
    made = Movie(HEIGHT, "A training step of a transformer layer on two ranks")
    for rank in RANKS:
        _lane(made, rank)
    for block in BLOCKS:
        _bars(made, block)
    for rank, seen in enumerate(ranks):
        _forward(made, rank, seen)
        _backward(made, rank, seen)
    made.count_messages((0.0, 2.4, 5.3, 8.1, 10.0))
    made.tell(TOLD, 22, top=LANES.first - 26)
    return made


def _tile(values: Sequence[float], color: str, fill: str, dashed: bool = False) -> str:
    """Draw two numbers, with the left edge at x = 0 and the middle at y = 0."""
    drawn = box(0, -TALL / 2, TILE, TALL, fill, color, 2, radius=3, dashed=dashed)
    for place, value in zip((TILE / 4, 3 * TILE / 4), values, strict=True):
        drawn += text(place, 5, number(value), size=SMALL, color=color, anchor="middle", bold=True)
    return drawn


def _lane(made: Movie, rank: int) -> None:
    y = LANES.top(rank)
    made.lane(rank, LANES, strength=0.1)
    made.draw(box(12, y + PIPE - 18, WIDTH - 24, 36, "#D9D9D9", FAINT, 1, radius=8))
    for block, said in zip(BLOCKS, ("attention", "MLP"), strict=True):
        left, shard = LEFT[block], (rank_tint(rank, 0.35), rank_color(rank), 2)
        parts = ((NORM, 50, 78, "norm", NOBODY), (BLOCK, 80, 78, said, *shard), (BIAS, 34, 40, "+ b", NOBODY))
        for place, width, height, name, *look in parts:
            made.draw(box(left + place, y + 26, width, height, *look))
            made.draw(text(left + place + width / 2, y + 20, name, size=SMALL, anchor="middle"))
        made.draw(line(left + 25, y + PIPE - 18, left + 25, y + 104, FAINT))
        made.draw(line(left + BIAS + 17, y + 66, left + BIAS + 17, y + PIPE - 18, FAINT))


def _bars(made: Movie, block: str) -> None:
    """Draw f and g across both lanes, and their messages."""
    top, height = LANES.top(0) + 24, LANES.top(1) + 106 - LANES.top(0) - 24
    forward, backward = {"attention": (2.4, 10.0), "mlp": (5.3, 8.1)}[block]
    for place, name, time, color in ((G_BAR, "g", forward, FORWARD), (F_BAR, "f", backward, BACKWARD)):
        x = LEFT[block] + place
        made.draw(box(x, top, 20, height))
        made.draw(text(x + 10, LANES.first - 6, name, anchor="middle", bold=True))
        made.message((x, top, 20, height), LANES.between(), color, time, -30, 30).hide(time + 0.9)


def _forward(made: Movie, rank: int, seen: dict) -> None:
    pipe, row = LANES.top(rank) + PIPE, LANES.top(rank) + ROW
    befores, streams = (X, LEFT["attention"] + AFTER - TILE / 2), (seen["x"], seen["y"])
    for index, (block, start) in enumerate(zip(BLOCKS, (0.7, 3.6), strict=True)):
        left, before = LEFT[block], befores[index]
        tile = _tile(streams[index], FORWARD, "#FFFFFF")
        stream = made.piece(tile, before, pipe).show(max(0.1, start - 0.4))
        stream.move(start + 1.9, start + 2.3, left + AFTER - TILE - 6).hide(start + 2.5)
        made.piece(tile, before, pipe).show(start).move(start + 0.1, start + 0.5, left - 12, row).hide(start + 0.6)
        normed = made.piece(_tile(seen["normed"][index], FORWARD, NOBODY), left - 12, row).show(start + 0.6)
        normed.move(start + 0.8, start + 1.2, left + BLOCK + 3).hide(start + 1.2)
        term = _tile(seen["term"][index], FORWARD, rank_tint(rank, 0.3), dashed=True)
        made.travel(term, row, left + BLOCK + 3, start + 1.3, until=start + 2.0)
        total = made.piece(_tile(seen["sum"][index], FORWARD, NOBODY), left + G_BAR - 8, row).show(start + 2.0)
        total.move(start + 2.1, start + 2.5, left + BIAS + 17 - TILE / 2, pipe).hide(start + 2.5)
    made.travel(_tile(seen["z"], FORWARD, "#FFFFFF"), pipe, LEFT["mlp"] + AFTER - TILE / 2, 6.1, Z, 6.5, 6.7)


def _backward(made: Movie, rank: int, seen: dict) -> None:
    """The stream carries the gradient back. On the way, each block adds what f returns."""
    y = LANES.top(rank)
    # dz is z, because the loss is half of the sum of squares
    dz = made.travel(_tile(seen["z"], BACKWARD, "#FFFFFF"), y + PIPE, Z, 6.7, LEFT["mlp"] + AFTER - TILE / 2, 7.1)
    dz.move(7.9, 8.4, LEFT["mlp"] - 12).hide(8.5)
    dy = made.piece(_tile(seen["dy"], BACKWARD, "#FFFFFF"), LEFT["mlp"] - 12, y + PIPE).show(8.5)
    dy.move(8.7, 8.9, LEFT["attention"] + AFTER - TILE / 2).move(9.8, 10.3, LEFT["attention"] - 12).hide(10.4)
    for index, (block, start) in enumerate((("mlp", 7.1), ("attention", 9.0))):
        left = LEFT[block]
        around = box(left + BLOCK, y + 26, 80, 78, "none", BACKWARD, 3)
        made.piece(around).show(start).hide(start + 0.7)
        term = _tile(seen["gradient"][index], BACKWARD, rank_tint(rank, 0.3), dashed=True)
        way = left + BLOCK + 3, start + 0.4, left + F_BAR - 27, start + 0.9, start + 1.3
        made.travel(term, y + BACK_ROW, *way)
        glow = box(left + NORM, y + 26, 50, 78, "none", GOLD, 4) + box(left + BIAS, y + 26, 34, 40, "none", GOLD, 4)
        made.piece(glow).show(start + 1.5)
    made.piece(_tile(seen["dx"], BACKWARD, "#FFFFFF"), LEFT["attention"] - 12, y + PIPE).show(10.4).move(10.7, 11.0, X)
