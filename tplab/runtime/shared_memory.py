"""All-reduces through memory that is shared by the ranks on one machine, instead of through gloo's sockets.

    rank 0: copy x to slot 0 ─┐                       ┌─▶ add up all slots -> x
                              ├─▶ ring, and wait ─────┤
    rank 1: copy x to slot 1 ─┘                       └─▶ add up all slots -> x

gloo sends every message through a socket, even to a rank on the same machine. The operating system copies the message
into the socket's buffer and out again. Here, each rank writes its x once and reads the other ranks' x directly. (NCCL
has a similar transport, called SHM.) When a rank's slot is full, the rank rings: it writes a byte to a pipe of each
other rank. If a rank exits, its pipes close, and any rank that is waiting for it raises an error. Maxima and minima
work the same way.

If every rank has a core of its own, a waiting rank polls the pipes for 2 ms before it goes to sleep, because waking up
takes longer than most waits.

A group has two sets of slots, which its all-reduces use alternately. After a rank has written to one set, it may write
to this set again only two all-reduces later. The all-reduce in between finishes only after every rank has joined, and
each rank reads the first set before joining. So no rank overwrites values that another rank still needs.

`capstone/training/ranks.py` decides whether a run of the capstone uses this.
"""

import mmap
import os
import secrets
import select
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tplab.common.cores import cores

AllReduce = Callable[..., Any]  # ProcessGroup.allreduce
_SETS = 2
_KEPT = 256  # maximum number of entries in the cache of views over the slots
_LOOKS = 2e-3  # seconds that a waiting rank polls before it goes to sleep
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_OPERATIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}

_slots: WeakKeyDictionary[ProcessGroup, "_Slots"] = WeakKeyDictionary()


def share_memory(group: ProcessGroup | None, largest: int) -> bool:
    """Use shared memory for this group's all-reduces of at most `largest` bytes. All ranks in the group must call this.

    From then on, sums, maxima and minima of floating-point CPU tensors use shared memory. All other messages still use
    gloo. If the ranks can't share memory because they're on different machines, or not on Linux, everything uses gloo.
    Returns True if the ranks share memory. With largest=0, the group goes back to gloo.

    Every rank gets exactly the same result. With more than two ranks, a sum may be rounded differently than with gloo,
    because the ranks' tensors are added in rank order. A NaN on any rank makes the maximum and the minimum NaN. A group
    of p ranks needs 2 · p · `largest` bytes of memory.
    """
    group = group or dist.group.WORLD
    assert group is not None  # there is a process group
    size = dist.get_world_size(group)
    _slots.pop(group, None)
    on_linux = hasattr(os, "memfd_create")
    if not largest or size == 1 or dist.get_backend(group) != "gloo" or not on_linux:
        return False
    largest = -(-largest // mmap.PAGESIZE) * mmap.PAGESIZE
    with ExitStack() as opened, torch._C._DisableTorchDispatch(), torch.inference_mode(False):
        slots = _connected(group, mmap.PAGESIZE + _SETS * size * largest, opened)
        joined = torch.tensor(int(slots is not None))
        dist.all_reduce(joined, dist.ReduceOp.MIN, group=group)
        if slots is None or not joined:
            return False
    _slots[group] = slots
    return True


def _connected(group: ProcessGroup, size: int, opened: ExitStack) -> "_Slots | None":
    """Create the group's shared memory and a pipe from each rank to each other rank. Return None if that's impossible.

    When `opened` exits, it closes the descriptors that the other ranks needed only until they opened the same files.
    None of these files has a name in the file system, so nothing is left behind, even if a rank is killed.
    """
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    ends = [os.pipe() for _ in range(p)]  # (read, write) descriptors: this rank reads, and the other rank writes
    for _, write in ends:
        opened.callback(os.close, write)
    token = secrets.randbits(62)
    memory = -1
    if rank == 0:
        memory = os.memfd_create("tplab")
        opened.callback(os.close, memory)
        os.ftruncate(memory, size)
        os.pwrite(memory, token.to_bytes(8, "little"), 0)
    mine = torch.tensor([os.getpid(), memory, token, *(write for _, write in ends)])
    told = [torch.empty_like(mine) for _ in range(p)]
    dist.all_gather(told, mine, group=group)
    arrivals = {other: ends[other][0] for other in range(p) if other != rank}
    os.close(ends[rank][0])
    slots = _Slots(rank, arrivals, group)
    try:
        process, memory, token, *_ = told[0].tolist()
        slots.memory = _map(f"/proc/{process}/fd/{memory}", token, size)[mmap.PAGESIZE :].view(_SETS, p, -1)
        for other in arrivals:
            process, write = int(told[other][0]), int(told[other][3 + rank])
            slots.doorbells.append(os.open(f"/proc/{process}/fd/{write}", os.O_WRONLY))
    except OSError:
        return None
    return slots


def _map(path: str, token: int, size: int) -> Tensor:
    """Map the file and return its bytes. Raises OSError if this rank can't open it because it's on another machine."""
    file = os.open(path, os.O_RDWR)
    try:
        if os.pread(file, 8, 0) != token.to_bytes(8, "little"):
            raise FileNotFoundError(f"{path} exists here, but it isn't the file that the first rank created")
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)


