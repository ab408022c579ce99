"""Attention over a text that comes in pieces, on one process: what is right, and what well-known mistakes give."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.course.chapters.ch06 import plain

Positions = Callable[[int, int], Tensor]


def turn(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary positions by complex numbers: pair i is x_i + j x_(i + d/2), and turning it is a product."""
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
    attend: plain.Attend = plain.attend,
    positions: Positions = torch.arange,
    turned: str = "qk",
    remember: bool = True,
    tiled: bool = False,
) -> list[Tensor]:
    """The output for each piece of x [b, s, h], of `pieces` tokens, whose queries see all pieces before it too."""
    outs, start = [], 0
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for length in pieces:
        piece = x[:, start : start + length]
        heads = {p: plain.split(F.linear(piece, full[f"W{p}"], full[f"b{p}"]), head_dim) for p in "qkv"}
        heads |= {p: turn(heads[p], positions(start, start + length), base) for p in turned}
        keys, values = ([*keys, heads["k"]], [*values, heads["v"]]) if remember else ([heads["k"]], [heads["v"]])
        q, k, v = heads["q"], torch.cat(keys, 2), torch.cat(values, 2)
        n, m = q.shape[1], k.shape[1]
        k, v = ((t.repeat(1, n // m, 1, 1) if tiled else t.repeat_interleave(n // m, 1)) for t in (k, v))
        outs.append(F.linear(plain.merge(attend(q, k, v, True)), full["Wo"], full["bo"]))
        start += length
    return outs


FROM_ZERO = "what comes out when the positions of the new tokens begin at 0 again"
TOO_LATE = "what comes out when the positions begin behind the new tokens, where the cache ends afterwards"
UNTURNED = "what comes out when the keys are kept without being turned to their positions"
NO_TURNS = "what comes out without rotary positions"
ALL_TURNED = "what comes out when the values are turned too"
OTHER_BASE = "what comes out with rotary positions of the base 10000, not the attention's"
FORGETFUL = "what comes out when the queries see the new keys only"
TILED = "what comes out when query head i looks at head i mod m of K and V"

MISTAKES: dict[str, dict[str, Any]] = {
    FROM_ZERO: {"positions": lambda start, stop: torch.arange(stop - start)},
    TOO_LATE: {"positions": lambda start, stop: torch.arange(stop, 2 * stop - start)},
    UNTURNED: {"turned": "q"},
    NO_TURNS: {"turned": ""},
    ALL_TURNED: {"turned": "qkv"},
    OTHER_BASE: {"base": 10_000.0},
    FORGETFUL: {"remember": False},
    TILED: {"tiled": True},
    plain.TOP_LEFT: {"attend": plain.MISTAKES[plain.TOP_LEFT]},
    plain.NO_MASK: {"attend": plain.MISTAKES[plain.NO_MASK]},
}
