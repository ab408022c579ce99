"""Chapter 04: how activations enter and leave a block of sharded weights.

    x -> f, matmul -> this rank's columns                       column_linear
    this rank's term -> g -> y, the same on every rank          reduce_fresh

f and g are operators of `tplab.tensor.operators`. Every parallel layer has a `region`, which determines how x enters
the layer and how y leaves it. With `TENSOR_PARALLEL`, x and y are replicated. Chapter 12 adds `SEQUENCE_PARALLEL`, in
which each rank has only its own tokens of x and y.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.operators import reduce_fresh, share_with_region


@dataclass(frozen=True)
class Region:
    """The operators at both ends of a block of sharded weights.

    column_linear        (x, weight, bias, group, async_grad_allreduce) -> y [.., out/p]; includes f
    leave                (y, group) -> y; applies g and may overwrite its input, so nothing else may use that tensor
    sequence_parallel    True if x and y contain only this rank's tokens, [b, s/p, h]. Dropout between two blocks then
                         differs between ranks, and parameters used there get gradients only from this rank's tokens
    """

    column_linear: Callable[..., Tensor]
    leave: Callable[..., Tensor]
    sequence_parallel: bool = False

    def mark(self, module: nn.Module, *names: str) -> None:
        """Mark a module's parameters that are used between two blocks: `param.sequence_parallel = True`.

        Without sequence parallelism, this does nothing. The names are also stored on the module, because copy.deepcopy
        and to_empty create new parameters without the attribute.
        """
        if not self.sequence_parallel:
            return
        module.sequence_parallel_parameters = names  # type: ignore[assignment]
        for name in names:
            if (parameter := module._parameters.get(name)) is not None:
                parameter.sequence_parallel = True  # type: ignore[attr-defined]


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None, async_grad_allreduce: bool = False
) -> Tensor:
    """Apply f, then the matmul with this rank's columns. Maps x [.., in] (replicated) to [.., out/p]."""
    if not async_grad_allreduce or rank_and_size(group)[1] == 1 or torch.compiler.is_compiling():
        return F.linear(share_with_region(x, group), weight, bias)
    return _LinearAsync.apply(*in_autocast_dtype(x, weight, bias), group)


def in_autocast_dtype(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Cast the operands of a handwritten matmul to autocast's dtype if autocast is enabled."""
    kind = first.device.type
    if not torch.is_autocast_enabled(kind):
        return first, *others
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if operand is None else operand.to(dtype) for operand in (first, *others))


class _LinearAsync(Function):
    """f and the matmul in one Function, whose backward overlaps the all-reduce of dX with the matmul for dW."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)  # [.., out/p]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        dx = dw = db = travelling = None
        if ctx.needs_input_grad[0]:
            dx = (dy @ weight).contiguous()  # [.., in], partial
            travelling = dist.all_reduce(dx, group=ctx.group, async_op=True)
        dy = dy.reshape(-1, dy.shape[-1])  # [b s, out/p]
        if ctx.needs_input_grad[1]:
            dw = dy.T @ x.reshape(-1, x.shape[-1])  # [out/p, in]
        if ctx.needs_input_grad[2]:
            db = dy.sum(0)  # [out/p]
        if travelling is not None:
            travelling.wait()
        return dx, dw, db, None


TENSOR_PARALLEL = Region(column_linear, reduce_fresh)
