"""Several ranks in this process that take turns, so that everything happens in the same order each time.

    outcomes = take_turns(work, [0, 1])        runs work() as rank 0 and as rank 1

A rank runs until it calls `dist.barrier` or returns. Only then does the next one run. An answer that doesn't wait where
it should is noticed every time, because the first rank is always faster than the second one. And if the process is
killed, all ranks are killed, as in a power failure.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tplab.course.exercises.ch15.killing import CHANGES

ELSE = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "new_group", "recv",
    "reduce", "reduce_scatter", "scatter", "send",
)  # fmt: skip


class Stuck(RuntimeError):  # noqa: N818 (it names the state of the rank)
    """A rank's outcome if it waits in a barrier that another rank never enters."""


class Group:
    """The group of the ranks that take turns, in a world in which its first rank is rank `first`."""

    def __init__(self, size: int, first: int) -> None:
        self._size, self.first = size, first

    def rank(self) -> int:
        return _current().number

    def size(self) -> int:
        return self._size


class _Rank(threading.Thread):
    """A rank. It only runs between `resume` and its next barrier."""

    def __init__(self, number: int, size: int, group: Group | None, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.number, self.size, self.group, self.work = number, size, group, work
        self.may_run, self.has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self.done = self.gives_up = self.waits = False
        self.outcome: BaseException | None = None

    def resume(self) -> None:
        self.may_run.release()
        self.has_paused.acquire()

    def pause(self, waits: bool = True) -> None:
        self.waits = waits
        self.has_paused.release()
        self.may_run.acquire()
        if self.gives_up:
            raise Stuck("waits in a barrier that another rank never enters")

    def run(self) -> None:
        self.may_run.acquire()
        try:
            self.work()
        except BaseException as error:
            self.outcome = error
        self.done = True
        self.has_paused.release()


def take_turns(
    work: Callable[[], object], order: Sequence[int], group: Group | None = None, *, interleaved: bool = False
) -> list[BaseException | None]:
    """Run `work` as each of the ranks, and return what each of them has raised, or None.

    order: in which order the ranks run between two barriers
    group: the group that the ranks form, or None for the default group
    """
    ranks = [_Rank(number, len(order), group, work) for number in range(len(order))]
    _between_changes.install(on=interleaved)
    with _distributed():
        for rank in ranks:
            rank.start()
        while any(not rank.done for rank in ranks):
            if all(rank.done or rank.waits for rank in ranks):
                for rank in ranks:
                    rank.waits, rank.gives_up = False, any(rank.done for rank in ranks) and not rank.done
            for number in order:
                if not (ranks[number].done or ranks[number].waits):
                    ranks[number].resume()
    return [rank.outcome for rank in ranks]


class _BetweenChanges:
    """Audit hook that lets the other ranks run before each change of the disk."""

    installed = on = False

    def install(self, on: bool) -> None:
        if not self.installed:
            sys.addaudithook(self)
        self.installed, self.on = True, on

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event in CHANGES and isinstance(rank := threading.current_thread(), _Rank):
            rank.pause(waits=False)


_between_changes = _BetweenChanges()


def _current() -> _Rank:
    rank = threading.current_thread()
    assert isinstance(rank, _Rank)
    return rank


@contextmanager
def _distributed() -> Iterator[None]:
    """Context manager in which the functions of torch.distributed are those of the ranks that take turns."""

    def first(group: Any) -> int:
        own = _current().group
        return 0 if own is None or group is own else own.first

    def get_rank(group: Any = None) -> int:
        return first(group) + _current().number

    def get_world_size(group: Any = None) -> int:
        return first(group) + _current().size

    def barrier(group: Any = None, *_: Any, **__: Any) -> None:
        if first(group):
            raise Stuck("waits in a barrier of all ranks, but only those of its group save a checkpoint")
        _current().pause()

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("for this exercise, dist.get_rank(group) and dist.barrier(group) are all you need")

    instead: dict[str, Any] = dict.fromkeys(ELSE, refuse)
    instead |= {"get_rank": get_rank, "get_world_size": get_world_size, "barrier": barrier}
    before = {name: getattr(dist, name) for name in instead}
    vars(dist).update(instead)
    try:
        yield
    finally:
        vars(dist).update(before)
