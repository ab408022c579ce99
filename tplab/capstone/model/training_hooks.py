"""The parts of a training step that depend on which layers a model is made of.

Every model built by `tplab.capstone.training.build_model` stores them as `model.hooks`, and that module calls them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tplab.memory.config import GPTConfig


@dataclass(frozen=True, kw_only=True)
class TrainingHooks:
    """The model-specific parts of a training step.

    config, group       the model's config, and the process group of its tensor-parallel ranks
    around_backward     returns the context manager that backward has to run in
    finish_gradients    all-reduces gradients that are partial sums after backward (None: `TrainingStep` does it)
    norm                returns the gradient norm over a mesh (None: use `tplab.data.grad_norm`)
    idle                exercises whose answers weren't called in the trial of the model
    """

    config: GPTConfig
    group: ProcessGroup | None = None
    around_backward: Callable[[], AbstractContextManager] = nullcontext
    finish_gradients: Callable[[], None] | None = None
    norm: Callable[[DeviceMesh | None], Tensor] | None = None
    idle: frozenset[str] = frozenset()
