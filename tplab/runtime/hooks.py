"""Hooks that connect the recorder to torch.distributed.

    dist.all_reduce(x) ─▶ ProcessGroup.allreduce ─▶ [recorder] ─▶ gloo or NCCL

Every function of torch.distributed eventually calls a Python method of `ProcessGroup`, so we wrap these methods.
Functional collectives call operators instead (see `functional_hooks`). Calls in which ranks wait for each other without
sending tensors, such as new_group, aren't recorded, but shown on the board, the shared memory in which ranks announce
what they're doing (see `board`). Collectives that torch starts from C++, as in DDP's reducer, are invisible to us.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from tplab.runtime import carriers, functional_hooks, shared_memory
from tplab.runtime.diagnosis import NEW_GROUP
from tplab.runtime.naming import flat
from tplab.runtime.recorder import Entered, Recorder
from tplab.runtime.records import Record
from tplab.runtime.streams import StreamWaits

active: Recorder | None = None


class _Thread(threading.local):
    """Thread-local flag that says whether this thread's collectives are recorded."""

    recorded = True


_thread = _Thread()


def activate(recorder: Recorder) -> None:
    """Record all further collectives of this process with `recorder`."""
    global active
    install()
    active = recorder


@contextmanager
def record(*, keep: bool = True) -> Iterator[Record]:
    """Record the collectives that this rank enters inside the block.

        with tplab.record() as section:
            y = layer(x)
        section.totals()        # {"all_reduce": Total(calls=1, bytes=98304)}

    The record is filled when the block ends. It stays empty if there is no process group.

    keep    If False, the collectives are kept only in this record. Enclosing blocks and the run's `Results.record`
            don't see them, so a program that runs for days doesn't run out of memory.
    """
    _activate_in_group()
    section = Record()
    start = len(active.entered) if active else 0
    try:
        yield section
    finally:
        if active:
            section.extend(active.collectives(start))
            if not keep:
                active.forget(start)


def _activate_in_group() -> None:
    """Record this process's collectives if nothing records them yet and there is a process group."""
    if active is None and dist.is_initialized():
        activate(Recorder(dist.get_rank()))


@contextmanager
def carried_by(carrier: carriers.Carrier) -> Iterator[None]:
    """Context manager in which a carrier, and no other one, starts this rank's messages and collectives."""
    _activate_in_group()
    before, carriers.active = carriers.active, carrier
    try:
        yield
    finally:
        carriers.active = before


@contextmanager
def marked(stream: StreamWaits) -> Iterator[None]:
    """Context manager that uses `stream` to measure how long this rank's GPU stream waits for collectives."""
    recorder = active
    stream.begun = stream.mark()
    if recorder is not None:
        recorder.stream = stream
    try:
        yield
    finally:
        if recorder is not None:
            recorder.stream = None
        stream.ended = stream.mark()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context manager that excludes this thread's collectives from recording and from deadlock detection.

    It's meant for collectives that shouldn't count as the program's communication, such as those that create a
    subgroup (`tplab.collectives.subgroups`).
    """
    before, _thread.recorded = _thread.recorded, False
    try:
        yield
    finally:
        _thread.recorded = before


def _recorder() -> Recorder | None:
    return active if _thread.recorded else None


_OPS = {  # by hash, because comparing two ReduceOps is slow
    hash(dist.ReduceOp(getattr(dist.ReduceOp, name))): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


def _op_name(options: Any) -> str | None:
    op = getattr(options, "reduceOp", None)
    return None if op is None else _OPS.get(hash(op), "premul_sum")  # this op exists only on NCCL and takes a factor


# method: kind, index of the argument with the input tensors
_METHODS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "gather": ("gather", 1),
    "gather_single": ("gather", 1),
    "gather_into_tensor": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "barrier": ("barrier", None),
}


def _wrap_collective(name: str) -> Callable[..., Any]:
    kind, index = _METHODS[name]
    reduces, rooted = kind in _REDUCING, kind in _ROOTED
    original = getattr(ProcessGroup, name)
    if name == "allreduce":
        original = shared_memory.instead_of(original, _op_name)

    def method(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder()
        if recorder is None:
            return original(self, *args, **kwargs)
        tensors = [] if index is None else flat(args[index] if len(args) > index else list(kwargs.values())[index])
        options = kwargs.get("opts", args[-1] if args else None)
        op = _op_name(options) if reduces else None
        root = getattr(options, "rootRank", None) if rooted else None
        entered = recorder.enter_collective(self, kind, tensors, op, root)
        return _started(recorder, entered, self, original, args, kwargs)

    return method


def _started(
    recorder: Recorder, entered: Entered, group: ProcessGroup, original: Callable[..., Any],
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Start the collective by calling the backend, and return its handle (a torch `Work`)."""
    try:
        work = carriers.started(recorder, entered, group, original, args, kwargs)
    except BaseException:
        recorder.call_has_returned(entered)
        raise
    recorder.started(entered, work)
    return work


