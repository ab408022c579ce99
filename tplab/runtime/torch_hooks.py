"""Hooks that show on the board (see `board`) which collectives torch starts from C++, as DistributedDataParallel does.

    DDP's reducer ─▶ ProcessGroup::allreduce in C++ ─▶ c10d::allreduce_ ─▶ [board] ─▶ gloo or NCCL

Such a collective doesn't pass through the methods that `hooks` wraps, but it calls an operator of the `c10d` namespace,
as all collectives do. For each operator that DDP uses, we register a kernel under the autograd keys, which torch leaves
unused for these operators. Calls that `hooks` has already recorded skip these kernels, which cost them no time.

The record doesn't contain these collectives, because they come from torch and not from the program.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tplab.runtime import carriers
from tplab.runtime.naming import flat
from tplab.runtime.recorder import Recorder

_KEYS = ("AutogradCPU", "AutogradCUDA")
_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_OURS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutogradCUDA
)

# operator: kind, index of the argument with the input tensors. DDP uses no others.
_OPERATORS: dict[str, tuple[str, int]] = {
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all_gather", 1),
}
_OPS = {op.value: name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}


def recorded_already() -> Any:
    """Context manager that makes this thread's collectives skip the kernels registered here."""
    return torch._C._ExcludeDispatchKeyGuard(_OURS)


def _wrap(operator: Any, kind: str, index: int, active: Callable[[], Recorder | None]) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(keys: Any, *args: Any) -> Any:
        recorder = active()
        tensors = flat(args[index])
        if recorder is None or any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
            return operator.redispatch(keys & _AFTER_AUTOGRAD, *args)
        carriers.pass_by(kind)
        given = dict(zip(names, args, strict=False))
        group = ProcessGroup.unbox(given["process_group"])
        op = _OPS[given["reduce_op"].op()] if "reduce_op" in given else None
        factor = group.size() if kind == "all_gather" else 1
        entered = recorder.enter_collective(group, kind, tensors, factor, op, given.get("root_rank"), kept=False)
        result = operator.redispatch(keys & _AFTER_AUTOGRAD, *args)
        recorder.started_in_torch(entered, dist.Work.unbox(result[1]))
        return result

    return kernel


_library: torch.library.Library | None = None  # deleting it would unregister its kernels


def install(active: Callable[[], Recorder | None]) -> None:
    """Install the kernels. While `active()` returns None, they only call torch's kernels."""
    global _library
    _library = torch.library.Library("c10d", "IMPL")
    for name, (kind, index) in _OPERATORS.items():
        operator = getattr(torch.ops.c10d, name).default
        for key in _KEYS:
            _library.impl(name, _wrap(operator, kind, index, active), key, with_keyset=True)