def instead_of(gloos: AllReduce, op_name: Callable[[Any], str | None]) -> AllReduce:
    """Return a function that all-reduces through shared memory if possible, and otherwise calls `gloos`.

    op_name    returns the name of the operation in a `dist.AllreduceOptions`
    """

    def all_reduce(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if _slots and len(args) == 2 and isinstance(args[1], dist.AllreduceOptions) and len(args[0]) == 1:
            op = str(op_name(args[1]))
            if (slots := _slots_for(group, args[0][0], op)) is not None:
                return slots.all_reduce(args[0][0], op)
        return gloos(group, *args, **kwargs)

    return all_reduce


def _slots_for(group: ProcessGroup, x: Tensor, op: str) -> "_Slots | None":
    """Return the slots, or None to use gloo. All ranks decide alike, because their tensors are alike."""
    slots = _slots.get(group)
    if slots is None or op not in _OPERATIONS or x.device.type != "cpu" or x.dtype not in _DTYPES:
        return None
    if torch.compiler.is_compiling():  # after a graph break, torch.compile traces even this function, and can't
        return None
    if type(x) not in (Tensor, nn.Parameter):  # a DTensor, for example, whose values are in a different tensor
        return None
    return slots if x.nbytes <= slots.memory.shape[2] else None


class _Slots:
    """The shared memory of a group: `memory` [2, p, bytes], where memory[i, r] is rank r's slot in set i.

    arrivals     for each other rank, the pipe that it writes to when its slot is full
    doorbells    the pipes that this rank writes to when its own slot is full
    patience     the timeout in milliseconds, the same as gloo's
    looks        how many seconds a waiting rank polls before it goes to sleep
    parts        a cache for `_parts`, because creating these tensors takes longer than a small all-reduce
    """

    memory: Tensor

    def __init__(self, rank: int, arrivals: dict[int, int], group: ProcessGroup) -> None:
        self.rank, self.arrivals, self.patience = rank, arrivals, _timeout_of(group)
        self.looks = _LOOKS if dist.get_world_size() <= cores() else 0.0
        self.doorbells: list[int] = []
        self.turn = 0
        self.parts: dict[tuple[int, int, torch.dtype], tuple[Tensor, ...]] = {}
        self.latest: Reduction | None = None

    def __del__(self) -> None:
        for descriptor in (*self.arrivals.values(), *self.doorbells):
            os.close(descriptor)

    def all_reduce(self, x: Tensor, op: str) -> "Reduction":
        if self.latest is not None:
            self.latest.wait()
        with torch._C._DisableTorchDispatch():  # so that a memory meter doesn't count the transport's buffers
            x = x.data.as_strided((x.numel(),), (1,))  # in memory order, as in gloo
            slots = self._parts(x.nbytes, x.dtype)
            slots[self.rank].copy_(x)
        for doorbell in self.doorbells:
            with suppress(BrokenPipeError):  # that rank has exited, so `wait` will raise an error
                os.write(doorbell, b"!")
        self.turn = (self.turn + 1) % _SETS
        self.latest = Reduction(self, slots, x, op)
        return self.latest

    def _parts(self, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the first `size` bytes of every slot in the current set, as p tensors of the given dtype."""
        key = self.turn, size, dtype
        if key not in self.parts:
            if len(self.parts) == _KEPT:
                self.parts.clear()
            with torch.inference_mode(False):  # otherwise, nothing outside of inference mode could write to them
                self.parts[key] = self.memory[self.turn, :, :size].view(dtype).unbind()
        return self.parts[key]


class Reduction(dist.Work):
    """An all-reduce in progress: its p slots [n], and this rank's tensor x [n], which the result overwrites."""

    _tensors: tuple[Sequence[Tensor], Tensor] | None

    def __init__(self, group: _Slots, slots: Sequence[Tensor], x: Tensor, op: str) -> None:
        super().__init__()
        self._missing, self._tensors = dict(group.arrivals), (slots, x)
        self._rank, self._size, self._op = group.rank, x.nbytes, op
        self._looks, self._patience = group.looks, group.patience
        self._poll = select.poll()
        for arrival in self._missing.values():
            self._poll.register(arrival, select.POLLIN)

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the other ranks, and combine the slots. Raises RuntimeError if a rank has exited or time is up."""
        sleeps = time.monotonic() + self._looks
        while self._missing:
            if not self._look(0) and time.monotonic() >= sleeps and not self._look(self._patience):
                late = ", ".join(map(str, self._missing))
                raise RuntimeError(
                    f"Timed out after {self._patience / 1000:.0f} s in an all-reduce of {self._size:,} bytes: "
                    f"these ranks of the group haven't joined it: {late}"
                )
        return True

    def is_completed(self) -> bool:
        if self._missing:
            self._look(0)
        return not self._missing

    def _look(self, milliseconds: int) -> bool:
        """Record which slots are full, and combine them once all are. Return False if none filled up in that time."""
        ready = {descriptor for descriptor, _ in self._poll.poll(milliseconds)}
        if not ready:
            return False
        for rank, arrival in list(self._missing.items()):
            if arrival in ready:
                if not os.read(arrival, 1):
                    raise RuntimeError(f"Connection closed by peer: rank {rank} of the group has ended")
                self._poll.unregister(arrival)
                del self._missing[rank]
        if not self._missing:
            self._combine()
        return True

    def _combine(self) -> None:
        assert self._tensors is not None  # the slots are combined only once
        (slots, x), self._tensors = self._tensors, None  # the group keeps this object, which shouldn't keep x alive
        combine = _OPERATIONS[self._op]
        with torch._C._DisableTorchDispatch():
            first, second, *others = slots
            if not others:  # x is still in the cache, unlike this rank's slot
                first, second = (x, second) if self._rank == 0 else (first, x)
            combine(first, second, out=x)
            for slot in others:
                combine(x, slot, out=x)


def _timeout_of(group: ProcessGroup) -> int:
    """Return the group's timeout in milliseconds."""
    options: Any = group._get_backend(torch.device("cpu")).options
    return min(int(options._timeout.total_seconds() * 1000), 2**31 - 1)  # the largest timeout that poll accepts
