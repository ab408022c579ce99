"""An adversary: messages arrive only when a rank waits for them, and every tensor that was touched too early is found.

    with late():
        work = dist.irecv(x, 0)       x is full of NaN
        work.wait()                   now the message is in x
        work = dist.isend(x, 1)
        x.zero_()
        work.wait()                   EarlyAccessError: 6 of 6 elements of x changed before ..

gloo usually delivers within microseconds, so a program that reads too early, or that reuses a send buffer too early, is
right most of the time on a laptop and wrong on a cluster. Inside `late`, it's wrong every time, without any sleeping.
The backend gets copies of the tensors, so nothing here makes one rank wait for another, and a right program can't get
stuck. While an operation is under way,

    a tensor that it writes to    holds NaN, the smallest integer of a signed dtype, the largest of an unsigned one, or
                                  True. The NaN is a signaling one, which any arithmetic turns into a quiet one, so
                                  `wait()` finds even an early `x.div_(p)`
    a tensor that it reads        is compared with a copy at `wait()`

An operation is under way until `wait()` returns or `is_completed()` returns True, which is never the answer to the
first question. (On gloo, `is_completed()` of a send, a receive or a reduce-scatter stays False until `wait()`, also
without `late`.) If the program calls `get_future()`, it may be told of the arrival at any time, so the values are there
once the backend has them.

Operations aren't delayed if they wait by themselves (blocking calls, and functional collectives, whose results are
waited for when they're first used), or if torch starts them from C++ (DistributedDataParallel).
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from tplab.runtime import hooks
from tplab.runtime.carriers import Call, Carried, Carrier, Operation
from tplab.runtime.failures import place

_SIGNALING = {  # bits of a NaN whose quiet bit isn't set
    torch.float64: (torch.int64, 0x7FF4_0000_0000_0000),
    torch.float32: (torch.int32, 0x7FA0_0000),
    torch.bfloat16: (torch.int16, 0x7FA0),
    torch.float16: (torch.int16, 0x7D00),
}


class EarlyAccessError(RuntimeError):
    """Raised when a program touches a tensor, or drops a request, while an operation on the tensor is under way."""


@contextmanager
def late() -> Iterator[None]:
    """Context manager that makes this rank's asynchronous messages and collectives complete as late as possible.

    All ranks should enter it. Raises EarlyAccessError, with the operation, the rank and the line that started it, if

    - elements of a tensor that is sent, received or reduced changed before `wait()` (says how many)
    - the memory of such a tensor was freed or exchanged before `wait()`, as by `x.data = ..`
    - an operation uses memory that an operation under way writes to, or writes to memory that one under way uses
    - the program dropped an operation's request without waiting for it. (Dropping only the tensor is fine, because
      torch keeps it alive as long as the request exists.)

    The first two are noticed at `wait()`, and the last at the next operation or at the end of the block.
    """
    carrier = _Late()
    with hooks.carried_by(carrier):
        yield
        carrier.raise_dropped()


@dataclass
class _Touched:
    """A tensor of the program while an operation on it is under way.

    kept      the same memory, which this keeps alive
    copy      the tensor that the backend got instead
    held      the bytes that the program must not change
    """

    tensor: Tensor
    copy: Tensor
    is_written: bool
    kept: Tensor = field(init=False)
    held: Tensor = field(init=False)
    storage: int = field(init=False)

    def __post_init__(self) -> None:
        self.kept, self.storage = self.tensor.data, self.tensor.untyped_storage().data_ptr()
        if self.is_written:
            _make_meaningless(self.kept)
        self.held = _bytes(self.kept).clone() if self.is_written else _bytes(self.copy)

    @property
    def range(self) -> tuple[int, int]:
        """The addresses of its first byte and of the one after its last."""
        return _range(self.kept)

    def finish(self) -> str:
        """Put what has arrived into the program's tensor. Return what the program did to it too early, or ""."""
        gone = self.kept.untyped_storage().nbytes() == 0 != self.kept.nbytes  # FSDP frees memory like this
        if gone or self.tensor.untyped_storage().data_ptr() != self.storage:
            return "its memory was freed or exchanged for other memory"
        changed = int((_bytes(self.kept) != self.held).any(1).sum())
        if self.is_written:
            self.kept.copy_(self.copy)
        return f"{changed} of {self.kept.numel()} elements changed" if changed else ""


@dataclass
class _UnderWay:
    operation: Operation
    touched: Sequence[_Touched]
    work: Any  # the backend's. It stays alive, because dropping it might crash the backend
    is_dropped: bool = False


