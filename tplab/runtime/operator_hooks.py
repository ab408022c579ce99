"""Hooks for collectives that bypass the Python methods that `hooks` wraps. They call operators, which get our kernels.

    DTensor, torch.compile ─▶ _c10d_functional.all_reduce ─▶ [recorder] ─▶ torch's kernel ─▶ gloo or NCCL
    DDP's reducer ─▶ ProcessGroup::allreduce in C++ ─▶ c10d.allreduce_ ─▶ [board] ─▶ gloo or NCCL

The functional collectives of the first line are recorded, and their kernels take precedence over torch's. The second
line has the collectives that torch starts by itself. They're only shown on the board (see `board`), because they don't
come from the program. All collectives of Python call these operators, too, but skip the kernels, which we register
under the autograd keys, since torch leaves those unused.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, distributed_c10d

from tplab.runtime import carriers
from tplab.runtime.naming import flat
from tplab.runtime.recorder import Recorder

Active = Callable[[], Recorder | None]  # returns the recorder of this thread's collectives, if there is one

# functional operator: (kind of collective, whether the message is group-size times as large as the input)
_FUNCTIONAL: dict[str, tuple[str, bool]] = {
    "all_reduce": ("all_reduce", False),
    "all_reduce_": ("all_reduce", False),
    "all_reduce_coalesced": ("all_reduce", False),
    "all_reduce_coalesced_": ("all_reduce", False),
    "all_gather_into_tensor": ("all_gather", True),
    "all_gather_into_tensor_out": ("all_gather", True),
    "all_gather_into_tensor_coalesced": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", False),
    "broadcast": ("broadcast", False),
    "broadcast_": ("broadcast", False),
}

# operator that DDP uses: kind, index of the argument with the input tensors
_OF_DDP: dict[str, tuple[str, int]] = {
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all_gather", 1),
}
_OPS = {op.value: name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}
_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutogradCUDA
)


def recorded_already() -> Any:
    """Context manager that makes this thread's collectives skip the kernels for what torch starts by itself."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOGRAD)


def _torchs_own(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the kernel of a functional operator that torch registered for all backends."""
    return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _wrap_functional(name: str, active: Active) -> Callable[..., Any]:
    kind, whole = _FUNCTIONAL[name]
    operator = getattr(torch.ops._c10d_functional, name).default
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        recorder = active()
        if recorder is None:
            return _torchs_own(operator, *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        group = distributed_c10d._resolve_process_group(given["group_name"])
        carriers.pass_by(kind)
        op = given["reduce_op"].lower() if "reduce_op" in given else None
        factor = group.size() if whole else 1
        entered = recorder.enter_collective(group, kind, flat(args[0]), factor, op, given.get("src"))
        with recorded_already():
            outputs = _torchs_own(operator, *args, **kwargs)
        recorder.functional_started(entered, flat(outputs))
        return outputs

    return kernel


def _wrap_wait_tensor(active: Active) -> Callable[[Tensor], Tensor]:
    operator = torch.ops._c10d_functional.wait_tensor.default

    def wait_tensor(tensor: Tensor) -> Tensor:
        recorder = active()
        entered = recorder.of_functional(tensor) if recorder is not None else None
        if recorder is None or entered is None:
            return _torchs_own(operator, tensor)
        with recorder.waiting_for(entered):
            return _torchs_own(operator, tensor)

    return wait_tensor


def _wrap_ddp(name: str, active: Active) -> Callable[..., Any]:
    kind, index = _OF_DDP[name]
    operator = getattr(torch.ops.c10d, name).default
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


_libraries: list[torch.library.Library] = []  # deleting them would unregister their kernels


def install(active: Active) -> None:
    """Install the kernels. While `active()` returns None, they record nothing and only call torch's kernels."""
    functional, c10d = torch.library.Library("_c10d_functional", "IMPL"), torch.library.Library("c10d", "IMPL")
    _libraries.extend((functional, c10d))
    for key in ("CPU", "CUDA"):
        for name in _FUNCTIONAL:
            if hasattr(torch.ops._c10d_functional, name):  # some exist only in newer versions of torch
                functional.impl(name, _wrap_functional(name, active), key)
        functional.impl("wait_tensor", _wrap_wait_tensor(active), key)
        for name in _OF_DDP:
            c10d.impl(name, _wrap_ddp(name, active), f"Autograd{key}", with_keyset=True)
