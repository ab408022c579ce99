"""Records every collective that this rank enters, in a list and on the board, where other processes can see it.

The recorder rejects calls that would otherwise hang or crash: a collective that differs from the matching one on
another rank, or a tensor whose elements aren't one block of memory. `hooks` calls it from inside torch.distributed.
"""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tplab.runtime.board import DEFAULT_GROUP, Board, Call, channel_of_messages
from tplab.runtime.failures import lost_connection
from tplab.runtime.naming import (
    caller,
    describe,
    dtype_name,
    is_one_block,
    layout,
    not_one_block,
    place_of,
    signature_of,
)
from tplab.runtime.records import Collective, Transfer
from tplab.runtime.streams import StreamWaits, StreamWatch

_OF_ALL_RANKS = ("all_gather", "gather", "scatter")  # their messages consist of the tensors of all ranks
_MOST_KNOWN = 4096  # a limit is needed because shapes may differ each time


class Mismatch(BaseException):
    """Raised when the kind or the arguments of a collective differ from the matching one on another rank.

    It isn't an Exception, so a program that catches exceptions can't hide it. The ranks couldn't continue anyway.
    """


class _Known(NamedTuple):
    """The part of a collective that is the same whenever the same line enters it with tensors of the same layout."""

    call: Call
    others: tuple[int, ...]  # the other members, which must enter the same collective
    kind: str  # this and what follows are the fields of `Collective`
    group: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    op: str | None
    peer: int | None
    where: str


class Entered:
    """A collective that this rank has entered, with its timing."""

    __slots__ = ("end", "known", "mark", "number", "others", "start", "tag", "transfer", "waited")

    def __init__(self, known: _Known, number: int, start: float) -> None:
        self.known, self.number, self.start = known, number, start
        self.end: float | None = None
        self.tag: int | None = None  # only for a receive from any rank, until the sender is known
        self.waited = 0.0
        self.transfer: Transfer | None = None  # on the clock of this process
        self.mark: Any = None  # where the stream may have started to wait
        self.others: Sequence[Entered] = ()  # if it's the first of a batch, the rest of the batch

    @property
    def joint(self) -> list[tuple[Call, int]]:
        """Its call and number, and those of the rest of its batch."""
        return [(entered.known.call, entered.number) for entered in (self, *self.others)]

    def collective(self, rank: int, origin: float) -> Collective:
        known = self.known
        start, end = self.start - origin, None if self.end is None else self.end - origin
        transfer = self.transfer
        if transfer is not None:
            transfer = Transfer(transfer.start - origin, transfer.end - origin, transfer.link)
        return Collective(
            rank, known.kind, known.group, self.number, known.shape, known.dtype, known.bytes, known.op, known.peer,
            known.where, start, end, self.waited, transfer,
        )  # fmt: skip


