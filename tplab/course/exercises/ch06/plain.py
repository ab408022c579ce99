"""Plain single-process attention that computes the right values and those that common mistakes would produce.

It handles a full text or one that arrives in pieces. The code uses einsum and softmax but none of tplab's layers. q has
the shape [b, n, s, d], and k and v have the shape [b, n, t, d].
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
Positions = Callable[[int, int], Tensor]


def split(y: Tensor, head_dim: int) -> Tensor:
    return torch.stack(y.split(head_dim, dim=-1), dim=1)  # [b, s, n d] -> [b, n, s, d]


def merge(y: Tensor) -> Tensor:
    return torch.cat(y.unbind(1), dim=-1)  # [b, n, s, d] -> [b, s, n d]


def hidden(s: int, t: int) -> Tensor:
    """Return a mask [s, t] that is True where a query must not attend. The queries are the last s of t positions."""
    return torch.arange(t) > torch.arange(t - s, t)[:, None]  # [s, t]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    *,
    scale: float | None = None,
    dim: int = -1,
    mask: Callable[[int, int], Tensor] = hidden,
    fill: float = -math.inf,
) -> Tensor:
    scores = torch.einsum("bnid,bnjd->bnij", q, k) / (math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(mask(q.shape[2], k.shape[2]), fill)
    return torch.einsum("bnij,bnjd->bnid", scores.softmax(dim), v)


def after_the_softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = torch.einsum("bnid,bnjd->bnij", q, k) / math.sqrt(q.shape[-1])
    weights = scores.softmax(-1)
    if causal:
        weights = weights.masked_fill(hidden(q.shape[2], k.shape[2]), 0.0)
    return torch.einsum("bnij,bnjd->bnid", weights, v)


def top_left(s: int, t: int) -> Tensor:
    return torch.arange(t) > torch.arange(s)[:, None]


def the_past(s: int, t: int) -> Tensor:
    return torch.arange(t) < torch.arange(t - s, t)[:, None]


def one_more(s: int, t: int) -> Tensor:
    return torch.arange(t) > torch.arange(t - s, t)[:, None] + 1


NO_SCALE = "what comes out without dividing the scores"
BY_D = "what comes out when the scores are divided by d, not by its square root"
BY_H = "what comes out when the scores are divided by the square root of the width of all heads"
BY_T = "what comes out when the scores are divided by the square root of a sequence length"
OVER_QUERIES = "what comes out when the softmax runs over the queries"
OVER_HEADS = "what comes out when the softmax runs over the heads"
NO_MASK = "what comes out without the causal mask"
TOP_LEFT = "what comes out with the triangle at the top left, as if the queries were the first tokens"
THE_PAST = "what comes out when the past is hidden and the future is seen"
ONE_MORE = "what comes out when every query sees the key behind it too"
FILLED_WITH_ZERO = "what comes out when hidden scores are set to 0"
AFTER_SOFTMAX = "what comes out when the mask is put on after the softmax"

MISTAKES: dict[str, Attend] = {  # those unrelated to the mask come first, because they're wrong in every case
    NO_SCALE: lambda q, k, v, causal: attend(q, k, v, causal, scale=1.0),
    BY_D: lambda q, k, v, causal: attend(q, k, v, causal, scale=q.shape[-1]),
    BY_H: lambda q, k, v, causal: attend(q, k, v, causal, scale=math.sqrt(q.shape[1] * q.shape[3])),
    BY_T: lambda q, k, v, causal: attend(q, k, v, causal, scale=math.sqrt(k.shape[2])),
    OVER_QUERIES: lambda q, k, v, causal: attend(q, k, v, causal, dim=-2),
    OVER_HEADS: lambda q, k, v, causal: attend(q, k, v, causal, dim=1),
    NO_MASK: lambda q, k, v, causal: attend(q, k, v, False),
    TOP_LEFT: lambda q, k, v, causal: attend(q, k, v, causal, mask=top_left),
    THE_PAST: lambda q, k, v, causal: attend(q, k, v, causal, mask=the_past),
    ONE_MORE: lambda q, k, v, causal: attend(q, k, v, causal, mask=one_more),
    FILLED_WITH_ZERO: lambda q, k, v, causal: attend(q, k, v, causal, fill=0.0),
    AFTER_SOFTMAX: after_the_softmax,
}


def turn(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Apply rotary positions. Pair i becomes the complex number x_i + j x_(i + d/2), which a multiplication rotates."""
    half = x.shape[-1] // 2
    speeds = 1.0 / base ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angles = positions[:, None].float() * speeds  # in float32, as in Llama
    turns = torch.complex(angles.cos().double(), angles.sin().double())  # [s, d/2]
    pairs = torch.complex(x[..., :half], x[..., half:]) * turns
    return torch.cat([pairs.real, pairs.imag], -1)


def in_pieces(
    x: Tensor,
    full: Mapping[str, Tensor],
    pieces: Sequence[int],
    head_dim: int,
    base: float,
    *,
    attend: Attend = attend,
    positions: Positions = torch.arange,
    turned: str = "qk",
    remember: bool = True,
    tiled: bool = False,
) -> list[Tensor]:
    """Return one output per piece of x [b, s, h]. `pieces` has their lengths. Queries also see all earlier pieces."""
    outs, start = [], 0
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for length in pieces:
        piece = x[:, start : start + length]
        heads = {p: split(F.linear(piece, full[f"W{p}"], full[f"b{p}"]), head_dim) for p in "qkv"}
        heads |= {p: turn(heads[p], positions(start, start + length), base) for p in turned}
        keys, values = ([*keys, heads["k"]], [*values, heads["v"]]) if remember else ([heads["k"]], [heads["v"]])
        q, k, v = heads["q"], torch.cat(keys, 2), torch.cat(values, 2)
        n, m = q.shape[1], k.shape[1]
        k, v = ((t.repeat(1, n // m, 1, 1) if tiled else t.repeat_interleave(n // m, 1)) for t in (k, v))
        outs.append(F.linear(merge(attend(q, k, v, True)), full["Wo"], full["bo"]))
        start += length
    return outs


FROM_ZERO = "what comes out when the positions of the new tokens begin at 0 again"
TOO_LATE = "what comes out when the positions begin behind the new tokens, where the cache ends afterwards"
FROM_ONE = "what comes out when the first token of the text has position 1"
UNTURNED = "what comes out when the keys are kept without being turned to their positions"
NO_TURNS = "what comes out without rotary positions"
ALL_TURNED = "what comes out when the values are turned too"
OTHER_BASE = "what comes out with rotary positions of the base 10000, not the attention's"
FORGETFUL = "what comes out when the queries see the new keys only"
TILED = "what comes out when query head i looks at head i mod m of K and V"

IN_PIECES: dict[str, dict[str, Any]] = {  # the options of `in_pieces` that reproduce each mistake
    FROM_ZERO: {"positions": lambda start, stop: torch.arange(stop - start)},
    TOO_LATE: {"positions": lambda start, stop: torch.arange(stop, 2 * stop - start)},
    FROM_ONE: {"positions": lambda start, stop: torch.arange(start + 1, stop + 1)},
    UNTURNED: {"turned": "q"},
    NO_TURNS: {"turned": ""},
    ALL_TURNED: {"turned": "qkv"},
    OTHER_BASE: {"base": 10_000.0},
    FORGETFUL: {"remember": False},
    TILED: {"tiled": True},
    TOP_LEFT: {"attend": MISTAKES[TOP_LEFT]},
    NO_MASK: {"attend": MISTAKES[NO_MASK]},
}
