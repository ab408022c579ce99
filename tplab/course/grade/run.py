"""Run nbval on a notebook in a separate process, within limits, and pass on its results cell by cell.

The results arrive as rows, one per cell, through a pipe. Every process of a run carries a mark in its environment, by
which it is found and ended when the run is over, even if its parent is gone. This isn't a container, because cells can
do anything that the user can do.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tplab.course.notebooks.cells import Cell, write_notebook
from tplab.course.notebooks.kernels import CELL_TIMEOUT, kernel_environment

MARK = "TPLAB_CHECK_RUN"
POLL = 0.2  # seconds between two looks at what a run uses
# Starts pytest without importing a grammar for URLs, which would take 1.5 s and which nbformat doesn't need here
PYTEST = "import sys; sys.modules['rfc3987_syntax'] = None; import pytest; sys.exit(pytest.main())"
PLUGIN = ("-q", "-p", "tplab.course.grade.nbval_plugin", "--nbval", "-p", "no:cacheprovider", "-c", os.devnull,
          "--nbval-kernel-startup-timeout=120")  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a run may use. 0 means that there is no limit.

    cell:    seconds for a cell
    seconds: seconds for the whole notebook
    memory:  bytes of memory for all of its processes together, measured five times a second
    stop:    if this event is set, the run ends
    """

    cell: float = CELL_TIMEOUT
    seconds: float = 0
    memory: int = 0
    stop: threading.Event = field(default_factory=threading.Event)


class Run:
    """One run of nbval. Iterating over it yields the rows that nbval_plugin.py sends. Then `ended` is known."""

    def __init__(self, cells: list[Cell], folder: Path, limits: Limits) -> None:
        self.cells, self.folder, self.limits = cells, folder, limits
        self.mark = uuid.uuid4().hex
        self.ended = ""  # why the run didn't get to its end

    def __iter__(self) -> Iterator[dict]:
        with tempfile.TemporaryDirectory(prefix="tplab-check-") as scratch:
            results, theirs = os.pipe()
            process = self._start(Path(scratch), theirs)
            os.close(theirs)
            try:
                yield from self._follow(results)
                if not self.ended and process.wait() not in (0, 1):
                    last = Path(scratch, "pytest.txt").read_text(encoding="utf-8", errors="replace").strip()[-2000:]
                    self.ended = f"nbval ended with status {process.returncode}:\n{last}"
            finally:
                os.close(results)
                process.kill()
                end(self.mark)
                process.wait()

    def _start(self, scratch: Path, results: int) -> subprocess.Popen:
        copy = scratch / "chapter.ipynb"
        write_notebook(self.cells, copy)
        environment = kernel_environment() | {MARK: self.mark, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"):
            environment.pop(name, None)
        command = [sys.executable, "-c", PYTEST, *PLUGIN, f"--rootdir={scratch}"]
        command += [f"--confcutdir={scratch}"]  # otherwise pytest lists the folders above and imports their conftest.py
        command += [f"--nbval-cell-timeout={self.limits.cell}", f"--tplab-folder={self.folder}"]
        command += [f"--tplab-results={results}", str(copy)]
        with open(scratch / "pytest.txt", "wb") as output:
            return subprocess.Popen(
                command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=(results,), start_new_session=True,
            )  # fmt: skip

    def _follow(self, results: int) -> Iterator[dict]:
        """Yield the rows that arrive through the pipe, until it is closed or the run exceeds a limit."""
        rest, latest = b"", time.monotonic() + (self.limits.seconds or float("inf"))
        while not self.ended:
            if select.select([results], [], [], POLL)[0]:
                data = os.read(results, 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                yield from map(json.loads, lines)
            if self.limits.stop.is_set():
                self.ended = "It was stopped."
            elif time.monotonic() > latest:
                self.ended = f"It was stopped after {self.limits.seconds:g} seconds, the limit for a notebook."
            elif self.limits.memory and (used := memory(self.mark)) > self.limits.memory:
                told = f"It was stopped because it used {used / 1e9:.1f} GB of memory"
                self.ended = f"{told}; {self.limits.memory / 1e9:.1f} GB is the limit."


def memory(mark: str) -> int:
    """Return how many bytes of memory a run's processes use. Shared memory counts once, where possible."""
    total = 0
    for process in marked(mark):
        with suppress(psutil.Error):
            used = process.memory_full_info()
            total += getattr(used, "pss", used.uss)  # macOS doesn't tell each process's share of shared memory
    return total


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes whose environment has this mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it's gone, or belongs to another user
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def end(mark: str) -> None:
    """Kill a run's processes by their ids, and wait until they're gone."""
    for _ in range(5):  # one of them may start another while we look
        found = marked(mark)
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=2)
        if not found:
            return
