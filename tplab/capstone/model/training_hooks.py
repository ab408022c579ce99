"""The parts of a training step that depend on which layers the model uses, and a function that copies weights.

Every model built by `tplab.capstone.training.build_model` stores them as `model.hooks`, and that module calls them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tplab.memory.config import GPTConfig


@dataclass(frozen=True, kw_only=True)
class TrainingHooks:
    """The model-specific parts of a training step.

    config, group       the model's config, and the process group of its tensor-parallel ranks
    around_backward     returns the context manager that backward has to run in
    finish_gradients    all-reduces gradients that are partial sums after backward. If None, `TrainingStep` does that
    norm                returns the gradient norm over a mesh. If None, `tplab.data.grad_norm` computes it
    idle                exercises whose answers weren't called when a small model was tried out before training
    """

    config: GPTConfig
    group: ProcessGroup | None = None
    around_backward: Callable[[], AbstractContextManager] = nullcontext
    finish_gradients: Callable[[], None] | None = None
    norm: Callable[[DeviceMesh | None], Tensor] | None = None
    idle: frozenset[str] = frozenset()


@torch.no_grad()
def copy_shards(source: nn.Module, target: nn.Module) -> None:
    """Copy this rank's parameters and `tensor_parallel` attributes. Raises ValueError if names or shapes differ."""
    given, own = dict(source.named_parameters()), dict(target.named_parameters())
    if given.keys() != own.keys():
        there, here = sorted(given.keys() - own.keys()), sorted(own.keys() - given.keys())
        raise ValueError(
            f"the model should have ParallelGPT's parameters, but it lacks {there[:4]} and has {here[:4]} instead"
        )
    for name, parameter in own.items():
        if list(local(parameter).shape) != list(given[name].shape):
            shapes = f"{list(local(parameter).shape)} instead of {list(given[name].shape)}, as in ParallelGPT"
            raise ValueError(f"on this rank, the shape of {name} is {shapes}")
        local(parameter).copy_(given[name])
        if hasattr(given[name], "tensor_parallel"):
            parameter.tensor_parallel = given[name].tensor_parallel  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or any other tensor unchanged."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
