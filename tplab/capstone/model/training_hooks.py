"""How a training step has to treat a model, where that depends on whose layers it is made of.

Every model that `tplab.capstone.training.build_model` builds has one as `model.hooks`; what calls it is there.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tplab.memory.config import GPTConfig


def nothing() -> None:
    """For gradients that are complete after backward."""


@dataclass(frozen=True, kw_only=True)
class TrainingHooks:
    """What a model brings along for its step.

    config, group       what it was built for; the group is that of its tensor-parallel ranks
    around_backward     a context that backward has to run in
    finish_gradients    adds up what backward has left in summands on the ranks
    norm                the gradient's length over a mesh; None: `tplab.data.grad_norm`
    idle                exercises whose answers are there, and which nothing has called when the model was tried
    """

    config: GPTConfig
    group: ProcessGroup | None = None
    around_backward: Callable[[], AbstractContextManager] = nullcontext
    finish_gradients: Callable[[], None] = nothing
    norm: Callable[[DeviceMesh | None], Tensor] | None = None
    idle: frozenset[str] = frozenset()
