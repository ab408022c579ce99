"""Chapter 03: the conjugate operators f and g, scatter and gather.

Wherever a replicated tensor meets a sharded computation, one of four operators connects them. They come in two pairs.
The backward of each operator is the forward of its partner, because the transpose of a sum over the ranks is a copy to
each rank.

              forward                                      backward
    f         x [.., h] replicated -> the same             dx = all-reduce(dy), dy [.., h] partial
    g         y = all-reduce(x), x [.., h] partial         dy [.., h] replicated -> the same

    scatter   x [.., h] replicated -> my part [.., h/p]    dx = all-gather(dy), dy [.., h/p]
    gather    y = all-gather(x), x [.., h/p]               dy [.., h] replicated -> my part [.., h/p]

Replicated means that every rank has the same full tensor. Partial means that every rank has one term of a sum. Each
operator runs one collective: g and gather run it in the forward pass, f and scatter in the backward pass. In a ring,
each rank sends 2(p-1)/p of the full tensor's bytes for an all-reduce, and (p-1)/p of them for an all-gather.

As in Megatron and torch's DTensor, sums have the dtype of the tensor. In bfloat16, each of the p terms and each
intermediate sum has only 8 bits of precision, so 256 + 1 = 256. For more precision, cast to float32 before g, which
doubles the traffic.

Except for `reduce_fresh`, no operator writes to its input, because collectives run on a contiguous copy. With several
ranks, writing to a result can't change the input either. Results are new memory, except that f returns a view if x
needs a gradient, and autograd refuses to overwrite that view. With a single rank, or without a process group, each
operator returns the input itself, like `nn.Identity`. torch.compile captures the operators in one graph, because it
replaces `dist.all_reduce` with the functional form of the collective. (Shoeybi et al. 2019, "Megatron-LM", section 3
and figure 3; megatron/core/tensor_parallel/mappings.py, where the names end in `_tensor_model_parallel_region`.)
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.sharding import shard, unshard


def copy_to_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Operator f: return x [..] (replicated) unchanged. In the backward pass, all-reduce the gradient dy [..].

    Use it where a replicated x enters a sharded computation. There, each rank's gradient of x comes only from its own
    shard, so the gradients have to be summed.
    """
    if rank_and_size(group)[1] == 1:
        return x
    return _Copy.apply(x, group) if needs_gradient(x) else x.clone()


def share_with_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Operator f, but return x itself if it needs no gradient, which saves a copy. Don't write to the result."""
    return copy_to_region(x, group) if needs_gradient(x) else x


def reduce_from_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Operator g: return the sum of x [..] over all ranks, using an all-reduce. The backward pass returns dy unchanged.

    Use it where a sharded computation ends in a sum. Backward doesn't need a reduction, because all ranks have the same
    dy.
    """
    return x if rank_and_size(group)[1] == 1 else _Reduce.apply(x, group)


def reduce_fresh(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Operator g, but overwrite x [..] with the sum where possible, which saves a copy.

    Use it only for a tensor that nothing else uses, such as a matmul's output, because later reads of x get the sum.
    """
    return x if rank_and_size(group)[1] == 1 else _Reduce.apply(x, group, not torch.compiler.is_compiling())


def scatter_to_region(x: Tensor, group: ProcessGroup | None = None, *, stride: int = 1) -> Tensor:
    """Return this rank's shard [.., h/p] of x [.., h], which is replicated. The backward pass all-gathers dy.

    `stride` has the same meaning as in `tplab.tensor.sharding`. Raises ValueError if h isn't divisible by p.
    """
    return x if rank_and_size(group)[1] == 1 else _Scatter.apply(x, group, stride)


def gather_from_region(x: Tensor, group: ProcessGroup | None = None, *, stride: int = 1) -> Tensor:
    """All-gather the ranks' shards x [.., h/p] to [.., h] on every rank. Backward returns this rank's shard of dy.

    `stride` has the same meaning as in `tplab.tensor.sharding`.
    """
    return x if rank_and_size(group)[1] == 1 else _Gather.apply(x, group, stride)


def needs_gradient(x: Tensor) -> bool:
    """Return True if autograd records what is computed from x."""
    return torch.is_grad_enabled() and x.requires_grad


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        return _Reduce.apply(dy, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None, overwrite: bool = False) -> Tensor:
        ctx.group = group
        if not overwrite or not x.is_contiguous():
            return all_reduce(x, group)
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        return _Copy.apply(dy, ctx.group), None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None, stride: int) -> Tensor:
        ctx.group, ctx.stride = group, stride
        return shard(x, -1, *rank_and_size(group), stride=stride)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        return _Gather.apply(dy, ctx.group, ctx.stride), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None, stride: int) -> Tensor:
        ctx.group, ctx.stride = group, stride
        return unshard(all_gather(x, group), -1, stride=stride)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        return _Scatter.apply(dy, ctx.group, ctx.stride), None, None


def all_reduce(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum of x over the ranks in a new tensor, unlike `dist.all_reduce`. Only g is differentiable."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather(x: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    """Return a list of x from every rank, in rank order. It isn't differentiable, unlike `gather_from_region`."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(rank_and_size(group)[1])]
    dist.all_gather(parts, x, group=group)
    return parts
