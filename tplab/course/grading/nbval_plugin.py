"""The pytest plugin behind `tplab check`, which is nbval with its bugs fixed. It sends one JSON line (a row) per cell.

It is loaded instead of nbval's own plugin (`-p tplab.course.grading.nbval_plugin`). nbval's classes do most of the
work. The subclasses in this file fix five problems:

1. ipykernel doesn't capture the output of child processes if PYTEST_CURRENT_TEST is set.
2. If the kernel dies, nbval notices that only when the cell times out.
3. If a cell sends very many messages, ZeroMQ drops those that aren't read in time, and one of them may say that the
   cell is done. Some cells never stop printing.
4. nbval ignores errors that come without an error message on iopub, such as an unknown magic.
5. After a cell has timed out, nbval expects every later cell to fail.

Check cells don't run in the kernel. Instead, the plugin takes the answers out of the kernel, has them checked in a
clean process (see `clean_check`), and compares the text of the verdict with the one in the reference.
"""

import ast
import collections
import ctypes
import json
import os
import re
import sys
import time
from pathlib import Path
from queue import Empty

import nbval.plugin as nbval
import psutil
import pytest
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, RunningKernel

from tplab.course.grading.cell_dependencies import handover
from tplab.course.grading.clean_check import Checker
from tplab.course.grading.run import end_all
from tplab.course.notebooks.kernels import CELL_TIMEOUT, started

PRINT_LIMIT = 5_000_000  # characters that a cell may print before it is interrupted
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36  # from linux/prctl.h
KEPT_TEXT = 200_000  # how many characters of a cell's output are kept
NOT_EVALUATED = "A cell above has changed how this kernel runs cells, so that its answers can't be taken out."
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def pytest_configure(config):
    nbval.pytest_configure(config)
    if sys.platform == "linux":  # processes that a cell leaves behind become our children, even without the run's mark
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # so that no cell can open our pipe through /proc


def pytest_unconfigure(config):
    """End the processes that cells left behind. By now, the kernel itself has shut down."""
    left = end_all(lambda: [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE])
    _send(config, {"left": left})


def _send(config: pytest.Config, told: dict) -> None:
    if config.option.tplab_results is not None:
        line = memoryview(json.dumps(told).encode() + b"\n")
        while line:
            line = line[os.write(config.option.tplab_results, line) :]


class KernelDied(Exception):  # noqa: N818 (an event)
    """Raised when the kernel's process ends while a cell is running."""


def pytest_addoption(parser):
    nbval.pytest_addoption(parser)
    group = parser.getgroup("tplab")
    group.addoption("--tplab-results", type=int, help="file descriptor that gets one JSON line for each cell")
    group.addoption("--tplab-folder", help="folder in which the notebook runs")


def pytest_collect_file(file_path, parent):
    return ChapterFile.from_parent(parent, path=file_path) if file_path.suffix == ".ipynb" else None


class Kernel(RunningKernel):
    """A running kernel. While a cell runs, this class reads both the shell channel and the iopub channel."""

    def __init__(self, *args, **kwargs):
        self.waiting: collections.deque = collections.deque()
        self.reply: dict = {}
        self.printed = 0
        self.flooded = False
        self.beside = False
        super().__init__(*args, **kwargs)

    def _ensure_iopub_up(self):
        self.kc.iopub_channel.socket.rcvhwm = 0  # no limit; by default the kernel drops messages once 1000 are waiting
        super()._ensure_iopub_up()

    def execute_cell_input(self, cell_input, allow_stdin=None):
        self.reply, self.printed, self.flooded = {}, 0, False
        if self.beside:  # evaluate the input outside any cell, where no IPython hook can rewrite it
            step = {"hidden": cell_input}
            return self.kc.execute("", store_history=False, user_expressions=step, stop_on_error=False)
        return super().execute_cell_input(cell_input, allow_stdin)

    @property
    def evaluated(self) -> dict:
        """The result of the expression that was evaluated outside the cells.

        Besides its "status", it has "data" or, after an error, "ename" and "evalue".
        """
        answer = self.reply.get("user_expressions", {}).get("hidden", {})
        return answer or {"status": "error", "ename": "RuntimeError", "evalue": NOT_EVALUATED}

    def await_reply(self, msg_id, timeout=None):
        """Wait for the kernel's reply to a cell, and collect the cell's output in the meantime.

        Raises Empty on a timeout, and KernelDied if the kernel's process ends.
        """
        end = time.monotonic() + (timeout or float("inf"))
        next_look = time.monotonic() + 0.5
        while True:
            self._read_shown()
            if self.printed > PRINT_LIMIT and not self.flooded:
                self.flooded = True
                self.interrupt()
            try:
                message = self.kc.get_shell_msg(timeout=0.02)
            except Empty:
                now = time.monotonic()
                if now > end:
                    raise
                if now > next_look:
                    if not self.is_alive():
                        raise KernelDied from None
                    next_look = now + 0.5
                continue
            if message["parent_header"].get("msg_id") == msg_id:
                self.reply = message["content"]
                return

    def _read_shown(self):
        while True:
            try:
                self.waiting.append(self._shortened(self.kc.get_iopub_msg(timeout=0)))
            except Empty:
                return

    def get_message(self, stream, timeout=None):
        if stream == "iopub" and self.waiting:
            return self.waiting.popleft()
        return self._shortened(super().get_message(stream, timeout=timeout))

    def _shortened(self, message):
        if message["msg_type"] == "stream":
            text = message["content"]["text"]
            message["content"]["text"] = text[: max(0, KEPT_TEXT - self.printed)]
            self.printed += len(text)
        return message


