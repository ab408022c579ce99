"""Writes down every collective that this rank enters: in its own list and, for the others to see, on the board.

It refuses what would end in silence or in a crash: a collective that differs from the one another rank entered at the
same place, and a tensor whose elements are not one block of memory. `hooks` calls it from inside torch.distributed.
"""

import os
import sys
import time
import weakref
from collections.abc import Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tplab.runtime.board import Board, Entry
from tplab.runtime.records import Collective

_TORCH = os.path.dirname(torch.__file__) + os.sep
_RUNTIME = os.path.dirname(__file__) + os.sep
_TPLAB = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Mismatch(BaseException):
    """Two ranks entered different collectives, or the same one with other arguments, at the same place.

    No Exception, so that a program which catches its errors and goes on cannot hide it: the ranks can't go on.
    """


class _Entered:
    """One collective while it runs."""

    __slots__ = ("described", "end", "slot", "start")

    def __init__(self, described: tuple[Any, ...], slot: int | None, start: float) -> None:
        self.described, self.slot, self.start = described, slot, start
        self.end: float | None = None

    def collective(self, rank: int) -> Collective:
        kind, group, number, shape, dtype, size, op, peer, where = self.described
        return Collective(rank, kind, group, number, shape, dtype, size, op, peer, where, self.start, self.end)


class Recorder:
    """The record of one rank. Writes to the board too, if there is one."""

    def __init__(self, rank: int, board: Board | None = None, origin: float | None = None) -> None:
        self.rank, self.board = rank, board
        self.origin = time.monotonic() if origin is None else origin
        self.entered: list[_Entered] = []
        self._numbers: dict[str, int] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._pending: weakref.WeakKeyDictionary[Any, _Entered] = weakref.WeakKeyDictionary()
        self._functional: dict[int, _Entered] = {}

    def now(self) -> float:
        """Seconds since the launch began."""
        return time.monotonic() - self.origin

    # Entering and leaving

    def enter_collective(
        self, group: ProcessGroup, kind: str, tensors: Sequence[Tensor], factor: int, op: str | None, root: int | None
    ) -> _Entered:
        """A rank enters a collective of `group`. The message has `factor` times the bytes of `tensors`."""
        name = group.group_name
        members = self._members_of(group, name)
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        peer = None if root is None else members[root]
        signature = _signature(kind, tensors, op, peer)
        return self._enter(name, number, kind, members, tensors, factor, op, peer, signature)

    def enter_message(
        self, group: ProcessGroup, kind: str, tensors: Sequence[Tensor], peer: int | None, tag: int
    ) -> _Entered:
        """A rank enters a send or receive; `peer` counts within the group (None: from anyone)."""
        members = self._members_of(group, group.group_name)
        if peer is None:  # which sender it pairs with is not known: numbers no longer tell who belongs to whom
            return self._enter("from anyone", 0, kind, members, tensors, 1, None, None, _describe(tensors))
        other = members[peer]
        sender, receiver = (self.rank, other) if kind == "send" else (other, self.rank)
        channel = f"{sender}>{receiver} tag {tag}"
        number = self._numbers[channel] = self._numbers.get(channel, 0) + 1
        return self._enter(channel, number, kind, (sender, receiver), tensors, 1, None, other, _describe(tensors))

    def _enter(
        self, channel: str, number: int, kind: str, members: tuple[int, ...], tensors: Sequence[Tensor],
        factor: int, op: str | None, peer: int | None, signature: str,
    ) -> _Entered:  # fmt: skip
        for tensor in tensors:
            if not tensor.is_contiguous() and not _is_one_block(tensor):
                raise ValueError(_not_one_block(kind, tensor))
        where = _call_site()
        slot = None
        if self.board is not None:
            entry = Entry(channel, number, kind, signature, members, where, -1 if peer is None else peer)
            slot = self.board.write(self.rank, entry)
            self._compare(entry)
        size = factor * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        first = tensors[0] if tensors else None
        shape = () if first is None else tuple(first.shape)
        dtype = "" if first is None else _dtype_name(first.dtype)
        described = (kind, members, number, shape, dtype, size, op, peer, where)
        entered = _Entered(described, slot, self.now())
        self.entered.append(entered)
        return entered

    def _compare(self, mine: Entry) -> None:
        assert self.board is not None
        for rank in mine.members:
            other = self.board.find(rank, mine) if rank != self.rank and mine.number else None
            if other and other.differs_from(mine):
                raise Mismatch(f"{mine.kind} here, {other.kind} on rank {rank}")

    def started(self, entered: _Entered, work: Any) -> None:
        """The backend has taken the collective; `work` is its handle (None: it has completed)."""
        if work is None:
            self.completed(entered)
        else:
            self._pending[work] = entered

    def completed(self, entered: _Entered) -> None:
        if entered.end is None:
            entered.end = self.now()

    def waits(self, entered: _Entered) -> None:
        """The rank begins to wait for the collective."""
        if self.board is not None:
            self.board.set_waiting(self.rank, entered.slot)

    def has_waited(self, entered: _Entered) -> None:
        """The collective has completed, and the rank goes on."""
        if self.board is not None:
            self.board.set_waiting(self.rank, None)
        self.completed(entered)

    def of_work(self, work: Any) -> _Entered | None:
        return self._pending.get(work)

    def functional_started(self, entered: _Entered, outputs: Sequence[Tensor]) -> None:
        for output in outputs:
            self._functional[output.untyped_storage().data_ptr()] = entered

    def of_functional(self, output: Tensor) -> _Entered | None:
        return self._functional.pop(output.untyped_storage().data_ptr(), None)

    def collectives(self, start: int = 0) -> list[Collective]:
        """What was entered, from the `start`-th on."""
        return [entered.collective(self.rank) for entered in self.entered[start:]]

    def _members_of(self, group: ProcessGroup, name: str) -> tuple[int, ...]:
        if name not in self._members:
            self._members[name] = tuple(dist.get_process_group_ranks(group))
        return self._members[name]


