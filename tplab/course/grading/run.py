"""Run nbval on a notebook in a separate process, and pass on its results cell by cell.

The results arrive as rows, one per cell, through a pipe that cells can't open by name. Every process of a run carries a
mark in its environment that is unique to the run. On Linux, nbval's process also adopts processes that drop the mark
(see nbval_plugin.py). At the end, every process that is still running is killed by its process id.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tplab.course.notebooks.cells import Cell, write_notebook
from tplab.course.notebooks.kernels import CELL_TIMEOUT, kernel_environment

MARK = "TPLAB_CHECK_RUN"
POLL = 0.1  # seconds between polls for the end of nbval
# Starts pytest without importing a grammar for URLs, which would take 1.5 s and which nbformat doesn't need here
PYTEST = "import sys; sys.modules['rfc3987_syntax'] = None; import pytest; sys.exit(pytest.main())"
OURS = ("tplab.runtime", "tplab.course.grading", "ipykernel_launcher")  # found in our own processes' command lines
GRACE = 2.0  # seconds that killed processes have to disappear


class Run:
    """One run of nbval. Iterating over it yields the rows that nbval_plugin.py sends. Then `notes` is complete."""

    def __init__(self, cells: list[Cell], folder: Path, timeout: float = CELL_TIMEOUT):
        self.cells, self.folder, self.timeout = cells, folder, timeout
        self.mark = uuid.uuid4().hex
        self.notes: list[str] = []

    def __iter__(self) -> Iterator[dict]:
        with tempfile.TemporaryDirectory(prefix="tplab-check-") as scratch:
            log = Path(scratch, "pytest.txt")
            results, theirs = os.pipe()
            process = self._start(Path(scratch), theirs, log)
            os.close(theirs)
            left = 0
            try:
                for row in _follow(process, results):
                    if "left" in row:
                        left = row["left"]
                    else:
                        yield row
                if process.returncode not in (0, 1):
                    last = log.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
                    self.notes.append(f"nbval ended with status {process.returncode}:\n{last}")
            finally:
                os.close(results)
                if process.poll() is None:
                    process.kill()
                    process.wait()
                count = left + end_processes(self.mark)
                if count:
                    self.notes.append(f"{count} process{'es' if count > 1 else ''} left behind by a cell, now ended.")

    def _start(self, scratch: Path, results: int, log: Path) -> subprocess.Popen:
        copy = scratch / "chapter.ipynb"
        write_notebook(self.cells, copy)
        environment = kernel_environment() | {MARK: self.mark, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"):
            environment.pop(name, None)
        command = [sys.executable, "-c", PYTEST, "-q", "-p", "tplab.course.grading.nbval_plugin", "--nbval"]
        command += ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={scratch}", "--color=no"]
        command += [f"--confcutdir={scratch}"]  # otherwise pytest lists the folders above and imports their conftest.py
        command += [f"--nbval-cell-timeout={self.timeout}", "--nbval-kernel-startup-timeout=120"]
        command += [f"--tplab-results={results}", f"--tplab-folder={self.folder}", str(copy)]
        with open(log, "wb") as output:
            return subprocess.Popen(
                command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=(results,),
            )  # fmt: skip


def _follow(process: subprocess.Popen, results: int) -> Iterator[dict]:
    """Yield the rows that arrive through the pipe, until the process has ended."""
    rest = b""
    while True:
        ended = process.poll() is not None
        if select.select([results], [], [], 0 if ended else POLL)[0]:
            data = os.read(results, 1 << 16)
            if not data:
                process.wait()
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from (json.loads(line) for line in lines)
        elif ended:
            return


def end_processes(mark: str) -> int:
    """Kill every process that carries this run's mark, and return how many of them were started by a cell."""
    import psutil

    return end_all(lambda: [process for process in psutil.process_iter() if _carries(process, mark)])


def end_all(find: Callable[[], list]) -> int:
    """Kill the processes that `find` returns, by process id, and return how many of them were started by a cell."""
    import psutil

    foreign = 0
    for _ in range(5):  # a process may start another while we look
        found = find()
        if not found:
            break
        for process in found:
            with suppress(psutil.Error):
                command = " ".join(process.cmdline())  # empty while the process is ending
                foreign += bool(command) and not any(part in command for part in OURS)
                process.kill()
        psutil.wait_procs(found, timeout=GRACE)
    return foreign


def _carries(process: Any, mark: str) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(MARK) == mark
    except Exception:  # the process is gone, is a zombie, or belongs to another user
        return False
