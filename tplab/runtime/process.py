"""A rank as seen from the parent: its process, its pipes, and what it has reported so far."""

import contextlib
import os
import signal
from multiprocessing.connection import Pipe
from typing import Any

from tplab.runtime.forkserver import ForkServer, read_status


class RankProcess:
    """The process of a rank and its pipes. `watch` reads the pipes, because it waits for all ranks together.

    message:  the rank's final message: ("result", ...), ("error", ...) or ("mismatch",); None until it arrives
    status:   exit status of the process (negative: signal number); None while it's alive
    can_act:  whether any of its threads can still make progress; None until it answers
    crash:    the Python stack that faulthandler wrote, either on request or in a crash
    """

    def __init__(self, rank: int, server: ForkServer, shared: tuple[int, ...]) -> None:
        self.rank = rank
        self.message: tuple[Any, ...] | None = None
        self.status: int | None = None
        self.can_act: bool | None = None
        self.crash = bytearray()
        self.pid: int | None = None
        self.control, theirs = Pipe()
        self.output, output = os.pipe()
        self.stack, stack = os.pipe()
        try:
            self.exit = server.fork([theirs.fileno(), output, stack, *shared])
        except BaseException:
            self._close_pipes()
            raise
        finally:
            theirs.close()
            os.close(output)
            os.close(stack)
        self.control.send_bytes(rank.to_bytes(4, "little"))

    @property
    def alive(self) -> bool:
        return self.status is None

    def ask_for_stack(self) -> None:
        """Have faulthandler write the rank's stack to the `stack` pipe. Works even if the rank is stuck in C++."""
        self.crash.clear()
        if self.pid is not None and self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def ask_for_threads(self) -> None:
        """Ask the rank what its threads are doing. It can't answer while a call holds the global interpreter lock."""
        self.can_act = None
        if self.alive:
            with contextlib.suppress(OSError):
                self.control.send_bytes(b"threads")

    def kill(self) -> None:
        """Kill the rank and every process that it has started."""
        if self.pid is None:
            self.pid = read_status(self.exit)  # the fork itself may still be under way
        if self.pid is not None and self.alive:
            for end in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    end(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait until the process is gone, then close its descriptors."""
        if self.alive and self.pid is not None:
            self.status = read_status(self.exit)
        os.close(self.exit)
        self._close_pipes()

    def _close_pipes(self) -> None:
        self.control.close()
        os.close(self.output)
        os.close(self.stack)
