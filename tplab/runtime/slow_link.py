"""Makes messages and collectives take as long as on a slower link, while the ranks' cores stay free.

    with slow_link(alpha=1e-3, bandwidth=0.2e9) as link:
        work = dist.all_reduce(x, async_op=True)
        y = a @ b                       # 30 ms
        work.wait()                     # returns 40 ms after the last rank's call, if that's what the link takes
    print(link.text)                    # as if the link had 200 MB/s and a latency of 1 ms

Between processes of one machine, gloo's threads and the matmuls compete for the same cores, so computing during a
transfer hides nothing. Here, waiting is sleeping, so the step takes max(compute, transfer), as on a GPU. For N bytes
(`Collective.bytes`) and p ranks, an operation is completed

    max(latest start of its members, end of the previous operation)  +

    all_reduce, barrier (0 bytes)      2(p-1) (alpha + N/(p bandwidth))       ring
    all_gather, reduce_scatter          (p-1) (alpha + N/(p bandwidth))       ring
    all_to_all, gather, scatter         (p-1) (alpha + N/(p bandwidth))       one by one
    broadcast, reduce             ceil(log2 p) (alpha + N/bandwidth)          tree
    send, recv                                 alpha + N/bandwidth

at the earliest, as `tplab.cost.collective` predicts. It takes longer if gloo does. The previous operation is that of
the same process group, or the same sender, receiver and tag. Different groups don't slow each other down, as if each
had links of its own.

Each rank notes in shared memory when it enters an operation (see `board`), so the ranks agree on the latest start
without a message, even with members outside of `slow_link`, which aren't delayed themselves. `time.monotonic` is the
same clock in all processes of a machine, on Linux and on macOS.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.nn.modules.module import Module, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from tplab.common.units import duration, size
from tplab.runtime import hooks
from tplab.runtime.board import STARTS_KEPT, Board
from tplab.runtime.carriers import Call, Carried, Carrier, Operation
from tplab.runtime.records import Transfer

_LOOK = 1e-3  # seconds between two looks for a member that hasn't started yet


class SlowLink(Carrier):
    """A link with `alpha` seconds of latency and `bandwidth` bytes per second in each direction. See `slow_link`."""

    def __init__(self, alpha: float = 0.0, bandwidth: float = math.inf) -> None:
        if not 0 <= alpha < math.inf:
            raise ValueError(f"alpha={alpha} seconds: a latency is at least 0 and finite")
        if not bandwidth > 0:
            raise ValueError(f"bandwidth={bandwidth} bytes per second: it has to be more than 0")
        self.alpha, self.bandwidth = alpha, bandwidth
        self._latest: dict[str, _Transfer] = {}  # by channel

    @property
    def text(self) -> str:
        """A caption for pictures of what ran on this link, such as "as if the link had 200 MB/s"."""
        parts = [f"{size(self.bandwidth)}/s"] if self.bandwidth < math.inf else []
        parts += [f"a latency of {duration(self.alpha)}"] if self.alpha else []
        return "as if the link had " + (" and ".join(parts) or "no latency and no limit")

    def seconds(self, kind: str, nbytes: float, p: int) -> float:
        """Return the time in seconds of an operation on `nbytes` bytes among p ranks, after its latest start."""
        if p == 1:
            return 0.0
        whole, part = (self.alpha + count / self.bandwidth for count in (nbytes, nbytes / p))
        if kind in ("send", "recv"):
            return whole
        if kind in ("broadcast", "reduce"):
            return (p - 1).bit_length() * whole
        return (2 if kind in ("all_reduce", "barrier") else 1) * (p - 1) * part

    def start(self, operation: Operation, call: Call) -> Any:
        backend = dist.get_backend(operation.group)  # "gloo", or what it is by device, such as "cpu:gloo,cuda:nccl"
        if "gloo" not in backend or any(not tensor.is_cpu for tensor in (*operation.read, *operation.written)):
            raise RuntimeError(
                "slow_link can only delay tensors on the CPU in groups with gloo, and this is a "
                f"{operation.known.kind} with {backend}: launch the ranks with backend='gloo'"
            )
        if not operation.entered.number:
            raise NotImplementedError("slow_link can't delay a recv from any rank: name the sender")
        channel = operation.known.call.channel
        previous = self._latest.get(channel)
        if previous is not None:
            previous.arrival()  # as soon as possible, because the board forgets the start of old operations
        transfer = _Transfer(self, operation, _board(), previous)
        self._latest[channel] = transfer
        return _SlowWork(call({}), transfer)

    def passes_by(self, kind: str) -> None:
        raise NotImplementedError(
            f"slow_link can't delay this {kind}, because torch starts it from C++, as in DTensor and all functional "
            "collectives: use the functions of torch.distributed"
        )


class _Transfer:
    """What the link does for one operation."""

    def __init__(self, link: SlowLink, operation: Operation, board: Board, previous: "_Transfer | None") -> None:
        self.link, self._entered, self._board, self._previous = link, operation.entered, board, previous
        self._channel, self._members = operation.known.call.channel, operation.known.call.members
        self._name = f"{operation.known.kind} #{operation.entered.number}"
        self._seconds = link.seconds(operation.known.kind, operation.known.bytes, len(self._members))
        self._arrival: float | None = None

    def arrival(self) -> float | None:
        """Return the time at which the operation completes, or None if a member hasn't started it yet."""
        if self._arrival is None:
            free = self._previous.arrival() if self._previous is not None else -math.inf
            starts = [self._start_on(rank) for rank in self._members]
            known = [start for start in starts if start is not None]
            if free is None or len(known) < len(starts):
                return None
            began = max(free, *known)
            self._previous, self._arrival = None, began + self._seconds
            self._entered.transfer = Transfer(began, self._arrival, self.link.text)
        return self._arrival

    def _start_on(self, rank: int) -> float | None:
        found = self._board.start_of(rank, self._channel, self._entered.number)
        if found is None:
            raise RuntimeError(
                f"rank {rank} has started more than {STARTS_KEPT} operations since {self._name}, and "
                "slow_link has forgotten when that one started: wait for some of them earlier"
            )
        return None if math.isnan(found) else found

    def finish(self) -> None:
        """Sleep until the operation is completed."""
        while (arrival := self.arrival()) is None:
            time.sleep(_LOOK)
        if (left := arrival - time.monotonic()) > 0:
            time.sleep(left)


