"""Hooks that connect the recorder to functional collectives, which DTensor and torch.compile use.

Functional collectives call operators in the `_c10d_functional` namespace. Under the backend's dispatch key, we register
a kernel for each operator, which records the collective and then calls torch's kernel.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from tplab.runtime import carriers, shared_memory
from tplab.runtime.naming import flat
from tplab.runtime.recorder import Recorder

Active = Callable[[], Recorder | None]  # returns the recorder of this thread's collectives, if there is one
Unrecorded = Callable[[], AbstractContextManager[None]]

# operator: (kind of collective, whether the message is group-size times as large as the input)
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


def _torchs_own(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the kernel that torch registered for all backends. Our kernel takes precedence over it."""
    return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _wrap_operator(name: str, kind: str, whole: bool, active: Active, unrecorded: Unrecorded) -> Callable[..., Any]:
    operator = getattr(torch.ops._c10d_functional, name).default
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        recorder = active()
        if recorder is None:
            return _torchs_own(operator, *args, **kwargs)
        tensors = flat(args[0])
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        group = distributed_c10d._resolve_process_group(given["group_name"])
        carriers.pass_by(kind)
        op = given["reduce_op"].lower() if "reduce_op" in given else None
        entered = recorder.enter_collective(group, kind, tensors, group.size() if whole else 1, op, given.get("src"))
        outputs = None
        if name in ("all_reduce", "all_reduce_"):
            outputs = shared_memory.functional_all_reduce(group, args[0], str(op), in_place=name.endswith("_"))
        if outputs is None:
            with unrecorded():  # torch's kernel calls the backend from C++
                outputs = _torchs_own(operator, *args, **kwargs)
            for output in flat(outputs):
                shared_memory.functional_work(output)  # forgets an all-reduce at this address that nothing waited for
        recorder.functional_started(entered, flat(outputs))
        return outputs

    return kernel


def _wrap_wait(active: Active) -> Callable[[Tensor], Tensor]:
    operator = torch.ops._c10d_functional.wait_tensor.default

    def wait(tensor: Tensor) -> Tensor:
        if (work := shared_memory.functional_work(tensor)) is None:
            return _torchs_own(operator, tensor)
        work.wait()
        return tensor

    def wait_tensor(tensor: Tensor) -> Tensor:
        recorder = active()
        entered = recorder.of_functional(tensor) if recorder is not None else None
        if recorder is None or entered is None:
            return wait(tensor)
        recorder.waits(entered)
        try:
            result = wait(tensor)
        except BaseException as error:
            recorder.gave_up(entered, error)
            raise
        recorder.has_waited(entered)
        return result

    return wait_tensor


_library: torch.library.Library | None = None  # deleting it would unregister its kernels


def install(active: Active, unrecorded: Unrecorded) -> None:
    """Install the kernels. While `active()` returns None, they record nothing and only call torch's kernels."""
    global _library
    _library = torch.library.Library("_c10d_functional", "IMPL")
    for name, (kind, whole) in _FUNCTIONAL.items():
        if hasattr(torch.ops._c10d_functional, name):
            for key in ("CPU", "CUDA"):
                _library.impl(name, _wrap_operator(name, kind, whole, active, unrecorded), key)
    for key in ("CPU", "CUDA"):
        _library.impl("wait_tensor", _wrap_wait(active), key)
