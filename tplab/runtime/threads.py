"""Find out what the threads of a rank are doing. The rank itself does this when the parent asks.

A rank in which one thread waits for a message isn't stuck if another of its threads can still make progress. Threads of
installed packages that only serve other threads, such as a progress bar's, don't count. Neither do threads that wait
for another thread without a time limit, as in `join()`.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tplab.runtime.failures import is_installed, is_standard_library

_WAITS_FOR_A_THREAD = ("threading.py", "queue.py", os.path.join("concurrent", "futures", "_base.py"))
_RUNTIME = os.path.dirname(__file__) + os.sep
_TPLAB = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NO_LIMIT = (None, -1)


_serving: set[int] = set()  # ids of the threads that only carry out what other threads have begun


@contextmanager
def serving() -> Iterator[None]:
    """Context manager for a thread that only serves another thread and makes no progress on its own."""
    _serving.add(threading.get_ident())
    try:
        yield
    finally:
        _serving.discard(threading.get_ident())


def any_can_act(main: int, is_blocked: Callable[[int], bool]) -> bool:
    """Return True if any thread of this process can still make progress.

    main          id of the thread that runs the learner's function
    is_blocked    returns True if the thread with the given id is blocked in a collective
    """
    return any(
        not is_blocked(thread) and _can_act(_frames(frame), thread == main)
        for thread, frame in sys._current_frames().items()
        if thread != threading.get_ident() and thread not in _serving
    )


def _frames(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _can_act(stack: list[FrameType], is_main: bool) -> bool:
    files = [frame.f_code.co_filename for frame in stack]
    of_learner = is_main or any(_is_learners(file) for file in files)
    if not of_learner and not all(is_standard_library(file) for file in files):
        return False
    waits = [frame for frame in _of_the_innermost_call(stack) if "timeout" in frame.f_locals]
    if files and files[0].endswith(_WAITS_FOR_A_THREAD):
        return any(frame.f_locals["timeout"] not in _NO_LIMIT for frame in waits)
    return of_learner


def _is_learners(file: str) -> bool:
    """Return True for the learner's files and for tplab's, except for those in its runtime."""
    if file.startswith(("<", _RUNTIME)):
        return False
    return file.startswith(_TPLAB) or not is_installed(file)


def _of_the_innermost_call(stack: list[FrameType]) -> list[FrameType]:
    """Return the innermost frames that belong to modules in which a thread waits for another."""
    count = 0
    while count < len(stack) and stack[count].f_code.co_filename.endswith(_WAITS_FOR_A_THREAD):
        count += 1
    return stack[:count]