class _SlowWork(Carried):
    def __init__(self, work: Any, transfer: _Transfer) -> None:
        super().__init__(work)
        self._transfer = transfer

    def finish(self) -> None:
        self._transfer.finish()

    def is_completed(self) -> bool:
        arrival = self._transfer.arrival()
        return arrival is not None and time.monotonic() >= arrival and bool(self.work.is_completed())


def _board() -> Board:
    if hooks.active is None or hooks.active.board is None:
        raise RuntimeError("slow_link only works on ranks of one machine, which tplab.launch has started")
    return hooks.active.board


@contextmanager
def slow_link(alpha: float = 0.0, bandwidth: float = math.inf) -> Iterator[SlowLink]:
    """Context manager that makes this rank's messages and collectives as slow as they would be on the given link.

    alpha        latency in seconds of each step of a collective, and of each message
    bandwidth    bytes per second that a rank sends, and receives at the same time

    All members of a group must run the same operations inside it, with the same alpha and bandwidth. Inside another
    slow_link, only the inner one counts. Results don't change. `link.text` describes the link for a picture, and each
    `Collective` of the record says when its transfer began and ended. Raises RuntimeError in a process that `launch`
    hasn't started, on a backend other than gloo, and if a group has more than 128 operations in flight on a rank.
    Raises NotImplementedError for a receive from any rank, for functional collectives, and for the forward pass of
    DistributedDataParallel, which sends from C++.
    """
    link = SlowLink(alpha, bandwidth)
    _board()

    def refuse_ddp(module: Module, _: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            raise NotImplementedError(
                "slow_link can't delay the all-reduces of DistributedDataParallel, because torch starts them from C++: "
                "average the gradients with dist.all_reduce"
            )

    handle = register_module_forward_pre_hook(refuse_ddp)
    try:
        with hooks.carried_by(link):
            yield link
    finally:
        handle.remove()
