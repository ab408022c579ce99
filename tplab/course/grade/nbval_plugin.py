"""The pytest plugin behind `tplab check`, which is nbval with three faults repaired. It sends a JSON line per cell.

It is loaded instead of nbval's own plugin (`-p tplab.course.grade.nbval_plugin`). nbval's classes do most of the work:
they run the cells in a kernel, and they fail if a cell does or if the result of a check differs from the reference's.
The subclasses in this file repair these faults:

1. If the kernel dies, nbval notices that only when the cell times out.
2. nbval ignores errors that come without an error message on iopub, such as an unknown magic.
3. After a cell has timed out, nbval expects every later cell to fail.

Output that a check prints doesn't count, because a learner may debug with print.
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
    """A running kernel. `reply` is what it answered to the latest cell, or {} if it hasn't answered."""

    def _ensure_iopub_up(self):
        self.kc.iopub_channel.socket.rcvhwm = 0  # no limit; by default the kernel drops messages once 1000 are waiting
        super()._ensure_iopub_up()

    def await_reply(self, msg_id, timeout=None):
        """Wait for the reply to a cell. Raises Empty after `timeout` seconds, and KernelDied if the process ends."""
        self.reply = {}
        end = time.monotonic() + (timeout or float("inf"))
        while True:
            try:
                message = self.kc.get_shell_msg(timeout=0.1)
            except Empty:
                if time.monotonic() > end:
                    raise
                if not self.is_alive():
                    raise KernelDied from None
                continue
            if message["parent_header"].get("msg_id") == msg_id:
                self.reply = message["content"]
                return


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
                self.told["seconds"] = option.nbval_cell_timeout
            option.nbval_cell_timeout, self.parent.timed_out = asked, False
        if kernel.reply.get("status") != "ok":
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
    kernel = item.parent.kernel
    told = {"id": item.cell.id, "outcome": outcome, "died": kernel is None or not kernel.is_alive(), **item.told}
    if failure is None:
        return told
    told["died"] |= failure.errisinstance(KernelDied)
    told["message"] = _ANSI.sub("", str(failure.value))
    shown = next((output for output in item.test_outputs or [] if output["output_type"] == "error"), None)
    if shown:
        told["ename"], told["evalue"] = shown["ename"], _ANSI.sub("", shown["evalue"])
        told["traceback"] = _ANSI.sub("", "\n".join(shown["traceback"]))
    return told
