"""Chapter 06: queries, keys and values in one matmul, X [Wq; Wk; Wv]^T, with complete heads on each rank.

The three matrices are stored on top of each other, as in `nn.MultiheadAttention`, and each of them is split by heads:

    4 heads, 2 of K and V      p = 2     rank 0  [ q0 q1 | k0 | v0 ]     rank 1  [ q2 q3 | k1 | v1 ]

                               p = 4     rank 0  [ q0 | k0 | v0 ]        rank 2  [ q2 | k1 | v1 ]
                                         rank 1  [ q1 | k0 | v0 ]        rank 3  [ q3 | k1 | v1 ]

If we split the stack in the middle instead, [ q0 q1 q2 q3 | k0 k1 v0 v1 ], rank 0 would take queries for keys. A fresh
model trains anyway, because random rows have no names yet, but it fits no trained checkpoint, and no other p.
(Megatron sorts the rows by groups of heads, q0 q1 k0 v0 | q2 q3 k1 v1, so that one plain split is right.)

Grouped-query attention has fewer heads of K and V than of Q (Ainslie et al. 2023, arXiv 2305.13245). If there are also
fewer than ranks, c = p / num_kv_heads neighbors have copies. Each sees only its own queries, so its dWk and dWv are
terms of a sum over the c ranks, and summing them keeps the copies equal. This is f once more, for a weight.

    backward traffic: all-reduce of dX over p, as many elements as X; with copies also dWk, dWv [2 d, in] over c ranks
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from tplab.tensor.initialization import InitMethod, init_linear
from tplab.tensor.linear import Device
from tplab.tensor.mappings import reduce_from_region
from tplab.tensor.region import TENSOR_PARALLEL, Region
from tplab.tensor.sharding import Block, ShardedModule, Sharding, divide


def heads_on_rank(num_heads: int, num_kv_heads: int, world_size: int) -> tuple[int, int]:
    """(heads of Q, heads of K and V) on each rank. Raises ValueError, with the p that work, if there is no way.

    Head i of Q belongs to head i // (num_heads / num_kv_heads) of K and V, and is on the same rank.
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
    """The projection to Q, K and V: x [b, s, in] replicated -> this rank's q [b, n, s, d], k and v [b, m, s, d].

    n = num_heads/p, m = num_kv_heads/p, or 1 if there are fewer than p. num_heads = 0: [Wk; Wv] only, for
    cross-attention. Parameters: `weight` [(n + 2 m) d, in] and `bias`, shards of [Wq; Wk; Wv]. Options: see
    ColumnParallelLinear. With copies, all ranks must create the layer: the first one creates the copies' process group.
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
        per_rank_init: bool = False,
        async_grad_allreduce: bool = False,
        group: ProcessGroup | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.in_features, self.head_dim = in_features, head_dim
        self.init_method, self.per_rank_init = init_method, per_rank_init
        self.region, self.async_grad_allreduce = region, async_grad_allreduce
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
        """Draw new values, as one `nn.Linear` of the full [Wq; Wk; Wv] does; equal ones for equal heads."""
        init_linear(self.weight, self.bias, self.init_method, self.group, per_rank=self.per_rank_init)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"x {list(x.shape)} should be [b, s, {self.in_features}]: each rank needs all of x")
        weight = self._sum_over_copies(self.weight)
        bias = None if self.bias is None else self._sum_over_copies(self.bias)
        y = self.region.column_linear(x, weight, bias, self.group, self.async_grad_allreduce)  # [b, s, (n + 2 m) d]
        y = y.unflatten(-1, (sum(self.heads), self.head_dim)).transpose(1, 2)  # [b, n + 2 m, s, d]
        q, k, v = y.split(self.heads, dim=1)
        return q, k, v

    def _sum_over_copies(self, parameter: Tensor) -> Tensor:
        if self.copies_group is None:
            return parameter
        return _SumOverCopies.apply(parameter, self.heads[0] * self.head_dim, self.copies_group)

    def __deepcopy__(self, memo: dict) -> "QKVParallelLinear":
        memo[id(self.copies_group)] = self.copies_group  # a process group can't be copied
        return super().__deepcopy__(memo)

    def extra_repr(self) -> str:
        kind = f"{self.copies} copies of each K, V head, " if self.copies > 1 else ""
        return f"{kind}rank {self.rank} of {self.world_size} holds {self.heads} heads of {self.head_dim}"


class _SumOverCopies(Function):
    """f for the rows of K and V: parameter -> the same; backward: their gradient summed over the ranks with copies."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, first_row: int, group: ProcessGroup) -> Tensor:
        ctx.first_row, ctx.group = first_row, group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        q, kv = gradient.tensor_split([ctx.first_row])  # [n d, ..], [2 m d, ..]
        return torch.cat([q, reduce_from_region(kv, ctx.group)]), None, None


def copies_group(group: ProcessGroup | None, copies: int) -> ProcessGroup:
    """The group of this rank and its neighbors with the same K and V heads; created once, by all ranks of `group`."""
    return _neighbours(group or dist.group.WORLD, copies)


@cache
def _neighbours(group: ProcessGroup, count: int) -> ProcessGroup:
    if count == group.size():
        return group
    first = group.rank() // count * count
    ranks = [dist.get_global_rank(group, rank) for rank in range(first, first + count)]
    return dist.new_group(ranks, backend=dist.get_backend_config(group), use_local_synchronization=True)
