"""Chapter 12: a small layer in pieces, in which you can see what each rank computes, saves and sends.

    TensorParallelBlock     x [b, s, h]   -> norm -> f -> inner -> g -> + bias, dropout -> + x    [b, s, h]
    SmallModel              x [b, s, h]   -> + positions -> scatter -> a block of attention       [b, s/p, h]

`inner` is the part with the matmuls: Attention or MLP. Both get all tokens [b, s, h], and both return this rank's term
of the output, without the final bias, because a bias has to be added after the sum. They contain no operator, unlike
the layers in `tplab.tensor`, so the block decides how its tokens get in and out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from tplab.sequence.regions import (
    gather_from_sequence_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
)
from tplab.tensor.attention import QKVParallelLinear
from tplab.tensor.linear import ColumnParallelLinear, RowParallelLinear
from tplab.tensor.operators import copy_to_region, reduce_from_region
from tplab.tensor.rng import RNGTracker, dropout

Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Attention(nn.Module):
    """All tokens [b, s, h] -> this rank's term [b, s, h], from its a/p heads. Causal, without the final bias.

    rate       the dropout rate of the attention weights
    qk_norm    normalize each query and each key, with weights [h/a] that all heads share (as in Qwen3)
    """

    def __init__(self, h: int, heads: int, *, rate: float = 0.0, qk_norm: bool = False, **options: Any) -> None:
        super().__init__()
        self.qkv = QKVParallelLinear(h, heads, heads, h // heads, **options)  # weight [3h/p, h]
        self.q_norm, self.k_norm = (_norm(h // heads, **options) if qk_norm else nn.Identity() for _ in range(2))
        self.out = RowParallelLinear(h, h, bias=False, **options)  # weight [h, h/p]
        self.rate = rate

    def forward(self, x: Tensor, rng: RNGTracker | None = None, multiply: Matmul = F.linear) -> Tensor:
        qkv = multiply(x, self.qkv.weight, self.qkv.bias)  # [b, s, 3h/p]
        heads = self.qkv.heads[0]
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))  # [b, a/p, s, d]
        q, k = self.q_norm(q), self.k_norm(k)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5  # [b, a/p, s, s]
        future = torch.full_like(scores[0, 0], -torch.inf).triu(1)  # [s, s], added because a mask would be saved
        weights = (scores + future).softmax(-1)
        weights = dropout(weights, self.rate, self.training, sharded=True, rng=rng)
        return F.linear((weights @ v).transpose(1, 2).flatten(2), self.out.weight)  # [b, s, h], a term


def _norm(size: int, device: Any = None, dtype: torch.dtype | None = None, **options: Any) -> nn.RMSNorm:
    return nn.RMSNorm(size, device=device, dtype=dtype)


class MLP(nn.Module):
    """All tokens [b, s, h] -> this rank's term [b, s, h], from its 4h/p columns, without the final bias."""

    def __init__(self, h: int, **options: Any) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(h, 4 * h, **options)  # weight [4h/p, h]
        self.down = RowParallelLinear(4 * h, h, bias=False, **options)  # weight [h, 4h/p]

    def forward(self, x: Tensor, rng: RNGTracker | None = None, multiply: Matmul = F.linear) -> Tensor:
        x = F.gelu(multiply(x, self.up.weight, self.up.bias))  # [b, s, 4h/p]
        return F.linear(x, self.down.weight)  # [b, s, h], a term


class TensorParallelBlock(nn.Module):
    """A block as in chapter 10: x [b, s, h], replicated -> [b, s, h], replicated, with f and g around `inner`."""

    def __init__(
        self,
        h: int,
        inner: nn.Module,
        *,
        hidden_dropout: float = 0.0,
        group: ProcessGroup | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(h, device=device, dtype=dtype)
        self.inner = inner
        self.bias = nn.Parameter(torch.zeros(h, device=device, dtype=dtype))  # the final bias of `inner`
        self.hidden_dropout, self.group = hidden_dropout, group

    def forward(self, x: Tensor, rng: RNGTracker | None = None) -> Tensor:
        y = self.norm(x)
        y = copy_to_region(y, self.group)  # f
        y = self.inner(y, rng)  # [b, s, h], a term
        y = reduce_from_region(y, self.group)  # g
        y = y + self.bias
        y = dropout(y, self.hidden_dropout, self.training, sharded=False, rng=rng)
        return x + y


class SmallModel(nn.Module):
    """x [b, s, h], replicated -> this rank's tokens [b, s/p, h], through positions and a block of attention.

    Its nine parameters see different tokens and different heads.
    """

    def __init__(self, s: int, h: int, heads: int, *, group: ProcessGroup | None = None, **options: Any) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(s, h, **options))
        self.norm = nn.LayerNorm(h, **options)
        self.attention = Attention(h, heads, qk_norm=True, group=group, **options)
        self.bias = nn.Parameter(torch.zeros(h, **options))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions  # [b, s, h]
        x = scatter_to_sequence_region(x, self.group)  # [b, s/p, h]
        y = gather_from_sequence_region(self.norm(x), self.group)  # [b, s, h]
        y = reduce_scatter_to_sequence_region(self.attention(y), self.group)  # [b, s/p, h]
        return x + y + self.bias  # [b, s/p, h]
