"""Kill a process right before a chosen file operation, such as opening a file for writing, renaming it, or removing it.

    killed_at(5, work)         runs work() in a child process, and kills it with SIGKILL before its fifth such operation

A Python audit hook counts the operations, because Python calls it before each of them, no matter which library the
operation comes from. A writer calls `halfway()` in the middle of a file, so that the process can be killed there, too.
"""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ELSEWHERE = ("os.system", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "subprocess.Popen")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")
IN_WORDS = {
    "open": "it opens a file for writing",
    "os.rename": "it renames",
    "os.remove": "it removes a file",
    "os.rmdir": "it removes a directory",
    "os.mkdir": "it makes a directory",
    "halfway": "a file is half written",
}


class Countdown:
    """Audit hook that reports file operation number `place` and then kills this process with SIGKILL."""

    def __init__(self, place: int, said: int) -> None:
        self.left, self.said = place, said

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES or event == "halfway" or (event == "open" and opens_for_writing(args)):
            self.left -= 1
            if self.left == 0:
                os.write(self.said, IN_WORDS.get(event, event).encode())
                os.kill(os.getpid(), signal.SIGKILL)


def opens_for_writing(args: tuple[Any, ...]) -> bool:
    """Return whether an "open" audit event, whose arguments are path, mode, and flags, opens a file for writing."""
    flags = args[2] if len(args) > 2 else 0
    return isinstance(args[0], (str, bytes)) and isinstance(flags, int) and bool(flags & WRITING)


class _OwnStepsOnly:
    """Audit hook that raises if code starts another program. Hooks can't be removed, but this one can be turned off."""

    installed = on = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event in ELSEWHERE:
            raise RuntimeError(
                f"{event} starts another program, and the check can't see what that does to the disk. Use shutil and "
                "the methods of Path instead"
            )


_own_steps_only = _OwnStepsOnly()


@contextmanager
def in_this_process() -> Iterator[None]:
    """Context manager in which code that starts another program raises RuntimeError."""
    if not _own_steps_only.installed:
        sys.addaudithook(_own_steps_only)
        _own_steps_only.installed = True
    _own_steps_only.on = True
    try:
        yield
    finally:
        _own_steps_only.on = False


def halfway() -> None:
    """Signal that a file is half written. A writer calls this function between the two halves."""
    sys.audit("halfway")


def killed_at(place: int, work: Callable[[], object]) -> str:
    """Run `work` in a child process and kill it at file operation number `place`.

    Returns the operation, or "" if the child finished first. Raises RuntimeError if the child ended in a different way.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking is safe, because the child only works with files
        child = os.fork()
    if child == 0:
        _work_and_die(place, writing, work)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return said
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return ""
    raise RuntimeError(said or f"the process ended with status {status}")


def _work_and_die(place: int, writing: int, work: Callable[[], object]) -> None:
    try:
        sys.addaudithook(Countdown(place, writing))
        work()
    except BaseException as error:
        os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os._exit(0)