def _wrap_message(name: str) -> Callable[..., Any]:
    original = getattr(ProcessGroup, name)

    def method(self: ProcessGroup, tensors: Sequence[Tensor], *args: Any) -> Any:
        recorder = _recorder()
        if recorder is None:
            return original(self, tensors, *args)
        peer, tag = (None, args[0]) if name == "recv_anysource" else args[:2]
        kind = "send" if name == "send" else "recv"
        entered = recorder.enter_message(self, kind, tensors, peer, tag)
        return _started(recorder, entered, self, original, (tensors, *args), {})

    return method


def _wrap_batches() -> None:
    """Wrap batches. On NCCL, `batch_isend_irecv` starts all messages together and returns a single `Work` for them."""
    start, end = ProcessGroup._start_coalescing, ProcessGroup._end_coalescing

    def _start_coalescing(self: ProcessGroup, *args: Any) -> None:
        start(self, *args)
        if (recorder := _recorder()) is not None:
            recorder.batch_begins()

    def _end_coalescing(self: ProcessGroup, *args: Any) -> Any:
        recorder = _recorder()
        if recorder is None:
            return end(self, *args)
        return recorder.batch_ends(lambda works: carriers.of_batch(end(self, *args), works))

    ProcessGroup._start_coalescing = _start_coalescing  # type: ignore[method-assign, assignment]
    ProcessGroup._end_coalescing = _end_coalescing  # type: ignore[method-assign, assignment]


torchs_wait, torchs_future = dist.Work.wait, dist.Work.get_future


def _wait(work: Any, *args: Any, **kwargs: Any) -> Any:
    return (work.block if isinstance(work, carriers.Carried) else partial(torchs_wait, work))(*args, **kwargs)


def _get_future(work: Any) -> Any:
    return work.future() if isinstance(work, carriers.Carried) else torchs_future(work)


def _wrap_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder()
        if recorder is None:
            return original(self, *args, **kwargs)
        entered = recorder.pending.get(self)
        if entered is None:
            return original(self, *args, **kwargs)

        def wait_for_it() -> Any:
            result = original(self, *args, **kwargs)
            if entered.tag is not None:
                recorder.came_from(entered, self._source_rank())
            return result

        return recorder.wait_for(entered, wait_for_it)

    return wait


