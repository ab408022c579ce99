"""Chapter 06: queries, keys and values in one matmul, X [Wq; Wk; Wv]^T, with complete heads on each rank.

The three matrices are stacked vertically, as in `nn.MultiheadAttention`, and each matrix is split by heads:

    4 Q heads, 2 KV heads      p = 2     rank 0  [ q0 q1 | k0 | v0 ]     rank 1  [ q2 q3 | k1 | v1 ]

                               p = 4     rank 0  [ q0 | k0 | v0 ]        rank 2  [ q2 | k1 | v1 ]
                                         rank 1  [ q1 | k0 | v0 ]        rank 3  [ q3 | k1 | v1 ]

If we split the stack in the middle instead, [ q0 q1 q2 q3 | k0 k1 v0 v1 ], rank 0 would use queries as keys. A new
model would still train, because its rows are random anyway, but it couldn't load a trained checkpoint or run with a
different p. (Megatron sorts the rows by groups of heads, q0 q1 k0 v0 | q2 q3 k1 v1, so that one plain split is
correct.)

Grouped-query attention has fewer K and V heads than Q heads (Ainslie et al. 2023, arXiv 2305.13245). If there are also
fewer K and V heads than ranks, then c = p / num_kv_heads neighboring ranks have copies of the same head. Each copy sees
only its rank's queries, so dWk and dWv are summed over the c ranks, which keeps the copies equal. In other words, f
(chapter 03) is applied to a weight.

Traffic: in the backward pass, dX, which has as many elements as X, is all-reduced over the p ranks. If heads are
copied, dWk and dWv [2 d, in] are also all-reduced, over c ranks.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from tplab.collectives.subgroups import split
from tplab.tensor.initialization import InitMethod, init_linear
from tplab.tensor.linear import Device
from tplab.tensor.operators import reduce_from_region
from tplab.tensor.region import TENSOR_PARALLEL, Region
from tplab.tensor.sharding import Block, ShardedModule, Sharding, divide


def heads_on_rank(num_heads: int, num_kv_heads: int, world_size: int) -> tuple[int, int]:
    """Return (Q heads per rank, K and V heads per rank). If p doesn't work, raise ValueError with the values that do.

    Head i of Q uses head i // (num_heads / num_kv_heads) of K and V, and both heads are on the same rank.
    """
    if min(num_heads, num_kv_heads) < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} can't share num_kv_heads={num_kv_heads} evenly: each head of K and V serves the "
            "same number of heads of Q"
        )
    heads = divide(num_heads, world_size, name="num_heads", unit="heads")
    if num_kv_heads % world_size and world_size % num_kv_heads:
        fits = [
            p for p in range(1, num_heads + 1) if num_heads % p == 0 and not (num_kv_heads % p and p % num_kv_heads)
        ]
        raise ValueError(
            f"num_kv_heads={num_kv_heads} can't be divided over {world_size} ranks, nor copied to them evenly. "
            f"Use p in {', '.join(map(str, fits))}."
        )
    return heads, max(1, num_kv_heads // world_size)


class QKVParallelLinear(ShardedModule):
    """Projects x [b, s, in] (replicated) to this rank's q [b, n, s, d], k and v [b, m, s, d].

    Each rank has n = num_heads/p heads of Q and m = num_kv_heads/p heads of K and V, or m = 1 if there are fewer of
    these than ranks. In that case, heads are copied, and all ranks must create the layer, because it creates process
    groups. With num_heads = 0, only K and V are projected, for cross-attention. The parameters `weight`
    [(n + 2 m) d, in] and `bias` are shards of [Wq; Wk; Wv]. For options, see ColumnParallelLinear.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = True,
        *,
        region: Region = TENSOR_PARALLEL,
        init_method: InitMethod | None = None,
        async_grad_allreduce: bool = False,
        group: ProcessGroup | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.in_features, self.head_dim = in_features, head_dim
        self.init_method, self.region, self.async_grad_allreduce = init_method, region, async_grad_allreduce
        blocks = tuple(Block(heads * head_dim, unit=head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
        rows = [block.shard_length(self.world_size) for block in blocks]  # n d, m d, m d
        self.heads = [length // head_dim for length in rows]  # n, m, m
        self.copies = blocks[1].copies(self.world_size)
        self.copies_group = copies_group(group, self.copies) if self.copies > 1 else None
        weight = nn.Parameter(torch.empty(sum(rows), in_features, device=device, dtype=dtype))
        self.register_shard("weight", weight, Sharding(0, blocks=blocks))
        if bias:
            self.register_shard("bias", nn.Parameter(weight.new_empty(sum(rows))), Sharding(0, blocks=blocks))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize as if [Wq; Wk; Wv] were the weight of one `nn.Linear`. Copies of a head get equal values."""
        init_linear(self.weight, self.bias, self.init_method, self.group)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"x {list(x.shape)} should be [b, s, {self.in_features}]: each rank needs all of x")
        weight = self._sum_over_copies(self.weight)
        bias = None if self.bias is None else self._sum_over_copies(self.bias)
        y = self.region.column_linear(x, weight, bias, self.group, self.async_grad_allreduce)  # [b, s, (n + 2 m) d]
        parts = y.split([heads * self.head_dim for heads in self.heads], dim=-1)  # [b, s, n d], [b, s, m d] twice
        q, k, v = (
            part.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)
            for part, heads in zip(parts, self.heads, strict=True)
        )
        return q, k, v

    def _sum_over_copies(self, parameter: Tensor) -> Tensor:
        if self.copies_group is None:
            return parameter
        return _SumOverCopies.apply(parameter, self.heads[0] * self.head_dim, self.copies_group)


class _SumOverCopies(Function):
    """Operator f for the rows of K and V, which sums their gradient over the ranks that have copies of these rows."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, first_row: int, group: ProcessGroup) -> Tensor:
        ctx.first_row, ctx.group = first_row, group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        q, kv = gradient.tensor_split([ctx.first_row])  # [n d, ..], [2 m d, ..]
        return torch.cat([q, reduce_from_region(kv, ctx.group)]), None, None


def copies_group(group: ProcessGroup | None, copies: int) -> ProcessGroup:
    """Return the group of neighbors that share this rank's K and V heads. All ranks of `group` must call this."""
    return _neighbours(group or dist.group.WORLD, copies)


@cache
def _neighbours(group: ProcessGroup, count: int) -> ProcessGroup:
    if count == group.size():
        return group
    return split(group, [range(first, first + count) for first in range(0, group.size(), count)])
