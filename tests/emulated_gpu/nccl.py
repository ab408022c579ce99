"""A backend "nccl" for emulated GPUs. Gloo carries its messages, by NCCL's rules:

    tensors                 on a GPU, without gaps in memory, of a type that NCCL knows
    wait()                  doesn't block (see messages.py). Without async_op, there is no work to wait for
    batch_isend_irecv       returns a single work for all of its messages. It blocks until both ranks have called those
                            that are the first between them. Two ranks that are opposite each other in the group, as
                            with p = 2, need equally many of these, because they connect with a single exchange
    new_group               all ranks of the run take part, also those that aren't members
    split_group             all ranks of the parent group take part
    send and recv           the first one between two ranks of a group blocks until both have called it
Where NCCL would wait forever for a rank, these raise HangError after PATIENCE seconds.
"""

import datetime
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.emulated_gpu.messages import Carried, Message, Messages, on_the_cpu

PATIENCE = float(os.environ.get("EMULATED_GPU_PATIENCE", "60"))
TYPES = {
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bfloat16,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
# c10d's operators: which arguments they read and which they write, by the names in their schemas
WRITTEN = {
    "allreduce_": ("tensors",), "allreduce_coalesced_": ("tensors",), "broadcast_": ("tensors",),
    "allgather_": ("output_tensors",), "_allgather_base_": ("output_tensor",), "all_gather_single_": ("output_tensor",),
    "allgather_coalesced_": ("output_lists",), "allgather_into_tensor_coalesced_": ("outputs",),
    "reduce_scatter_": ("output_tensors",), "_reduce_scatter_base_": ("output_tensor",),
    "reduce_scatter_single_": ("output_tensor",), "reduce_scatter_tensor_coalesced_": ("outputs",),
    "reduce_": ("tensors",), "gather_": ("output_tensors",), "scatter_": ("output_tensors",),
    "alltoall_": ("output_tensors",), "alltoall_base_": ("output",), "all_to_all_single_": ("output",),
    "send": (), "recv_": ("tensors",), "recv_any_source_": ("tensors",),
}  # fmt: skip
TELL = {"allreduce_", "broadcast_", "allgather_", "_allgather_base_", "all_gather_single_"}  # work says when it's done
CHECKED = (  # methods of ProcessGroup
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "all_gather_single",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base",
    "all_to_all_single", "send", "recv", "recv_anysource",
)  # fmt: skip


class HangError(BaseException):
    """NCCL would wait forever here. It isn't an Exception, so that no program goes on after it."""


class _Thread(threading.local):
    from_python = False  # a method of ProcessGroup has been called from Python, so that somebody has its work
    batch: list[int] | None = None  # numbers of the messages in a batch that hasn't ended
    directions: list[tuple[int, int]] = []  # sender and receiver of these messages


_thread = _Thread()
_nccl: set[str] = set()  # names of the groups over NCCL
_bound: torch.device | None = None  # the device that the default group was created with
_splits = 0
_connected: set[tuple[str, int, int]] = set()  # group, sender, receiver
_exchanges: Counter[tuple[str, int]] = Counter()  # how often this rank has told a rank of a group what it connects


def is_nccl(group: ProcessGroup | None) -> bool:
    return (group or distributed_c10d._get_default_group()).group_name in _nccl


def install(extension: ModuleType, messages: Messages) -> None:
    """Replace functions of torch.distributed in this process, before anything else wraps them."""
    _groups(extension)
    _object_collectives()
    _operators(extension, messages)
    _batches(messages)
    dist.Work.wait = _wait(messages)  # type: ignore[method-assign]


def _wait(messages: Messages) -> Callable[..., Any]:
    def wait(self: Any, *args: Any, **options: Any) -> Any:
        return messages.wait(self) or on_the_cpu(self, *args, **options)

    return wait


# Groups


def _together(call: str, key: str, ranks: Iterable[int]) -> None:
    """Return when all of these ranks have come here."""
    _announce(key)
    _wait_for(call, key, ranks)


def _announce(key: str, value: object = "here") -> None:
    distributed_c10d._get_default_store().set(f"emulated/{key}/{dist.get_rank()}", str(value))


def _wait_for(call: str, key: str, ranks: Iterable[int]) -> None:
    store, rank, ranks = distributed_c10d._get_default_store(), dist.get_rank(), list(ranks)
    try:
        store.wait([f"emulated/{key}/{other}" for other in ranks], datetime.timedelta(seconds=PATIENCE))
    except RuntimeError:  # the time is up
        absent = [other for other in ranks if not store.check([f"emulated/{key}/{other}"])]
        raise HangError(f"EMULATED GPU: rank {rank} waits in {call} for ranks {absent}") from None


def _groups(extension: ModuleType) -> None:
    init, new, backend, config = (
        distributed_c10d.init_process_group,
        distributed_c10d.new_group,
        distributed_c10d.get_backend,
        distributed_c10d.get_backend_config,
    )

    def init_process_group(name: Any = None, *args: Any, device_id: torch.device | None = None, **options: Any) -> None:
        global _bound
        if name != "nccl":
            init(name, *args, **options)
            return
        if device_id is not None and device_id.index != extension.current_device():
            raise RuntimeError(f"EMULATED GPU: device_id {device_id} is not the current device")
        init("gloo", *args, **options)
        _bound = device_id
        _nccl.add(distributed_c10d._get_default_group().group_name)

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any,
        use_local_synchronization: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        global _splits
        in_nccl = is_nccl(None)
        nccl = in_nccl if backend is None else "nccl" in str(backend)
        member = ranks is None or dist.get_rank() in ranks
        if use_local_synchronization and not member:
            return None
        if in_nccl and _bound is not None and (nccl or not member):  # torch makes outsiders take part in any split
            _splits += 1
            _together(f"new_group({ranks})", f"split {_splits}", range(dist.get_world_size()))
        gloo = "gloo" if nccl or backend is None else backend
        group = new(ranks, timeout, gloo, *args, use_local_synchronization=use_local_synchronization, **options)
        if nccl and isinstance(group, ProcessGroup):
            _nccl.add(group.group_name)
        return group

    def split_group(parent: ProcessGroup | None = None, split_ranks: Any = None, *_: Any, **__: Any) -> Any:
        parent = parent or distributed_c10d._get_default_group()
        if not is_nccl(parent) or _bound is None:
            raise RuntimeError("EMULATED GPU: only a group over NCCL with a bound device can be split")
        members = dist.get_process_group_ranks(parent)
        count = len(distributed_c10d._world.pg_names)
        _together(f"split_group({split_ranks})", f"{parent.group_name} {count}", members)
        own = next((part for part in split_ranks if parent.rank() in part), None)
        if own is None:
            return None
        group = new([members[rank] for rank in own], None, "gloo", use_local_synchronization=True)
        _nccl.add(group.group_name)
        return group

    def get_backend(group: ProcessGroup | None = None) -> str:
        return "nccl" if is_nccl(group) else backend(group)

    def get_backend_config(group: ProcessGroup | None = None) -> str:
        return "cuda:nccl" if is_nccl(group) else config(group)

    replaced = (init_process_group, new_group, split_group, get_backend, get_backend_config)
    for module in (dist, distributed_c10d, torch.distributed.device_mesh):
        for function in replaced:
            if hasattr(module, function.__name__):
                setattr(module, function.__name__, function)
        if hasattr(module, "is_nccl_available"):
            module.is_nccl_available = lambda: True  # type: ignore[attr-defined]


def _object_collectives() -> None:
    """Objects travel in tensors on the device of the group."""

    def device_of(group: ProcessGroup | None = None) -> str:
        return "cuda" if is_nccl(group) else "cpu"

    distributed_c10d._get_object_coll_device = device_of  # type: ignore[assignment]
    distributed_c10d._get_pg_default_device = lambda group=None: torch.device(device_of(group))  # type: ignore[assignment]


# Operators


def _operators(extension: ModuleType, messages: Messages) -> None:
    for name in CHECKED:
        if hasattr(ProcessGroup, name):
            setattr(ProcessGroup, name, _checked(name, messages))
    global _library
    _library = torch.library.Library("c10d", "IMPL")
    for name in WRITTEN:
        if hasattr(torch.ops.c10d, name):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a kernel that is replaced
                _library.impl(name, _kernel(getattr(torch.ops.c10d, name).default, name, extension, messages), "CUDA")


_library: torch.library.Library | None = None  # without it, its kernels would go


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _checked(name: str, messages: Messages) -> Callable[..., Any]:
    original = getattr(ProcessGroup, name)

    def method(self: ProcessGroup, *args: Any, **options: Any) -> Any:
        if is_nccl(self):
            for tensor in _tensors((args, options)):
                _check(tensor, name)
        before, _thread.from_python = _thread.from_python, True
        try:
            work = original(self, *args, **options)
        finally:
            _thread.from_python = before
        asked = options.get("opts", args[-1] if args else None)
        if is_nccl(self) and getattr(asked, "asyncOp", True) is False:  # it has become part of the stream
            messages.wait(work)
            return None
        return work

    return method


def _check(tensor: Tensor, name: str) -> None:
    if not tensor.is_cuda:
        raise RuntimeError(f"EMULATED GPU: No backend type associated with device type {tensor.device.type} ({name})")
    if tensor.dtype not in TYPES:
        raise TypeError(f"EMULATED GPU: data type {tensor.dtype} is not supported by NCCL ({name})")
    if not tensor.is_contiguous() and not tensor.is_non_overlapping_and_dense():
        raise ValueError(f"EMULATED GPU: Tensors must be contiguous ({name})")


def _kernel(operator: Any, name: str, extension: ModuleType, messages: Messages) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    kind = Message if name in TELL else Carried

    def kernel(*args: Any, **options: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **options}
        group = ProcessGroup.unbox(given["process_group"])
        nccl = is_nccl(group)
        if name in ("send", "recv_", "recv_any_source_") and not nccl:
            raise RuntimeError("EMULATED GPU: gloo can't send or receive a tensor of a GPU")
        if name in ("send", "recv_"):
            direction = (group.rank(), given["dst"]) if name == "send" else (given["src"], group.rank())
            if _thread.batch is None:
                _connect(group, [direction])
            else:
                _thread.directions.append(direction)
        written = [tensor for argument in WRITTEN[name] for tensor in _tensors(given[argument])]
        read = [tensor for tensor in _tensors(given) if not any(tensor is one for one in written)]
        for tensor in written:
            extension.use(tensor, True, name)
        for tensor in read:
            extension.use(tensor, False, name)
        on_cpu = tree_map_only(Tensor, extension.on_cpu, (args, options))
        result = operator(*on_cpu[0], **on_cpu[1])
        *_, boxed = result if isinstance(result, tuple) else (result,)
        work = dist.Work.unbox(boxed)
        if nccl:
            number = messages.start(kind, work, read, written)
            if _thread.batch is not None:
                _thread.batch.append(number)
            if not _thread.from_python:  # the work stays in C++, and whatever called this waits for it there
                messages.is_waited_for(number)
        return (args[0], boxed) if isinstance(result, tuple) else result

    return kernel


def _connect(group: ProcessGroup, directions: Iterable[tuple[int, int]]) -> None:
    """Open the connections that these messages, each with its sender and receiver, are the first to need."""
    name, own = group.group_name, group.rank()
    new = [one for one in dict.fromkeys(directions) if (name, *one) not in _connected]
    _connected.update((name, *one) for one in new)
    for one in new:
        _announce(f"connection {name} {one}")
    for peer, count in Counter(sum(one) - own for one in new).items():
        if 2 * abs(peer - own) == group.size():
            _exchange(group, peer, count)
    for one in new:
        sender, receiver = (dist.get_global_rank(group, rank) for rank in one)
        call = f"the first message from rank {sender} to rank {receiver}"
        _wait_for(call, f"connection {name} {one}", (sender, receiver))


def _exchange(group: ProcessGroup, peer: int, count: int) -> None:
    """Tell the opposite rank how many connections this one opens. It is an error if that rank opens more."""
    name, own, other = group.group_name, dist.get_rank(), dist.get_global_rank(group, peer)
    _exchanges[name, peer] += 1
    key = f"exchange {_exchanges[name, peer]} in {name} between {sorted((own, other))}"
    _announce(key, count)
    _wait_for("the exchange of connections", key, [other])
    theirs = int(distributed_c10d._get_default_store().get(f"emulated/{key}/{other}"))
    if theirs > count:
        raise dist.DistBackendError(
            "EMULATED GPU: NCCL error in: ProcessGroupNCCL.cpp, internal error\nncclInternalError: Internal check "
            f"failed.\nLast error:\nMessage truncated : received {256 * theirs} bytes instead of {256 * count}"
        )


def _batches(messages: Messages) -> None:
    original = distributed_c10d.batch_isend_irecv

    def start(self: ProcessGroup, device: Any = None) -> None:
        _thread.batch, _thread.directions = [], []

    def end(self: ProcessGroup, device: Any = None) -> Any:
        numbers, _thread.batch = _thread.batch, None
        _connect(self, _thread.directions)
        return messages.join(numbers or [])

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
        group = operations[0].group if operations else None
        if not operations or not is_nccl(group):
            return original(operations)
        group = group or distributed_c10d._get_default_group()
        group._start_coalescing(operations[0].tensor.device)
        for one in operations:
            peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
            one.op(one.tensor, group=group, tag=one.tag, **peer)
        return [group._end_coalescing(operations[0].tensor.device)]

    ProcessGroup._start_coalescing, ProcessGroup._end_coalescing = start, end  # type: ignore[method-assign]
    for module in (dist, distributed_c10d):
        module.batch_isend_irecv = batch_isend_irecv  # type: ignore[attr-defined]
