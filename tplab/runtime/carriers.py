"""Carriers decide when a message or collective counts as completed. They stand between the recorder and the backend.

    dist.all_reduce(x) ─▶ ProcessGroup.allreduce ─▶ [recorder] ─▶ [carrier] ─▶ gloo or NCCL

`slow_link` is a carrier that makes a link slower. `late`, an adversary in the checks, holds results back until the rank
waits for them. Carriers don't see the collectives that torch starts from C++ (functional collectives and those of DDP).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.utils._pytree import tree_map

from tplab.runtime.naming import flat
from tplab.runtime.recorder import Entered, Recorder

Replaced = Mapping[int, Tensor]  # the tensors to pass to the backend in place of the program's, by id of the latter
Call = Callable[[Replaced], Any]  # starts an operation and returns its Work, or None if nothing is left to wait for


@dataclass(frozen=True)
class Operation:
    """A message or collective that this rank is about to start.

    entered      the recorder's entry for it
    read         the tensors that the backend reads. It also reads those of `written` in an all-reduce and a reduce
    written      the tensors that the backend writes to
    """

    entered: Entered
    group: ProcessGroup
    read: Sequence[Tensor]
    written: Sequence[Tensor]

    @property
    def known(self) -> Any:
        """Its kind, bytes and call site (`where`), and its `call`, whose channel and number the members share."""
        return self.entered.known


class Carrier:
    """Starts the operations of this rank inside `hooks.carried_by`. A subclass may change when they're completed."""

    def start(self, operation: Operation, call: Call) -> Any:
        """Start the operation with `call`, and return its Work."""
        return call({})

    def passes_by(self, kind: str) -> None:
        """Note that torch is about to start a collective of this kind from C++, which no carrier can delay."""


class Carried(dist.Work):
    """The Work of an operation that is completed once the backend's `work` is and `finish` has returned."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work

    def finish(self) -> None:
        """Finish up after the backend has completed the operation. May be called several times."""

    def is_completed(self) -> bool:
        if not self.work.is_completed():
            return False
        self.finish()
        return True

    def block(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the operation. `dist.Work.wait` calls this, so whoever replaces that method sees this wait."""
        result = self.work.wait(*args, **kwargs)
        self.finish()
        return result

    def future(self) -> Any:
        """Return the Future for `dist.Work.get_future`. One of the backend's threads runs `finish` and completes it."""

        def finished(arrived: Future[Any]) -> Any:
            value = arrived.value()
            self.finish()
            return self.value(value)

        return self.work.get_future().then(finished)

    def value(self, value: Any) -> Any:
        """Return what the program should get for a value of the backend's."""
        return value

    def _source_rank(self) -> int:
        return int(self.work._source_rank())

    def synchronize(self) -> None:
        self.work.synchronize()
        self.finish()


class _Batch(Carried):
    """The Work of a batch, which NCCL starts as a whole."""

    def __init__(self, work: Any, parts: Sequence[Carried]) -> None:
        super().__init__(work)
        self.parts = parts

    def finish(self) -> None:
        for part in self.parts:
            part.finish()


active: Carrier | None = None


def started(
    recorder: Recorder, entered: Entered, group: ProcessGroup, method: Callable[..., Any],
    args: tuple[Any, ...], kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    """Call a method of the group, through the carrier if there's one, and return the Work.

    entered    the recorder's entry for this call
    """
    if active is None:
        return method(group, *args, **kwargs)
    known = entered.known
    read, written = _tensors(known.kind, args or tuple(kwargs.values()), known.peer == recorder.rank)
    operation = Operation(entered, group, read, written)

    def on_backend(replaced: Replaced) -> Any:
        tensors = tree_map(lambda item: replaced.get(id(item), item), (args, dict(kwargs)))
        return method(group, *tensors[0], **tensors[1])

    return active.start(operation, on_backend)


def _tensors(kind: str, args: Sequence[Any], is_root: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the tensors that a method of ProcessGroup reads, and those that it writes to."""
    if kind == "barrier":
        return [], []
    first = flat(args[0])
    if kind in ("all_reduce", "reduce"):  # on ranks other than the root, gloo leaves partial sums
        return [], first
    if kind in ("send", "recv", "broadcast"):
        reads = kind == "send" or (kind == "broadcast" and is_root)
        return (first, []) if reads else ([], first)
    return flat(args[1]), first


def of_batch(work: Any, works: Sequence[Any]) -> Any:
    """Return the Work of a batch whose calls returned `works`, and for which the backend returned `work` at its end."""
    parts = [each for each in works if isinstance(each, Carried)]
    return _Batch(work, parts) if parts and work is not None else work
