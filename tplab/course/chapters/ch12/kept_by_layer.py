"""What autograd keeps of a transformer layer on one of p ranks, measured on one process: communication is played.

A gather copies this rank's tokens p times, a reduce-scatter takes the first s/p of them; neither keeps anything. So
the tensors have the shapes that they have on a rank. 16-bit numbers, and dropout masks of one byte, as on a GPU.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tplab.memory.meter import saved_for_backward

RATE = 0.1


class _GatheredLinear(Function):
    """The product of all tokens with a weight, of which only this rank's tokens are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, p: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(torch.cat([x] * p, 1), weight)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple:
        raise NotImplementedError("only what forward keeps is measured")


class RankLayer(nn.Module):
    """What one of p ranks computes of a layer: x [b, s, h], or with sequence_parallel [b, s/p, h]."""

    def __init__(self, h: int, a: int, p: int, sequence_parallel: bool, recompute_core: bool) -> None:
        super().__init__()
        self.p, self.heads, self.dim = p, a // p, h // a
        self.cut, self.recompute_core = sequence_parallel, recompute_core
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h // p, bias=False), nn.Linear(h // p, h, bias=False)
        self.up, self.down = nn.Linear(h, 4 * h // p, bias=False), nn.Linear(4 * h // p, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, self.dim)).transpose(1, 2)  # [b, a/p, s, d]
            for part in self._enter(self.norm1(x), self.qkv).chunk(3, -1)
        )
        y = checkpoint(self.core, q, k, v, use_reentrant=False) if self.recompute_core else self.core(q, k, v)
        x = x + drop(self._leave(self.out(y.transpose(1, 2).flatten(2))))
        return x + drop(self._leave(self.down(F.gelu(self._enter(self.norm2(x), self.up)))))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return drop((q @ k.transpose(-2, -1) * self.dim**-0.5).softmax(-1)) @ v

    def _enter(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return _GatheredLinear.apply(x, linear.weight, self.p) if self.cut else linear(x)

    def _leave(self, y: Tensor) -> Tensor:
        return y.chunk(self.p, 1)[0] if self.cut else y


def drop(x: Tensor) -> Tensor:
    return torch.native_dropout(x, RATE, True)[0]


def kept_by_layer(b: int, s: int, h: int, a: int, p: int, sequence_parallel: bool, recompute: str) -> int:
    """Bytes, without the mean and the spread that a norm keeps of each token."""
    layer = RankLayer(h, a, p, sequence_parallel, recompute == "attention").bfloat16()
    tokens = s // p if sequence_parallel else s
    x = torch.zeros(b, tokens, h, dtype=torch.bfloat16, requires_grad=True)
    with saved_for_backward(layer) as kept:
        if recompute == "layers":
            checkpoint(layer, x, use_reentrant=False)
        else:
            layer(x)
    return sum(size for shape, _, size in kept.pieces if shape != (b, tokens, 1))