def _wrap_get_future(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_future(self: Any) -> Any:
        future, recorder = original(self), _recorder()
        entered = recorder.pending.get(self) if recorder is not None else None
        if recorder is not None and entered is not None and entered.tag is None:  # a Future doesn't know the sender
            recorder.pending[future] = entered
        return future

    return get_future


# Calls in which ranks wait for each other without sending tensors. All ranks must create the same groups in the same
# order, so the recorder compares these calls between ranks, as it does for collectives.


def _wrap_new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that `new_group`, `new_subgroups` and `init_device_mesh` call."""

    def new_group(ranks: Any = None, *args: Any, use_local_synchronization: bool = False, **kwargs: Any) -> Any:
        recorder = _recorder()
        world = tuple(range(dist.get_world_size()))
        given = world if ranks is None else tuple(int(rank) for rank in ranks)
        kwargs["use_local_synchronization"] = use_local_synchronization
        if recorder is None or (use_local_synchronization and recorder.rank not in given):
            return original(ranks, *args, **kwargs)
        members = others = tuple(sorted(given))
        channel, signature = NEW_GROUP, f"ranks {list(members)}"
        if use_local_synchronization:  # torch derives the name from the number of groups so far, which must match
            channel = f"{NEW_GROUP} {members}"
            signature += f", as group {len(distributed_c10d._world.pg_names) + 1} of this rank"
        else:
            others = world
            if dist.group.WORLD.bound_device_id is not None:  # type: ignore[union-attr]
                members = world  # NCCL splits the communicator of all ranks
        entered = recorder.enter_call(NEW_GROUP, channel, signature, members, others)
        if recorder.rank not in members:  # torch returns a placeholder immediately
            return original(ranks, *args, **kwargs)
        group = recorder.blocked_in(entered, lambda: original(ranks, *args, **kwargs))
        recorder.group_created(group, entered.known.where)
        return group

    return new_group


def _wrap_joint_call(name: str) -> Callable[..., Any]:
    """Wrap a method of ProcessGroup that returns once all ranks of the group have called it."""
    original = getattr(ProcessGroup, name)

    def method(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder()
        if recorder is None:
            return original(self, *args, **kwargs)
        members = tuple(dist.get_process_group_ranks(self))
        entered = recorder.enter_call(name, self.group_name, "", members, members, self)
        result = recorder.blocked_in(entered, lambda: original(self, *args, **kwargs))
        recorder.group_created(result, entered.known.where)  # a barrier returns nothing
        return result

    return method


def set_default_timeout(timeout: timedelta) -> None:
    """Make this the timeout of all groups that are created without one, such as those of a device mesh."""
    distributed_c10d._get_default_timeout = lambda backend: timeout


# Calls on a group that this rank isn't a member of. torch would only warn and leave the tensor unchanged.


class NotAMember(BaseException):
    """Raised when a rank calls a collective on a group that it isn't a member of.

    It isn't an Exception, because torch's logging would catch an Exception and then fail itself, for lack of a group.
    """


def _refuse_foreign_group(function_name: str) -> None:
    raise NotAMember(
        f"rank {dist.get_rank()} calls {function_name} on a group that it is no member of (new_group gave it a "
        "placeholder): torch would return without communicating, and the tensor would stay as it was. "
        "Call it on the members only."
    )


_installed = False


def install() -> None:
    """Install the wrappers, once per process. Until a recorder is active, they only forward calls."""
    global _installed
    if _installed:
        return
    _installed = True
    for name in _METHODS:
        if hasattr(ProcessGroup, name):  # some exist only in newer versions of torch
            setattr(ProcessGroup, name, _wrap_collective(name))
    for name in ("send", "recv", "recv_anysource"):
        setattr(ProcessGroup, name, _wrap_message(name))
    _wrap_batches()
    dist.Work.wait = _wrap_wait(_wait)  # type: ignore[method-assign]
    dist.Work.get_future = _wrap_get_future(_get_future)  # type: ignore[method-assign]
    torch._C.Future.wait = _wrap_wait(torch._C.Future.wait)  # type: ignore[method-assign]
    shared_memory.Reduction.wait = _wrap_wait(shared_memory.Reduction.wait)  # type: ignore[method-assign]
    distributed_c10d._warn_not_in_group = _refuse_foreign_group  # type: ignore[assignment]
    distributed_c10d._new_group_with_tag = _wrap_new_group(distributed_c10d._new_group_with_tag)
    for name in ("monitored_barrier", "split_group"):
        setattr(ProcessGroup, name, _wrap_joint_call(name))
    functional_hooks.install(_recorder)
