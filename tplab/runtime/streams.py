"""Find out what a GPU's stream waits for, and for how long.

`StreamWatch` shows on the board (see `board`) which collective a rank with a GPU is blocked in.

On a GPU, `Work.wait()` doesn't block the CPU. It only makes the stream wait, and the program continues until it needs a
value. So a rank that is stuck in a collective looks as if it were computing. A thread of the rank therefore checks

    whether the program has moved           it counts as blocked if ten looks in a row, over about a second, find it at
                                            the same bytecode instruction and it has entered no further collective
    which collectives have completed        it queries an event that was recorded on the stream after each wait()

If the program is blocked, it's waiting for the oldest collective that hasn't completed. The parent then finds deadlocks
the way it does on the CPU. A program that's merely slow, say in a long matmul on the CPU, may also look blocked. That
alone doesn't count as a deadlock, because its collectives complete once the other ranks join them. The parent reports a
false deadlock only if a rank spends seconds in a single call on the CPU while it has an unfinished collective that the
other ranks join only after that call.

All messages of a batch complete together. If the program is blocked in a batch, the board shows a message whose partner
is missing, because the others may have all that they need.

`StreamWaits` measures how long the stream waits. This process can't time that with its clock, because it queues work
and continues. So a mark (`torch.cuda.Event`) is put on the stream before and after each place where a collective may
delay it:

    stream   ── matmuls ──|── all_reduce ──|── matmuls ──              blocking: may run on this very stream
    stream   ── matmuls ──||── matmuls ──|── waits ──|── matmuls ──    async: NCCL has its own stream, and this one
                                                                       waits in Work.wait() for the rest

The result is the sum of the times between these pairs of marks. Communication that overlaps with computation isn't
included, but waiting for a slower rank is.
"""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tplab.runtime.board import Board, Call

LOOK_SECONDS = 0.1
BLOCKED_LOOKS = 10  # how many consecutive looks must find the program in the same place


_Number = tuple[Call, int]
_Joint = Sequence[_Number]  # a collective, or the messages of a batch, which complete together


class StreamWatch:
    """Watches the thread that creates this object.

    event         creates an event for the current stream, such as `torch.cuda.Event`
    in_thread     called first in the watching thread, to select the rank's GPU, because new threads start with GPU 0
    """

    def __init__(self, rank: int, board: Board, event: Any, in_thread: Callable[[], None] = lambda: None) -> None:
        self.rank, self._board, self._new_event, self._in_thread = rank, board, event, in_thread
        self._watched = threading.get_ident()
        self._waited_for: deque[tuple[_Joint, Any]] = deque()  # the collectives that the stream waits for, with events
        self._calling: _Joint = ()  # the collective whose call hasn't returned yet
        self._place: object = None
        self._times_there = 0
        self._shown: _Number | None = None  # what this watch shows on the board
        self._wait: int | None = None  # the index of the wait that shows it

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="stream watch").start()

    # Called by the watched thread

    def calls(self, entries: _Joint) -> None:
        """Note that the rank calls the backend. The first message to a rank blocks there until both sides are ready."""
        self._calling = entries

    def called(self) -> None:
        """Note that the backend has returned from the call."""
        self._calling = ()

    def waits_for(self, entries: _Joint) -> None:
        """Note that from now on, the stream waits for this collective."""
        event = self._new_event()
        event.record()
        self._calling = ()
        self._waited_for.append((entries, event))

    # In the watching thread

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # a GPU error, which the program reports, too
            self._in_thread()
            while True:
                time.sleep(LOOK_SECONDS)
                self.look()

    def look(self) -> None:
        """Show on the board what the watched thread is blocked in, if anything."""
        while self._waited_for and self._waited_for[0][1].query():
            self._waited_for.popleft()
        frame = sys._current_frames().get(self._watched)
        place = frame and (id(frame), frame.f_lasti, self._board.entered(self.rank))
        if place != self._place:
            self._place, self._times_there = place, 0
        else:
            self._times_there += 1
        self._show(self._blocked_in() if self._times_there >= BLOCKED_LOOKS else None)

    def _blocked_in(self) -> _Number | None:
        entries = self._calling or (self._waited_for[0][0] if self._waited_for else ())
        lacking = (one for one in entries if not self._board.is_joined(*one))
        return next(lacking, entries[0] if entries else None)

    def _show(self, blocked_in: _Number | None) -> None:
        if blocked_in == self._shown:
            return
        self._board.end_wait(self.rank, self._wait)
        self._shown, self._wait = blocked_in, None
        if blocked_in is not None:
            self._wait = self._board.begin_wait(self.rank, *blocked_in)

    @property
    def blocked_thread(self) -> int | None:
        """The id of the watched thread if it's blocked, otherwise None."""
        return None if self._shown is None else self._watched


class StreamWaits:
    """Puts marks on the current stream of this rank's GPU while a block of the program runs.

    begun, ended    the marks at the beginning and at the end of the block (see `hooks.marked`)
    """

    def __init__(self, mark: type = torch.cuda.Event) -> None:
        self._mark = mark
        self._pairs: list[tuple[Any, Any]] = []
        self.begun: Any = None
        self.ended: Any = None

    def mark(self) -> Any:
        """Record a new mark after all work that has been queued on the stream so far, and return it."""
        mark = self._mark(enable_timing=True)
        mark.record()
        return mark

    def held_since(self, mark: Any) -> None:
        """Count the time from `mark` until now as time in a collective or waiting for one."""
        self._pairs.append((mark, self.mark()))

    @property
    def is_over(self) -> bool:
        """True if the GPU has reached the end of the block. Doesn't wait for the GPU."""
        return self.ended is not None and self.ended.query()

    @property
    def share(self) -> float:
        """The fraction of the time from begin to end that the stream spent waiting. Only valid once `is_over`."""
        whole = self.begun.elapsed_time(self.ended)
        held = sum(since.elapsed_time(until) for since, until in self._pairs)
        return min(1.0, held / whole) if whole else 0.0  # each of these times is rounded to about half a microsecond
