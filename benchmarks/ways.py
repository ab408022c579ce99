"""What all ways to compute a layer on p ranks have in common, for `benchmarks.layers`.

A `Problem` is one computation with unsharded inputs, which are the same on all ranks, and with its solution in plain
torch. A `Way` is one library's share of this computation on this rank. A way's `cut` returns this rank's shard of an
unsharded tensor. The correct gradients are sharded by the same `cut`, so a library may sort its rows in an order of its
own.
"""

import contextlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

Cut = Callable[[str, Tensor], Tensor]


@dataclass
class Problem:
    title: str
    inputs: dict[str, Tensor]  # "x" and the parameters, unsharded
    upstream: Tensor | None  # gradient of the output; None if the output is a loss
    forward: Callable[..., Tensor]  # computes the output of **inputs in plain torch

    def solve(self) -> dict[str, Tensor]:
        """Return the output, and the gradients of x and of all parameters."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self.inputs.items()}
        output = self.forward(**leaves)
        output.backward(self.upstream)
        return {"output": output.detach()} | {name: gradient(leaf) for name, leaf in leaves.items()}


def gradient(leaf: Tensor) -> Tensor:
    """Return a leaf's gradient, and remove it from the leaf. Raises AssertionError if there is none."""
    found, leaf.grad = leaf.grad, None
    if found is None:
        raise AssertionError(f"no gradient reached a leaf {list(leaf.shape)}")
    return found


@dataclass
class Way:
    forward: Callable[[Tensor], Tensor]  # x -> output or loss
    parameters: dict[str, nn.Parameter]  # this rank's shards, by the names of the problem's inputs
    cut: Cut
    around_backward: Callable[[], AbstractContextManager] = contextlib.nullcontext
    threads: int = 1
    alone: bool = False  # rank 0 computes everything, and the other ranks wait


def parameters(problem: Problem, cut: Cut) -> dict[str, nn.Parameter]:
    """Return new parameters for a way that has no module."""
    return {name: nn.Parameter(cut(name, whole).clone()) for name, whole in problem.inputs.items() if name != "x"}


def fill(module: nn.Module, names: dict[str, str], problem: Problem, cut: Cut) -> dict[str, nn.Parameter]:
    """Copy the problem's values into a module's parameters, and return the parameters by the names of its inputs.

    names: for each of the problem's inputs except x, the name of the module's parameter
    """
    found = dict(module.named_parameters())
    if set(found) != set(names.values()):
        raise ValueError(f"the module has {sorted(found)}, and {sorted(names.values())} are named")
    with torch.no_grad():
        for name, theirs in names.items():
            found[theirs].copy_(cut(name, problem.inputs[name]))
    return {name: found[theirs] for name, theirs in names.items()}


def unsharded(_: str, whole: Tensor) -> Tensor:
    """The cut of a way that has everything on one rank."""
    return whole


def one_process(problem: Problem) -> Way:
    """Compute the problem in one process, using plain torch with as many threads as the other ways have ranks."""
    mine = parameters(problem, unsharded)
    return Way(lambda x: problem.forward(x=x, **mine), mine, unsharded, threads=dist.get_world_size(), alone=True)


class CopyIn(Function):
    """A hand-written f, which is the identity in forward, and sums the gradient over the ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        dx = dx.contiguous()
        dist.all_reduce(dx)
        return dx


class SumUp(Function):
    """A hand-written g, which sums its input over the ranks in place in forward, and is the identity in backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def start_megatron() -> None:
    """Start Megatron-Core, unless it has started. On a CPU, it asks for the number of the GPU even if it needs none."""
    warnings.filterwarnings("ignore", module="megatron")  # it warns that Transformer Engine and Apex are missing
    from megatron.core import parallel_state

    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())


def megatron_config(hidden_size: int, num_heads: int | None = None, **options: Any) -> Any:
    """Return the configuration of one layer. Megatron-Core wants a number of heads even for layers without heads."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=hidden_size, num_attention_heads=num_heads or dist.get_world_size(),
        tensor_model_parallel_size=dist.get_world_size(), use_cpu_initialization=True, **options,
    )  # fmt: skip


def parallelize(module: nn.Module, plan: dict[str, Any]) -> None:
    """Use torch's own tensor parallelism, which turns the module's parameters into DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
