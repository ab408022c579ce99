"""Chapter 12: a column-parallel matmul whose x is sharded along the sequence: [b, s/p, in] -> [b, s, out/p].

dW = dY^T X needs all tokens of X again. Autograd can save the gathered [b, s, in], which is p times as large as the
rank's own part. Or autograd saves only this rank's tokens, and backward gathers the others again while it computes dX:

    gather_linear          forward   all-gather X, Y = X A                      saves X [b, s, in]
                           backward  dX = dY A^T, reduce-scatter dX
    gather_linear_again    forward   the same                                   saves this rank's X [b, s/p, in]
                           backward  all-gather X during dX = dY A^T, reduce-scatter dX during dW = dY^T X

Both functions take the arguments of `tplab.tensor.region.column_linear` and replace it in the two regions of this
chapter. A layer with `region=SEQUENCE_PARALLEL` (or `GATHER_AGAIN`) takes x [b, s/p, h] and returns y [b, s/p, h].
(Korthikanti et al. 2022, section 4.2.2, the end; Megatron: LinearWithGradAccumulationAndAsyncCommunication.)
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from tplab.collectives.by_hand import rank_and_size
from tplab.sequence.regions import (
    gather_from_sequence_region,
    parts_and_place,
    reduce_scatter_to_sequence_region,
)
from tplab.tensor.operators import all_gather
from tplab.tensor.region import Region, in_autocast_dtype
from tplab.tensor.sharding import unshard


def gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None, async_grad_allreduce: bool = False
) -> Tensor:
    """All-gather x [b, s/p, in] along the sequence, and multiply it by this rank's columns to get [b, s, out/p].

    async_grad_allreduce    overlap dW with the reduce-scatter of dX in backward; the result isn't twice differentiable
    """
    if not async_grad_allreduce or rank_and_size(group)[1] == 1 or torch.compiler.is_compiling():
        return F.linear(gather_from_sequence_region(x, group), weight, bias)
    return _GatherLinear.apply(*in_autocast_dtype(x, weight, bias), group, True)


def gather_linear_again(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None, async_grad_allreduce: bool = False
) -> Tensor:
    """Like `gather_linear`, but save only this rank's x. Backward always overlaps its communication with matmuls."""
    if rank_and_size(group)[1] == 1:
        return F.linear(x, weight, bias)
    return _GatherLinear.apply(*in_autocast_dtype(x, weight, bias), group, False)


class _GatherLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None, keep_whole: bool
    ) -> Tensor:
        whole = unshard(all_gather(x, group), 1)  # [b, s, in]
        ctx.save_for_backward(whole if keep_whole else x, weight)
        ctx.group, ctx.keep_whole = group, keep_whole
        return F.linear(whole, weight, bias)  # [b, s, out/p]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        dx = dw = db = arriving = leaving = None
        if ctx.needs_input_grad[1] and not ctx.keep_whole:
            x = x.contiguous()
            parts = [torch.empty_like(x) for _ in range(rank_and_size(ctx.group)[1])]  # p tensors [b, s/p, in]
            arriving = dist.all_gather(parts, x, group=ctx.group, async_op=True)
        if ctx.needs_input_grad[0]:
            dparts, dx = parts_and_place(dy @ weight, ctx.group)  # p tensors [b, s/p, in], partial; [b, s/p, in]
            leaving = dist.reduce_scatter(dx, dparts, group=ctx.group, async_op=True)
        if arriving is not None:
            arriving.wait()
            x = torch.cat(parts, dim=1)  # [b, s, in]
        dy = dy.flatten(0, 1)  # [b s, out/p]
        if ctx.needs_input_grad[1]:
            dw = dy.T @ x.flatten(0, 1)  # [out/p, in]
        if ctx.needs_input_grad[2]:
            db = dy.sum(0)  # [out/p]
        if leaving is not None:
            leaving.wait()
        return dx, dw, db, None, None


SEQUENCE_PARALLEL = Region(gather_linear, reduce_scatter_to_sequence_region, sequence_parallel=True)
GATHER_AGAIN = Region(gather_linear_again, reduce_scatter_to_sequence_region, sequence_parallel=True)
