"""Hooks that connect the recorder to functional collectives, which DTensor and torch.compile use.

    _c10d_functional.all_reduce ─▶ [recorder] ─▶ torch's kernel ─▶ gloo or NCCL

Functional collectives call operators instead of the methods that `hooks` wraps. We register a kernel for each operator
under the backend's dispatch key. It records the collective and then calls torch's kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from tplab.runtime import carriers
from tplab.runtime.naming import flat
from tplab.runtime.recorder import Recorder

Active = Callable[[], Recorder | None]  # returns the recorder of this thread's collectives, if there is one

_KINDS = {  # functional operator: kind of collective
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}
_library: torch.library.Library | None = None  # deleting it would unregister its kernels


def install(active: Active) -> None:
    """Register the kernels, once per process. As long as `active` returns None, they only call torch's."""
    global _library
    _library = torch.library.Library("_c10d_functional", "IMPL")
    for key in ("CPU", "CUDA"):
        for name in _KINDS:
            if hasattr(torch.ops._c10d_functional, name):  # some exist only in newer versions of torch
                _library.impl(name, _recorded(name, active), key)
        _library.impl("wait_tensor", _waiting(active), key)


def _torchs_own(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the kernel of a functional operator that torch registered for all backends."""
    return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _recorded(name: str, active: Active) -> Callable[..., Any]:
    operator = getattr(torch.ops._c10d_functional, name).default
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        recorder = active()
        if recorder is None:
            return _torchs_own(operator, *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        group = distributed_c10d._resolve_process_group(given["group_name"])
        if carriers.active is not None:
            carriers.active.passes_by(_KINDS[name])
        op = given["reduce_op"].lower() if "reduce_op" in given else None
        entered = recorder.enter_collective(group, _KINDS[name], flat(args[0]), op, given.get("src"))
        outputs = _torchs_own(operator, *args, **kwargs)  # it calls the backend from C++
        recorder.functional_started(entered, flat(outputs))
        return outputs

    return kernel


def _waiting(active: Active) -> Callable[[Tensor], Tensor]:
    operator = torch.ops._c10d_functional.wait_tensor.default

    def wait_tensor(tensor: Tensor) -> Tensor:
        recorder = active()
        entered = recorder.of_functional(tensor) if recorder is not None else None
        if recorder is None or entered is None:
            return _torchs_own(operator, tensor)
        return recorder.wait_for(entered, lambda: _torchs_own(operator, tensor))

    return wait_tensor