class _LateWork(Carried):
    def __init__(self, number: int, under_way: dict[int, _UnderWay]) -> None:
        super().__init__(under_way[number].work)
        self.number, self.under_way, self.asked = number, under_way, False
        self.users = {id(one.copy): one.tensor for one in under_way[number].touched}

    def finish(self) -> None:
        if (ended := self.under_way.pop(self.number, None)) is None:
            return
        with torch._C._DisableTorchDispatch():  # neither a memory meter nor the check's own modes should see this
            problems = [problem for one in ended.touched if (problem := one.finish())]
        if problems:
            raise EarlyAccessError(
                f"{_name(ended.operation)}: {problems[0]} before wait(). Until then, the tensor belongs to the "
                "backend: don't write to it, free it or reuse it."
            )

    def is_completed(self) -> bool:
        before, self.asked = self.asked, True
        return before and super().is_completed()

    def value(self, value: Any) -> Any:
        return tree_map(lambda item: self.users.get(id(item), item), value)

    def __del__(self) -> None:
        if self.number in self.under_way:
            self.under_way[self.number].is_dropped = True


class _Late(Carrier):
    """All operations of this rank that are under way, by number."""

    def __init__(self) -> None:
        self._under_way: dict[int, _UnderWay] = {}
        self._numbers = itertools.count()

    def start(self, operation: Operation, call: Call) -> Any:
        self.raise_dropped()
        self._refuse_overlaps(operation)
        with torch._C._DisableTorchDispatch():
            written = [(tensor, _copy(tensor)) for tensor in operation.written]
            places = [_range(tensor) for tensor in operation.written]
            read = [(tensor, _copy(tensor)) for tensor in operation.read]
        work = call({id(tensor): copy for tensor, copy in (*written, *read)})
        with torch._C._DisableTorchDispatch():
            touched = [_Touched(tensor, copy, True) for tensor, copy in written]
            # A part of the result may also be the input, as in all_gather_into_tensor(x, x.chunk(p)[rank])
            touched += [_Touched(tensor, copy, False) for tensor, copy in read if not _overlaps(_range(tensor), places)]
        number = next(self._numbers)
        self._under_way[number] = _UnderWay(operation, touched, work)
        late = _LateWork(number, self._under_way)
        if work is None:  # NCCL's stream waits for the operation by itself
            late.finish()
            return None
        return late

    def raise_dropped(self) -> None:
        for one in list(self._under_way.values()):
            if one.is_dropped:
                raise EarlyAccessError(
                    f"{_name(one.operation)}: its request was dropped, and nothing has waited for it. Keep what the "
                    "call returns and call wait() on it, because only then may the tensor be used or freed."
                )

    def _refuse_overlaps(self, operation: Operation) -> None:
        mine = [(tensor, True) for tensor in operation.written] + [(tensor, False) for tensor in operation.read]
        for one in list(self._under_way.values()):
            for tensor, writes in mine:
                clashes = [touched.range for touched in one.touched if writes or touched.is_written]
                if _overlaps(_range(tensor), clashes):
                    raise EarlyAccessError(
                        f"{_name(one.operation)}, is under way, and {operation.known.kind} at "
                        f"{place(operation.known.where)} uses the same memory (a tensor of shape "
                        f"{list(tensor.shape)}). Wait for the first one before, or "
                        "give each of them a tensor of its own."
                    )


def _name(operation: Operation) -> str:
    rank = dist.get_rank()
    return (
        f"{operation.known.kind} #{operation.entered.number} of rank {rank}, started at {place(operation.known.where)}"
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.data.clone(memory_format=torch.preserve_format)


def _bytes(tensor: Tensor) -> Tensor:
    """Return a view [elements, bytes per element] of a tensor's elements, in the order of memory."""
    flat = tensor.data.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).view(tensor.numel(), tensor.element_size())


def _make_meaningless(tensor: Tensor) -> None:
    """Fill a tensor with values that nobody can mistake for right ones."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    flat = torch.view_as_real(flat) if tensor.is_complex() else flat
    if flat.dtype in _SIGNALING:
        dtype, bits = _SIGNALING[flat.dtype]
        flat.view(dtype).fill_(bits)
    elif flat.is_floating_point():
        flat.fill_(torch.nan)
    elif flat.dtype == torch.bool:
        flat.fill_(True)
    else:
        limits = torch.iinfo(flat.dtype)
        flat.fill_(limits.min or limits.max)


def _range(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def _overlaps(range_: tuple[int, int], others: Sequence[tuple[int, int]]) -> bool:
    start, end = range_
    return any(start < other_end and other_start < end for other_start, other_end in others)
