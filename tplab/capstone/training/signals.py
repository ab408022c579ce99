"""Requests to stop a run: SIGTERM, or a file called `stop` in its folder. The run saves a checkpoint and ends.

Clusters send SIGTERM some time before they take a machine away. It may reach only some of the ranks, or reach them
during different steps, so a rank just notes it and informs the others in the next all-reduce (`step_summary`). torchrun
forwards the signal, so its ranks may get it twice in quick succession. A later one ends the rank immediately.

The file is for people who can't send a signal to the process. The first rank looks for it after each step.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from tplab.runtime import hooks, inside

_HANDED_ON = "TPLAB_STOP_IS_HANDED_ON"  # environment variable of ranks that are started inside `hand_on`: its folder
IMPATIENT = 2.0  # a SIGTERM that comes more than this many seconds after the first one ends the process


class Stop:
    """Notes requests to stop on this rank. It looks for a `stop` file in `folder`, or for none if `folder` is None."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else stop_file(folder)
        self._began = _began(folder)  # an older file belongs to a different run
        self._signal: float | None = None

    @property
    def asked(self) -> bool:
        with suppress(OSError):  # there may be no file
            return self._signal is not None or (self._file is not None and self._file.stat().st_mtime >= self._began)
        return False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM as a request to stop, or end the process if it comes well after the first one."""
        if self._signal is None:
            self._signal = time.monotonic()
        else:
            _end_if_impatient(number, self._signal)


@contextmanager
def stop_requests(folder: Path | None) -> Iterator[Stop]:
    """Treat SIGTERM inside the block as a request to stop. Afterwards, restore the old handler and remove the file."""
    stop = Stop(folder)
    main = threading.current_thread() is threading.main_thread()  # no other thread may set a handler
    before = signal.signal(signal.SIGTERM, stop.receive) if main else None
    try:
        yield stop
    finally:
        if main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        if folder is not None:
            stop_file(folder).unlink(missing_ok=True)


def _end_if_impatient(number: int, first: float) -> None:
    if time.monotonic() - first > IMPATIENT:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _began(folder: Path | None) -> float:
    """Return when this run's ranks were launched. Processes may be older. Older `stop` files belong to other runs."""
    if folder is not None and os.environ.get(_HANDED_ON) == os.path.realpath(folder):
        return 0.0  # `hand_on` has removed any older file. A rank may also train in other folders
    if inside.is_rank() and hooks.active is not None:
        return time.time() - hooks.active.now()
    return psutil.Process().create_time()


def stop_file(folder: Path) -> Path:
    """Return the path of the file that asks the run in this folder to stop."""
    return folder / "stop"


@contextmanager
def hand_on(folder: Path) -> Iterator[None]:
    """Forward a SIGTERM or Ctrl-C inside the block to the ranks that this program waits for, as a `stop` file.

    The run then saves a checkpoint and ends. A second SIGTERM ends the program if it comes over 2 seconds later, and a
    second Ctrl-C raises KeyboardInterrupt. The ranks obey any `stop` file, even one that is older than they are,
    because an earlier run's file is removed first. Raises ValueError if called outside the main thread.
    """
    first: list[float] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append(time.monotonic())
            folder.mkdir(parents=True, exist_ok=True)
            stop_file(folder).touch()
            if number == signal.SIGINT:
                print("\nSaving a checkpoint after this step. Press Ctrl-C again to quit now.", file=sys.stderr)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            _end_if_impatient(number, first[0])

    stop_file(folder).unlink(missing_ok=True)
    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    os.environ[_HANDED_ON] = os.path.realpath(folder)
    try:
        yield
    finally:
        os.environ.pop(_HANDED_ON)
        for number, handler in before.items():
            signal.signal(number, handler)
