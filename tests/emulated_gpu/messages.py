"""What is under way between the GPUs, and what the stream waits for.

    work = dist.irecv(x, 0)      under way: x must not be read or overwritten
    work.wait()                  the stream waits for it, and the program goes on
    y = x + 1                    now the program waits, too: here operators run at once instead of being queued

So a program here may wait earlier than on a GPU, but never later.
"""

import itertools
import threading
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

on_the_cpu = dist.Work.wait  # blocks until gloo is done


class Message:
    """A collective, send or receive, with the tensors that it reads or writes."""

    def __init__(self, work: Any, tensors: list[Tensor]) -> None:
        self.work, self.tensors = work, tensors
        self.is_waited_for = False

    def has_arrived(self) -> bool:
        return self.work.is_completed()

    def finish(self) -> None:
        """Block until it has arrived. Raises what gloo raised."""
        on_the_cpu(self.work)


class Carried(Message):
    """One of which gloo doesn't say that it has arrived until somebody waits for it. Here, a thread waits."""

    def __init__(self, work: Any, tensors: list[Tensor]) -> None:
        super().__init__(work, tensors)
        self._arrived = threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._carry, daemon=True).start()

    def has_arrived(self) -> bool:
        return self._arrived.is_set()

    def finish(self) -> None:
        self._arrived.wait()
        if self._error is not None:
            raise self._error

    def _carry(self) -> None:
        from tplab.runtime import hooks  # here, because the emulation starts before anything else is imported

        blocked = hooks.active._blocked if hooks.active is not None else set()
        blocked.add(threading.get_ident())  # as NCCL's own threads, it doesn't count as one that could end a deadlock
        try:
            on_the_cpu(self.work)
        except Exception as error:  # it is raised where the program waits for the message
            self._error = error
        blocked.discard(threading.get_ident())
        self._arrived.set()


class Messages:
    """The messages of this process that haven't arrived yet, by number."""

    def __init__(self, extension: ModuleType) -> None:
        self._extension = extension
        self._numbers = itertools.count()
        self._under_way: dict[int, Message] = {}
        self._number_of: dict[int, int] = {}  # by the id of the work, which lives as long as the message
        self._joined: dict[int, list[int]] = {}  # the messages of a batch, by the number of the last one
        extension.on_finish(self.finish)

    def start(self, kind: type[Message], work: Any, read: Iterable[Tensor], written: Iterable[Tensor]) -> int:
        number, written = next(self._numbers), list(written)
        message = kind(work, [*read, *written])
        self._under_way[number], self._number_of[id(work)] = message, number
        for tensor in message.tensors:
            self._extension.message_starts(tensor, number, any(tensor is one for one in written))
        return number

    def wait(self, work: Any) -> bool:
        """`Work.wait()`: what follows on the stream comes after the message. Returns whether it is one of ours."""
        number = self._number_of.get(id(work))
        if number is None:
            return False
        for one in self._joined.pop(number, [number]):
            self.is_waited_for(one)
        return True

    def join(self, numbers: list[int]) -> Any:
        """The work that stands for all messages of a batch: that of the last one."""
        self._joined[numbers[-1]] = numbers
        return self._under_way[numbers[-1]].work

    def is_waited_for(self, number: int) -> None:
        message = self._under_way.get(number)
        if message is None:
            return
        message.is_waited_for = True
        for tensor in message.tensors:
            self._extension.message_is_waited_for(tensor, number)

    def finish(self, number: int) -> None:
        """Block until the message has arrived."""
        message = self._under_way.get(number)
        if message is None:
            return
        try:
            message.finish()
        finally:
            for tensor in message.tensors:
                self._extension.message_has_arrived(tensor, number)
            self._under_way.pop(number, None)
            self._number_of.pop(id(message.work), None)

    def finish_all(self) -> None:
        """Block until all messages have arrived, as torch.cuda.synchronize() does."""
        for number in list(self._under_way):
            self.finish(number)

    def has_arrived(self, number: int) -> bool:
        message = self._under_way.get(number)
        return message is None or message.has_arrived()

    def awaited(self) -> list[int]:
        """The numbers of the messages that the stream waits for."""
        return [number for number, message in list(self._under_way.items()) if message.is_waited_for]
