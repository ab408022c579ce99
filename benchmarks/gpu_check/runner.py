"""Run an item in processes of its own, and put what they print and what their tests found into its result."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu_check import outcomes
from benchmarks.gpu_check.items import Item
from benchmarks.gpu_check.results import FAILED, PASSED, STOPPED, Outcome, Result

LOOK_SECONDS = 1.0
GRACE_SECONDS = 20.0  # how much longer than its limit a test may take before its process is killed
KEPT = 20_000  # characters of an item's output
KEPT_OF_A_TEST = 8_000


def run(root: Path, item: Item, result: Result, seconds: float, save: Callable[[], None]) -> None:
    """Run an item in the folder `root` for at most so many seconds, and save what is known every second.

    A test that hangs is stopped with its process, and another process continues with the item's other tests.
    """
    began = time.monotonic()
    end = began + seconds
    while not result.is_done and (left := end - time.monotonic()) > 0:
        with tempfile.TemporaryDirectory(prefix="tplab-gpu-check-") as scratch:
            attempt = _Attempt(root, item, result, Path(scratch), save)
            status = attempt.wait(left)
        if item.is_pytest:
            attempt.judge_tests(status)
        elif status is not None:
            result.state = PASSED if status == 0 else FAILED
        elif seconds >= item.limit:
            result.state = FAILED
            result.output += f"\n(stopped after {item.limit:.0f} s, its limit)"
    result.seconds += time.monotonic() - began
    save()


class _Attempt:
    """A process that runs an item, or those of its tests that have no outcome yet."""

    def __init__(self, root: Path, item: Item, result: Result, scratch: Path, save: Callable[[], None]) -> None:
        self.item, self.result, self.scratch, self.save = item, result, scratch, save
        self.running: str | None = None  # a test
        self.hangs = False
        self._events, self._since = 0, time.monotonic()
        environment = os.environ | item.environment | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
        path = [os.path.abspath(part) for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
        environment["PYTHONPATH"] = os.pathsep.join([str(root), *path])
        command = [sys.executable, *item.command]
        if item.is_pytest:
            environment |= {outcomes.FOLDER: str(scratch), outcomes.LIMIT: str(item.test_limit)}
            command.append(f"--basetemp={scratch / 'tests'}")
            (scratch / outcomes.KNOWN).write_text(json.dumps(list(result.tests)), encoding="utf-8")
        with open(scratch / "output", "w") as output:
            self.process = subprocess.Popen(
                command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                process_group=0,
            )  # fmt: skip

    def wait(self, seconds: float) -> int | None:
        """Return the process's exit status, or None if it was killed after so many seconds, or because it hangs."""
        end, status = time.monotonic() + seconds, None
        try:
            while status is None and not self.hangs and (left := end - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = self.process.wait(min(LOOK_SECONDS, left))
                self._read()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._read()
        return status

    def _read(self) -> None:
        """Read what is known so far."""
        output, events = self.scratch / "output", self.scratch / outcomes.EVENTS
        self.result.output = output.read_text(encoding="utf-8", errors="replace")[-KEPT:]
        lines = events.read_text(encoding="utf-8").split("\n")[:-1] if events.exists() else []
        for line in lines[self._events :]:
            self._take(json.loads(line))
        if len(lines) > self._events:
            self._events, self._since = len(lines), time.monotonic()
        silent = time.monotonic() - self._since
        self.hangs = self.running is not None and silent > self.item.test_limit + GRACE_SECONDS
        self.save()

    def _take(self, event: dict) -> None:
        if "collected" in event:
            self.result.expected = len(event["collected"])
        elif "started" in event:
            self.running = event["started"]
        else:
            self.running = None
            before = self.result.tests.get(event["test"])
            if before is None or before.outcome != "failed":  # a test can fail and then fail again in its teardown
                self.result.tests[event["test"]] = Outcome(
                    event["outcome"], event["seconds"], _shortened(event["text"])
                )

    def judge_tests(self, status: int | None) -> None:
        """Decide what the outcomes of the tests mean for the item, once the process has ended or was killed."""
        result = self.result
        if self.running is not None and (self.hangs or status is not None):
            why = "hung" if status is None else f"ended pytest with status {status}"
            result.tests[self.running] = Outcome(STOPPED, 0.0, f"{why}. The last lines:\n{result.output[-2000:]}")
        if result.expected is not None and len(result.tests) >= result.expected > 0:
            outcomes_found = {test.outcome for test in result.tests.values()}
            good = {"passed", "skipped"} if self.item.may_skip or "passed" in outcomes_found else set()
            result.state = PASSED if outcomes_found <= good else FAILED
        elif status is not None and self.running is None:
            result.state = FAILED  # no test has this name, or a module can't be imported


def _shortened(text: str) -> str:
    if len(text) <= KEPT_OF_A_TEST:
        return text
    return f"{text[: KEPT_OF_A_TEST // 2]}\n[...]\n{text[-KEPT_OF_A_TEST // 2 :]}"
