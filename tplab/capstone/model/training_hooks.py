"""The parts of a training step that depend on whose layers a model is made of.

Every model that `tplab.capstone.training.build_model` builds has them as `model.hooks`, and that module calls them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tplab.memory.config import GPTConfig


def nothing() -> None:
    """Do nothing, which is right for gradients that are complete after backward."""


@dataclass(frozen=True, kw_only=True)
class TrainingHooks:
    """The model-specific parts of a training step.

    config, group       the model's config, and the group of its tensor-parallel ranks
    around_backward     a context manager that backward has to run in
    finish_gradients    all-reduces gradients that are partial sums after backward
    norm                the gradient's norm over a mesh; None: `tplab.data.grad_norm`
    idle                exercises whose answers the trial of the model didn't call
    """

    config: GPTConfig
    group: ProcessGroup | None = None
    around_backward: Callable[[], AbstractContextManager] = nullcontext
    finish_gradients: Callable[[], None] = nothing
    norm: Callable[[DeviceMesh | None], Tensor] | None = None
    idle: frozenset[str] = frozenset()
