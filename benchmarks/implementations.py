"""What the ways to compute a layer on p ranks have in common, for `benchmarks.layers`.

A `Problem` is one computation, whole, with its inputs equal on all ranks and its answer in plain torch. A `Way` is one
library's share of it on this rank. A way's `cut` turns each whole tensor into what this rank holds of it, and the same
cut is made of the right gradients; so a library that sorts its rows in an order of its own is compared all the same.
"""

import contextlib
import io
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
    inputs: dict[str, Tensor]  # "x" and the parameters, whole
    upstream: Tensor | None  # gradient of the output; None where it is a loss
    forward: Callable[..., Tensor]  # in plain torch, of **inputs
    target: Any = None  # ids, for a loss
    overwritten: bool = False  # whether a way may write over its part of x, which is then made anew for each step

    def solve(self) -> dict[str, Tensor]:
        """The output, and the gradients of x and of all parameters."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self.inputs.items()}
        output = self.forward(**leaves)
        output.backward(self.upstream)
        return {"output": output.detach()} | {name: gradient(leaf) for name, leaf in leaves.items()}


def gradient(leaf: Tensor) -> Tensor:
    """Take the gradient off a leaf."""
    found, leaf.grad = leaf.grad, None
    if found is None:
        raise AssertionError(f"no gradient reached a leaf {list(leaf.shape)}")
    return found


@dataclass
class Way:
    forward: Callable[[Tensor], Tensor]  # x -> output, or loss
    parameters: dict[str, nn.Parameter]  # as this rank holds them, by the names of the problem's inputs
    cut: Cut
    around_backward: Callable[[], AbstractContextManager] = contextlib.nullcontext
    threads: int = 1
    alone: bool = False  # rank 0 computes it all, and the others wait


def chunks(**dims: int) -> Cut:
    """The cut of most libraries: the tensors named here along these dimensions; all others are whole on every rank."""

    def cut(name: str, whole: Tensor) -> Tensor:
        if name not in dims:
            return whole
        return whole.chunk(dist.get_world_size(), dims[name])[dist.get_rank()].contiguous()

    return cut


def parameters(problem: Problem, cut: Cut) -> dict[str, nn.Parameter]:
    """New parameters for a way that has no module."""
    return {name: nn.Parameter(cut(name, whole).clone()) for name, whole in problem.inputs.items() if name != "x"}


def fill(module: nn.Module, names: dict[str, str], problem: Problem, cut: Cut) -> dict[str, nn.Parameter]:
    """Give a module's parameters the problem's values. `names`: of the problem's input -> of the module's parameter."""
    found = dict(module.named_parameters())
    if set(found) != set(names.values()):
        raise ValueError(f"the module has {sorted(found)}, and {sorted(names.values())} are named")
    with torch.no_grad():
        for name, theirs in names.items():
            found[theirs].copy_(cut(name, problem.inputs[name]))
    return {name: found[theirs] for name, theirs in names.items()}


def one_process(problem: Problem) -> Way:
    """No ranks at all: plain torch with as many threads as the others have ranks."""

    def keep(_: str, whole: Tensor) -> Tensor:
        return whole

    mine = parameters(problem, keep)
    return Way(lambda x: problem.forward(x=x, **mine), mine, keep, threads=dist.get_world_size(), alone=True)


class Fresh(Function):
    """x in new memory, so that it may be overwritten; its gradient goes through as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


class CopyIn(Function):
    """f, by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        dx = dx.contiguous()
        dist.all_reduce(dx)
        return dx


class SumUp(Function):
    """g, by hand, over its input."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def start_megatron() -> None:
    """Megatron-Core, on a CPU: it asks for the number of the GPU even where it needs none."""
    warnings.filterwarnings("ignore", module="megatron")  # that it does without Transformer Engine and Apex
    from megatron.core import parallel_state

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())


def megatron_config(hidden_size: int, num_heads: int | None = None, **options: Any) -> Any:
    """Of one layer; it wants a number of heads also where there are none."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=hidden_size, num_attention_heads=num_heads or dist.get_world_size(),
        tensor_model_parallel_size=dist.get_world_size(), use_cpu_initialization=True, **options,
    )  # fmt: skip


def start_fairscale() -> None:
    from fairscale.nn.model_parallel.initialize import initialize_model_parallel

    with contextlib.redirect_stdout(io.StringIO()):  # it says so
        initialize_model_parallel(dist.get_world_size())


def parallelize(module: nn.Module, plan: dict[str, Any]) -> None:
    """torch's own: the parameters of the module become DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