class ChapterFile(nbval.IPyNbFile):
    def setup(self):
        """Start the checker, and start a kernel in the learner's folder that uses the same Python as this process."""
        test = os.environ.pop("PYTEST_CURRENT_TEST", None)
        try:
            folder = self.config.option.tplab_folder or str(self.path.parent)
            self.checker = Checker(dict(os.environ), Path(folder))  # imports torch while the kernel starts
            patience = self.config.option.nbval_kernel_startup_timeout
            self.kernel = started(lambda: Kernel(CURRENT_ENV_KERNEL_NAME, cwd=folder, startup_timeout=patience))
        finally:
            if test is not None:
                os.environ["PYTEST_CURRENT_TEST"] = test

    def teardown(self):
        self.checker.stop()
        super().teardown()

    def collect(self):
        for item in super().collect():
            tags = nbval.find_metadata_tags(item.cell.metadata)  # tags in the cell's comments don't count
            options = collections.defaultdict(bool, tags)
            options.setdefault("check", self.compare_outputs)
            yield ChapterCell.from_parent(
                self, name=item.cell.get("id") or item.name, cell_num=item.cell_num, cell=item.cell, options=options
            )


class ChapterCell(nbval.IPyNbCell):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.output_timeout = 40  # seconds that an interrupted cell has to clean up, even on a busy machine
        self.verdict: dict = {}  # for a check: its error, or the expected and the actual text

    @property
    def marks(self) -> dict:
        return dict(self.cell.metadata.get("tplab", {}))

    def limit(self, asked: float) -> float:
        """Return this cell's time limit in seconds. The setup gets more time, because it imports torch."""
        if self.marks.get("role") == "setup":
            return max(asked, CELL_TIMEOUT)
        return min(asked, self.marks.get("timeout", asked))

    def runtest(self):
        kernel = self.parent.kernel
        asked = self.config.option.nbval_cell_timeout
        limit = self.config.option.nbval_cell_timeout = self.limit(asked)
        kernel.beside = self.marks.get("role") in ("hidden", "check")
        try:
            self.run_check(limit) if self.marks.get("role") == "check" else super().runtest()
        except nbval.NbCellError:
            if kernel.flooded:
                millions = PRINT_LIMIT // 1_000_000
                self.raise_cell_error(f"it printed more than {millions} million characters and was stopped")
            raise
        finally:
            self.config.option.nbval_cell_timeout = asked
            if hasattr(kernel, "km"):  # otherwise nbval has given up on the kernel
                self.parent.timed_out = False
        if not kernel.reply:  # the kernel is idle but never replied, which happens without sys.stderr
            self.raise_cell_error(f"Timeout of {limit:g} seconds exceeded: no answer from the kernel")
        if kernel.reply.get("status") == "error" and not self.options["check_exception"]:
            self.raise_cell_error(f"{kernel.reply.get('ename')}: {kernel.reply.get('evalue')}")

    def run_check(self, limit: float) -> None:
        """Take the answers out of the kernel, have them checked, and compare the verdict with the reference's."""
        number, kernel = self.marks["number"], self.parent.kernel
        self.cell.source = handover(f"hand_over({number!r}, {self.marks['answers']!r}, {self.marks['earlier']!r})")
        self.options["check"] = False  # don't compare the outputs of this step
        self.config.option.nbval_cell_timeout = max(limit, CELL_TIMEOUT)  # like the setup, this may import torch
        super().runtest()
        if kernel.reply and kernel.evaluated["status"] != "ok":
            self.fail_check(ename=kernel.evaluated["ename"], evalue=kernel.evaluated["evalue"])
        answers = ast.literal_eval(kernel.evaluated["data"]["text/plain"])
        reply = self.parent.checker.ask(number, answers, limit)
        if reply.ended == "timeout":
            self.raise_cell_error(f"Timeout of {limit:g} seconds exceeded: no verdict")
        if reply.ended:
            self.raise_cell_error("Your answer ended the process that checked it, with os._exit for example.")
        if not reply.passed:
            self.fail_check(ename=reply.error, evalue=reply.message)
        expected = "\n".join(result_texts(self.cell.outputs))
        if reply.text != expected:
            self.fail_check(expected=expected, got=reply.text)

    def fail_check(self, **verdict: str) -> None:
        self.verdict = verdict
        self.raise_cell_error(": ".join(verdict.values()))


def result_texts(outputs: list) -> list[str]:
    return [output["data"].get("text/plain", "") for output in outputs if output["output_type"] == "execute_result"]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if isinstance(item, ChapterCell) and (report.when == "call" or report.outcome != "passed"):
        _send(item.config, row(item, report, call))


def row(item: ChapterCell, report: pytest.TestReport, call: pytest.CallInfo) -> dict:
    """Return the row that reports the result of a cell to check_notebook.py."""
    told = {"id": item.cell.get("id"), "outcome": report.outcome, "seconds": round(report.duration, 3), **item.marks}
    if call.excinfo is None:
        return told
    error = call.excinfo.value
    told["problem"] = "kernel died" if _kernel_is_gone(item, error) else type(error).__name__
    told["message"] = _ANSI.sub("", str(error))
    told |= item.verdict
    shown = next((output for output in item.test_outputs or [] if output["output_type"] == "error"), None)
    if shown:
        told["ename"], told["evalue"] = shown["ename"], _ANSI.sub("", shown["evalue"])
        told["traceback"] = _ANSI.sub("", "\n".join(shown["traceback"]))
    return told


def _kernel_is_gone(item: ChapterCell, error: BaseException) -> bool:
    return isinstance(error, KernelDied) or item.parent.kernel is None or not item.parent.kernel.is_alive()