# Naming what is entered


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(tensors: Sequence[Tensor]) -> str:
    if not tensors:
        return ""
    first = tensors[0]
    text = f"{list(first.shape)} {_dtype_name(first.dtype)}"
    if not first.is_contiguous():
        text += f" with strides {list(first.stride())}"
    return text if len(tensors) == 1 else f"{len(tensors)} x {text}"


def _signature(kind: str, tensors: Sequence[Tensor], op: str | None, root: int | None) -> str:
    if kind == "all_to_all":  # the sizes may differ between ranks
        return _dtype_name(tensors[0].dtype) if tensors else ""
    parts = [_describe(tensors)] if tensors else []
    if op:
        parts.append(op)
    if root is not None:
        parts.append(f"root {root}")
    return ", ".join(parts)


def _is_one_block(tensor: Tensor) -> bool:
    """Whether the elements lie in memory without gaps and without sharing, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _not_one_block(kind: str, tensor: Tensor) -> str:
    return (
        f"{kind} of a tensor with shape {list(tensor.shape)} and strides {list(tensor.stride())}: its elements are not "
        "one block of memory (it is a slice or an expanded tensor), and the backend would read and write past them. "
        "Make a copy first, y = x.contiguous(), then communicate y, and use y from there on."
    )


def _call_site() -> str:
    """file:line:function of the innermost frame outside torch and tplab; of one inside tplab's layers if all are."""
    frame: FrameType | None = sys._getframe(3)
    of_tplab = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _TPLAB, "<")):
            break
        if of_tplab is None and file.startswith(_TPLAB) and not file.startswith(_RUNTIME):
            of_tplab = frame
        frame = frame.f_back
    frame = frame or of_tplab
    if frame is None:
        return "?:0:?"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}"