class Recorder:
    """Records the collectives of one rank. If there is a board, it also writes to the board.

    stream    measures how long the stream of this rank's GPU waits (None: not measured)
    watch     finds out what a rank with a GPU is blocked in (None if the rank computes on the CPU)
    report    called before a Mismatch is raised, so that the parent hears of it even if the program catches everything
    """

    def __init__(self, rank: int, board: Board | None = None, origin: float | None = None) -> None:
        self.rank, self.board = rank, board
        self.origin = time.monotonic() if origin is None else origin
        self.entered: list[Entered] = []
        self.stream: StreamWaits | None = None
        self.watch: StreamWatch | None = None
        self.report: Callable[[], None] = lambda: None
        self._blocked: set[int] = set()  # ids of the threads that are blocked in a collective
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._numbers: dict[str, int] = {}
        self._creations: dict[str, str] = {}  # by name of the group: the call site that created it
        self.pending: weakref.WeakKeyDictionary[Any, Entered] = weakref.WeakKeyDictionary()  # by Work or Future
        self._functional: dict[int, Entered] = {}
        self._batch: list[tuple[Entered, Any]] | None = None  # with the handle that each call returned

    def now(self) -> float:
        """Return the number of seconds since the launch began."""
        return time.monotonic() - self.origin

    def group_created(self, group: Any, where: str) -> None:
        """Note that the call at `where` has returned `group`, unless it's a placeholder for a group of other ranks."""
        if isinstance(group, ProcessGroup):
            self._creations[group.group_name] = where

    def _creation_of(self, group: ProcessGroup | None) -> str:
        """Return the call site that created the group, DEFAULT_GROUP, or "" if it isn't known."""
        if group is dist.group.WORLD:
            return DEFAULT_GROUP
        return self._creations.get(group.group_name, "") if group is not None else ""

    # Entering and leaving

    def enter_collective(
        self, group: ProcessGroup, kind: str, tensors: Sequence[Tensor], op: str | None, root: int | None
    ) -> Entered:
        """Enter a collective of `group`. `root` is a rank within the group."""
        name = group.group_name
        frame = caller()
        key = (name, kind, op, root, layout(tensors), frame and (id(frame.f_code), frame.f_lasti))
        known = self._known.get(key)
        if known is None:
            members = tuple(dist.get_process_group_ranks(group))
            peer = None if root is None else members[root]
            signature = signature_of(kind, tensors, op, peer)
            known = self._know(key, name, kind, members, tensors, op, peer, signature, frame, group)
        return self._calls_backend(self._enter(name, known))

    def enter_call(
        self, kind: str, channel: str, signature: str, members: tuple[int, ...], others: Sequence[int],
        group: ProcessGroup | None = None,
    ) -> Entered:  # fmt: skip
        """Enter a call in which ranks wait for each other without transferring tensors. It isn't kept in the record.

        members    the ranks that wait for each other in this call
        others     the ranks whose matching call must be the same as this one
        group      the process group that the call belongs to, if any
        """
        where = place_of(caller())
        call = Call(channel, kind, signature, members, where, -1, self._creation_of(group))
        others = tuple(rank for rank in others if rank != self.rank)
        return self._enter(channel, _Known(call, others, kind, members, (), "", 0, None, None, where), kept=False)

    def enter_message(
        self, group: ProcessGroup, kind: str, tensors: Sequence[Tensor], peer: int | None, tag: int
    ) -> Entered:
        """Enter a send or receive. `peer` is a rank within the group (None: receive from any rank)."""
        members = tuple(dist.get_process_group_ranks(group))
        if peer is not None and not 0 <= peer < len(members):
            raise ValueError(
                f"{kind} names rank {peer} of a group of {len(members)}: its ranks are 0 to {len(members) - 1}"
            )
        other = None if peer is None else members[peer]
        frame = caller()
        key = (kind, other, tag, layout(tensors), frame and (id(frame.f_code), frame.f_lasti))
        sender, receiver = (self.rank, other) if kind == "send" else (other, self.rank)
        channel = channel_of_messages(sender, receiver, tag)
        known = self._known.get(key)
        if known is None:
            pair = members if other is None else (sender, receiver)
            known = self._know(key, channel, kind, pair, tensors, None, other, describe(tensors), frame)
        entered = self._enter(channel, known)
        if other is None:
            entered.tag = tag
        return self._calls_backend(entered)

    def _know(
        self, key: tuple[Any, ...], channel: str, kind: str, members: tuple[Any, ...], tensors: Sequence[Tensor],
        op: str | None, peer: int | None, signature: str, frame: FrameType | None, group: ProcessGroup | None = None,
    ) -> _Known:  # fmt: skip
        for tensor in tensors:
            if not tensor.is_contiguous() and not is_one_block(tensor):
                raise ValueError(not_one_block(kind, tensor))
        where = place_of(frame)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if kind in _OF_ALL_RANKS:
            size *= len(members)
        first = tensors[0] if tensors else None
        shape = () if first is None else tuple(first.shape)
        dtype = "" if first is None else dtype_name(first.dtype)
        call = Call(channel, kind, signature, members, where, -1 if peer is None else peer, self._creation_of(group))
        others = tuple(rank for rank in members if rank != self.rank)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        known = _Known(call, others, kind, members, shape, dtype, size, op, peer, where)
        self._known[key] = known
        return known

    def _enter(self, channel: str, known: _Known, kept: bool = True) -> Entered:
        number = 0
        if known.kind != "recv" or known.peer is not None:  # otherwise, the sender has to be known first
            number = self._numbers[channel] = self._numbers.get(channel, 0) + 1
        if self.board is not None:
            self.board.write(self.rank, known.call, number)
            for rank in known.others if number else ():
                if self.board.contradicts(rank, known.call, number):
                    self.report()
                    raise Mismatch(f"rank {rank} enters something else than rank {self.rank} at {known.where}")
        entered = Entered(known, number, time.monotonic())
        if kept:
            self.entered.append(entered)
        if self.stream is not None:
            entered.mark = self.stream.mark()
        return entered

    def _calls_backend(self, entered: Entered) -> Entered:
        if self.watch is not None:
            self.watch.calls(entered.joint)
        return entered

    def started(self, entered: Entered, work: Any) -> None:
        """Note that the backend has accepted the collective. `work` is its handle.

        It's None if there's nothing left to wait for, as on NCCL with async_op=False, where the stream itself waits.
        """
        if self._batch is not None:  # the collective starts when the batch ends
            self._batch.append((entered, work))
            return
        self.call_has_returned(entered)
        if work is None:
            self._stream_waits_for(entered)
            self.completed(entered)
            return
        self.pending[work] = entered

    def is_blocked(self, thread: int) -> bool:
        """Return True if the thread is blocked in a collective, so that only other ranks can make it go on."""
        return thread in self._blocked or (self.watch is not None and self.watch.blocked_thread == thread)

    def completed(self, entered: Entered) -> None:
        if entered.end is None:
            entered.end = time.monotonic()

    def wait_for(self, entered: Entered, wait: Callable[[], Any]) -> Any:
        """Return `wait()`, which waits for the collective. On a GPU, the stream may wait for longer."""
        since = time.monotonic()
        if self.stream is not None:
            entered.mark = self.stream.mark()
        result = self.blocked_in(entered, wait)
        self._stream_goes_on(entered)
        self._stream_waits_for(entered)
        entered.waited += time.monotonic() - since
        self.completed(entered)
        return result

    def blocked_in(self, entered: Entered, call: Callable[[], Any]) -> Any:
        """Return `call()`, which returns only once the other ranks have joined. The board shows the wait.

        After a lost connection, the board keeps showing it.
        """
        if self.board is None:
            return call()
        wait = self.board.begin_wait(self.rank, entered.known.call, entered.number)
        self._blocked.add(threading.get_ident())
        try:
            return call()
        except BaseException as error:
            if lost_connection(str(error)):
                wait = None
            raise
        finally:
            self._blocked.discard(threading.get_ident())
            self.board.end_wait(self.rank, wait)

    def batch_begins(self) -> None:
        """Note that a batch begins. Its collectives and messages start when it ends, and they share a single `Work`."""
        self._batch = []

    def batch_ends(self, end: Callable[[list[Any]], Any]) -> Any:
        """Start the batch and return the batch's `Work`.

        end    calls the backend, and gets the handles that the calls of the batch have returned
        """
        batch, self._batch = self._batch or [], None
        works = [work for _, work in batch]
        if not batch:
            return end(works)
        first, *others = [entered for entered, _ in batch]
        first.others = others
        self._calls_backend(first)
        work = end(works)
        self.started(first, work)
        for entered in others:
            self._stream_goes_on(entered)
            self.completed(entered)
        return work

    def _stream_waits_for(self, entered: Entered) -> None:
        if self.watch is not None:
            self.watch.waits_for(entered.joint)

    def call_has_returned(self, entered: Entered) -> None:
        """Note that the call to the backend is over, for example because it has raised an error."""
        self._stream_goes_on(entered)
        if self.watch is not None:
            self.watch.called()

    def _stream_goes_on(self, entered: Entered) -> None:
        if self.stream is not None and entered.mark is not None:
            self.stream.held_since(entered.mark)

    def came_from(self, entered: Entered, source: int) -> None:
        """Note that a receive from any rank has completed. `source` is the sender's rank within the group."""
        known, sender = entered.known, entered.known.group[source]
        channel = channel_of_messages(sender, self.rank, entered.tag)
        entered.number = self._numbers[channel] = self._numbers.get(channel, 0) + 1
        pair = sender, self.rank
        call = Call(channel, known.kind, f"{list(known.shape)} {known.dtype}", pair, known.where, sender)
        entered.known = known._replace(call=call, others=(), group=pair, peer=sender)
        if self.board is not None:
            self.board.write(self.rank, call, entered.number)

    def functional_started(self, entered: Entered, outputs: Sequence[Tensor]) -> None:
        self.call_has_returned(entered)
        for output in outputs:
            self._functional[output.untyped_storage().data_ptr()] = entered

    def of_functional(self, output: Tensor) -> Entered | None:
        return self._functional.pop(output.untyped_storage().data_ptr(), None)

    def collectives(self, start: int = 0) -> list[Collective]:
        """Return the collectives entered so far, except for the first `start` of them."""
        return [entered.collective(self.rank, self.origin) for entered in self.entered[start:]]

    def forget(self, start: int) -> None:
        """Remove all but the first `start` collectives from the record. The board still shows the latest ones."""
        del self.entered[start:]
