"""What a training step needs to know about a model."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tplab.memory.config import GPTConfig


@dataclass(frozen=True, kw_only=True)
class TrainingHooks:
    """The model-specific parts of a training step, which are stored as `model.hooks`.

    config, group    the model's config, and the process group of its tensor-parallel ranks
    norm             returns the gradient norm over a mesh. If None, `tplab.data.grad_norm` computes it
    """

    config: GPTConfig
    group: ProcessGroup | None = None
    norm: Callable[[DeviceMesh | None], Tensor] | None = None


@torch.no_grad()
def copy_shards(source: nn.Module, target: nn.Module) -> None:
    """Copy this rank's parameters and `tensor_parallel` attributes. Raises ValueError if names or shapes differ."""
    given, own = dict(source.named_parameters()), dict(target.named_parameters())
    has, wanted = ({name: list(parameter.shape) for name, parameter in held.items()} for held in (own, given))
    if wrong := [name for name in wanted | has if has.get(name) != wanted.get(name)]:
        raise ValueError(f"on this rank, {wrong[0]} has the shape {has.get(wrong[0])}, not {wanted.get(wrong[0])}")
    for name, parameter in own.items():
        parameter.copy_(given[name])
        if hasattr(given[name], "tensor_parallel"):
            parameter.tensor_parallel = given[name].tensor_parallel  # type: ignore[attr-defined]
