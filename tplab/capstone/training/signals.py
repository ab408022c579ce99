"""Asked to stop, a run saves a checkpoint first. It is asked by SIGTERM, or by a file called `stop` in its folder.

Clusters send SIGTERM some time before they take a machine away. It may reach some ranks and not others, or reach them
in different steps; so a rank only notes it, and tells the others in the next all-reduce (`step_summary`).

torchrun hands the signal on to its ranks, which then may get it twice within a moment. A second one that comes later
means it: the process ends at once.

The file is for whoever has no process to send a signal to: a job script, a terminal on another machine, the program
that waits for the ranks. The first rank looks for it after each step.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

_HANDED_ON = "TPLAB_STOP_IS_HANDED_ON"  # in the environment of the ranks for which a program waits in `hand_on`
IMPATIENT = 2.0  # seconds after the first SIGTERM from which on another one ends the process


class Stop:
    """Whether this rank was asked to stop. `folder`: where it looks for the file; None: it doesn't."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else stop_file(folder)
        self._began = _began()  # a file of before is of another run
        self._signal: float | None = None

    @property
    def asked(self) -> bool:
        if self._signal is not None:
            return True
        if self._file is None:
            return False
        with suppress(OSError):
            return self._file.stat().st_mtime >= self._began
        return False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM."""
        now = time.monotonic()
        if self._signal is None:
            self._signal = now
        elif now - self._signal > IMPATIENT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def stop_requests(folder: Path | None) -> Iterator[Stop]:
    """Take SIGTERM as a request inside the block; afterwards it does what it did before. The file is removed."""
    stop = Stop(folder)
    main = threading.current_thread() is threading.main_thread()  # no other may set a handler
    before = signal.signal(signal.SIGTERM, stop.receive) if main else None
    try:
        yield stop
    finally:
        if main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        if folder is not None:
            stop_file(folder).unlink(missing_ok=True)


def _began() -> float:
    """From when on a file is of this run: since its rank was asked for. (The process of `launch` may be older.)"""
    if _HANDED_ON in os.environ:
        return 0.0  # what was there before has been removed
    if "TPLAB_RANK" in os.environ:
        from tplab.runtime import hooks  # here, since it imports torch

        if hooks.active is not None:
            return time.time() - hooks.active.now()
    return psutil.Process().create_time()


def stop_file(folder: Path) -> Path:
    """Which file asks the run in this folder to stop."""
    return folder / "stop"


@contextmanager
def hand_on(folder: Path) -> Iterator[None]:
    """For a program that waits for its ranks: a SIGTERM inside the block asks them to stop; a second one ends it.

    A file of an earlier run is removed first. Ranks that are started inside the block obey the one that is there then,
    also if it is older than they are. Only the main thread can call it: ValueError in another.
    """
    first: list[float] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if first and time.monotonic() - first[0] > IMPATIENT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not first:
            first.append(time.monotonic())
            folder.mkdir(parents=True, exist_ok=True)
            stop_file(folder).touch()

    stop_file(folder).unlink(missing_ok=True)
    before = signal.signal(signal.SIGTERM, receive)
    os.environ[_HANDED_ON] = "1"
    try:
        yield
    finally:
        os.environ.pop(_HANDED_ON)
        signal.signal(signal.SIGTERM, before)
