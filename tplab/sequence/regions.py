"""Chapter 12: the operators of sequence parallelism, which replace f and g and shard activations along the sequence.

Tensor parallelism replicates norms, dropout and residuals, so p ranks have the same [b, s, h] and repeat the same
computation. These operations treat each token independently, so each rank can process s/p of the tokens instead:

    g, then f       [b, s, h] partial -> all-reduce -> [b, s, h] norm, dropout, residual, repeated on p ranks
    here            [b, s, h] partial -> reduce-scatter -> [b, s/p, h] norm, .. -> all-gather -> [b, s, h]

An all-reduce *is* a reduce-scatter followed by an all-gather, so the traffic is the same, but the activations in
between take 1/p of the memory. Again, there are two pairs of operators, and the backward of each operator is the
forward of its partner:

                    forward                                           backward
    gather          y = all-gather(x), x [b, s/p, h]                  dx = reduce-scatter(dy), dy [b, s, h] partial
    reduce-scatter  y = reduce-scatter(x), x [b, s, h] partial        dx = all-gather(dy), dy [b, s/p, h]

    scatter         x [b, s, h] replicated -> my part [b, s/p, h]     dx = all-gather(dy), dy [b, s/p, h]
    gather,         y = all-gather(x), x [b, s/p, h]                  dy [b, s, h] replicated -> my part [b, s/p, h]
     partial_grad=False

Which gather you need depends on the next computation. A sharded layer gives each rank one term of dy, so the terms have
to be summed. A replicated computation gives each rank the full dy, and summing it would give p times the gradient.

Traffic: each collective in the table moves the full [b, s, h]. In a ring, each rank sends (p-1)/p of its bytes.

Here the sequence is dimension 1, and a shard of it isn't contiguous in memory if b > 1, so each operator makes an extra
copy. That's why Megatron uses [s, b, h].

As in `tplab.tensor.operators`, no operator writes to its input, and sums have the tensor's dtype. With several ranks,
results are new memory. With a single rank, or without a process group, each operator returns the input itself.
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2, where the
first pair is called g and g-bar; megatron/core/tensor_parallel/mappings.py.)
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.operators import all_gather
from tplab.tensor.sharding import divide, shard, unshard


def scatter_to_sequence_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return this rank's tokens [b, s/p, ..] of the replicated x [b, s, ..]. The backward pass all-gathers dy.

    Raises ValueError if s isn't divisible by p.
    """
    return x if rank_and_size(group)[1] == 1 else _Scatter.apply(x, group)


def gather_from_sequence_region(x: Tensor, group: ProcessGroup | None = None, *, partial_grad: bool = True) -> Tensor:
    """All-gather the ranks' tokens x [b, s/p, ..] to y [b, s, ..] on every rank.

    partial_grad    True: y is used by a sharded computation, so dy is partial, and backward reduce-scatters it.
                    False: all ranks compute the same from y, so dy is replicated, and backward takes this rank's part.
    (Megatron: tensor_parallel_output_grad.)
    """
    return x if rank_and_size(group)[1] == 1 else _Gather.apply(x, group, partial_grad)


def reduce_scatter_to_sequence_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum x [b, s, ..] over the ranks and return this rank's tokens [b, s/p, ..]. The backward pass all-gathers dy.

    Raises ValueError if s isn't divisible by p.
    """
    return x if rank_and_size(group)[1] == 1 else _ReduceScatter.apply(x, group)


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        rank, p = rank_and_size(group)
        tokens_per_rank(x.shape[1], p)
        return shard(x, 1, rank, p)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        return _Gather.apply(dy, ctx.group, False), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None, partial_grad: bool) -> Tensor:
        ctx.group, ctx.partial_grad = group, partial_grad
        return unshard(all_gather(x, group), 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        partner = _ReduceScatter if ctx.partial_grad else _Scatter
        return partner.apply(dy, ctx.group), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        return _Gather.apply(dy, ctx.group, True), None


def reduce_scatter(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum x [b, s, ..] over the ranks and return this rank's tokens [b, s/p, ..].

    It isn't differentiable, unlike `reduce_scatter_to_sequence_region`.
    """
    parts, total = parts_and_place(x, group)
    dist.reduce_scatter(total, parts, group=group)
    return total


def parts_and_place(x: Tensor, group: ProcessGroup | None = None) -> tuple[list[Tensor], Tensor]:
    """Split x [b, s, ..] into one reduce-scatter input [b, s/p, ..] per rank. Also return an uninitialized output."""
    p = rank_and_size(group)[1]
    tokens_per_rank(x.shape[1], p)
    parts = [part.contiguous() for part in x.chunk(p, dim=1)]  # p tensors [b, s/p, ..]
    return parts, torch.empty_like(parts[0])


def tokens_per_rank(sequence_length: int, world_size: int) -> int:
    """Return s/p. Raises ValueError if p doesn't divide s."""
    return divide(sequence_length, world_size, name="sequence length s", unit="tokens")
