"""The pytest plugin behind `tplab check`, which is nbval with its bugs fixed. It sends one JSON line (a row) per cell.

It is loaded instead of nbval's own plugin (`-p tplab.course.grade.nbval_plugin`). nbval's classes do most of the work:
they run the cells in a kernel, and they fail if a cell does or if the result of a check differs from the reference's.
The subclasses in this file fix four problems:

1. If the kernel dies, nbval notices that only when the cell times out.
2. If a cell sends very many messages, ZeroMQ drops those that aren't read in time, and one of them may say that the
   cell is done. Some cells never stop printing.
3. nbval ignores errors that come without an error message on iopub, such as an unknown magic.
4. After a cell has timed out, nbval expects every later cell to fail.

Output that a check prints doesn't count, because a learner may debug with print. Neither do the tags and comments by
which nbval lets a notebook choose what is compared.
"""

import collections
import json
import os
import re
import time
from queue import Empty

import nbval.plugin as nbval
import pytest
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, RunningKernel

from tplab.course.notebooks.kernels import CELL_TIMEOUT, started

PRINT_LIMIT = 5_000_000  # characters that a cell may print before it is interrupted
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class KernelDied(Exception):  # noqa: N818 (an event)
    """Raised when the kernel's process ends while a cell is running."""


def pytest_addoption(parser):
    nbval.pytest_addoption(parser)
    group = parser.getgroup("tplab")
    group.addoption("--tplab-results", type=int, help="file descriptor that gets one JSON line for each cell")
    group.addoption("--tplab-folder", help="folder in which the notebook runs")


def pytest_configure(config):
    nbval.pytest_configure(config)


def pytest_collect_file(file_path, parent):
    return ChapterFile.from_parent(parent, path=file_path) if file_path.suffix == ".ipynb" else None


class Kernel(RunningKernel):
    """A running kernel. While a cell runs, this class reads both the shell channel and the iopub channel."""

    def __init__(self, *args, **kwargs):
        self.unread: collections.deque = collections.deque()
        self.reply: dict = {}
        self.printed = 0
        super().__init__(*args, **kwargs)

    def _ensure_iopub_up(self):
        self.kc.iopub_channel.socket.rcvhwm = 0  # no limit; by default the kernel drops messages once 1000 are waiting
        super()._ensure_iopub_up()

    def execute_cell_input(self, cell_input, allow_stdin=None):
        self.reply, self.printed = {}, 0
        return super().execute_cell_input(cell_input, allow_stdin)

    def await_reply(self, msg_id, timeout=None):
        """Wait for the kernel's reply to a cell, and collect the cell's output in the meantime.

        Raises Empty if the cell takes too long or prints too much, so that nbval interrupts it. Raises KernelDied if
        the kernel's process ends.
        """
        end = time.monotonic() + (timeout or float("inf"))
        while True:
            self._read_shown()
            try:
                message = self.kc.get_shell_msg(timeout=0.1)
            except Empty:
                if time.monotonic() > end or self.printed > PRINT_LIMIT:
                    raise
                if not self.is_alive():
                    raise KernelDied from None
                continue
            if message["parent_header"].get("msg_id") == msg_id:
                self.reply = message["content"]
                return

    def _read_shown(self):
        while self.printed <= PRINT_LIMIT:
            try:
                message = self.kc.get_iopub_msg(timeout=0)
            except Empty:
                return
            if message["msg_type"] == "stream":
                self.printed += len(message["content"]["text"])
            else:
                self.unread.append(message)

    def get_message(self, stream, timeout=None):
        """Return the next message from iopub, the only stream that nbval reads in this way. nbval's own is slow."""
        return self.unread.popleft() if self.unread else self.kc.get_iopub_msg(timeout=timeout)


class ChapterFile(nbval.IPyNbFile):
    def setup(self):
        """Start a kernel in the learner's folder that uses the same Python as this process."""
        folder = self.config.option.tplab_folder
        patience = self.config.option.nbval_kernel_startup_timeout
        self.kernel = started(lambda: Kernel(CURRENT_ENV_KERNEL_NAME, cwd=folder, startup_timeout=patience))

    def collect(self):
        for item in super().collect():
            options = collections.defaultdict(bool, check=item.cell.metadata.tplab.role == "check")
            yield ChapterCell.from_parent(
                self, name=item.cell.id, cell_num=item.cell_num, cell=item.cell, options=options
            )


class ChapterCell(nbval.IPyNbCell):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.output_timeout = 40  # seconds that an interrupted cell has to clean up, even on a busy machine
        self.told = dict(self.cell.metadata.tplab)  # the cell's row, without its outcome

    def runtest(self):
        kernel, option = self.parent.kernel, self.config.option
        asked = option.nbval_cell_timeout
        if self.told["role"] == "setup":  # it imports torch
            option.nbval_cell_timeout = max(asked, CELL_TIMEOUT)
        try:
            super().runtest()
        finally:
            if self.parent.timed_out:
                flood = kernel.printed > PRINT_LIMIT
                self.told |= {"printed": PRINT_LIMIT} if flood else {"seconds": option.nbval_cell_timeout}
            option.nbval_cell_timeout, self.parent.timed_out = asked, False
        if kernel.reply.get("status") != "ok":  # without sys.stderr, a kernel never replies
            self.raise_cell_error(f"{kernel.reply.get('ename')}: {kernel.reply.get('evalue')}")

    def compare_outputs(self, test, ref, skip_compare=None):
        """Compare the text of the results only."""
        self.told |= {"expected": _result(ref), "got": _result(test)}
        return self.told["expected"] == self.told["got"]


def _result(outputs: list) -> str:
    return "\n".join(one["data"].get("text/plain", "") for one in outputs if one["output_type"] == "execute_result")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed":
        line = memoryview(json.dumps(row(item, report.outcome, call.excinfo)).encode() + b"\n")
        while line:
            line = line[os.write(item.config.option.tplab_results, line) :]


def row(item: ChapterCell, outcome: str, failure: pytest.ExceptionInfo | None) -> dict:
    """Return the row that reports the result of a cell to check_notebook.py."""
    told = {"id": item.cell.id, "outcome": outcome, **item.told}
    if failure is None:
        return told
    kernel = item.parent.kernel
    told["died"] = failure.errisinstance(KernelDied) or kernel is None or not kernel.is_alive()
    told["message"] = _ANSI.sub("", str(failure.value))
    shown = next((output for output in item.test_outputs or [] if output["output_type"] == "error"), None)
    if shown:
        told["ename"], told["evalue"] = shown["ename"], _ANSI.sub("", shown["evalue"])
        told["traceback"] = _ANSI.sub("", "\n".join(shown["traceback"]))
    return told
