"""Run the items in the time that there is, each in a process of its own, and keep what they have found in a file."""

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu_check.items import Item
from tplab.common.files import replace

PASSED, FAILED, UNFINISHED = "passed", "failed", "unfinished"
GRACE_SECONDS = 10.0  # for pytest, to say what it has found until it was interrupted
KEPT = 20_000  # characters of an item's output


@dataclass
class Result:
    """What an item has found.

    state     `PASSED`, `FAILED`, `UNFINISHED` if its call ran out of time, or which modules it can't run without
    output    the end of what it printed
    """

    state: str
    seconds: float
    output: str


Results = dict[str, Result]  # by the names of the items


def read(path: Path, of: str) -> Results:
    """Read the results of earlier calls, unless they are of another machine or version (see `fingerprint`)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: Result(**values) for name, values in found["items"].items()} if found["of"] == of else {}


def write(path: Path, of: str, results: Results) -> None:
    found = {name: asdict(result) for name, result in results.items()}
    replace(path, json.dumps({"of": of, "items": found}).encode())


def left(items: Sequence[Item], results: Results) -> list[Item]:
    """Return the items that have neither passed nor failed yet, in order of worth."""
    return [item for item in items if item.name not in results or results[item.name].state not in (PASSED, FAILED)]


def affordable(items: Sequence[Item], now: Callable[[], float], until: float) -> Iterator[tuple[Item, float]]:
    """Yield the items to run next with the seconds that each may take, until the clock `now` shows `until`.

    An item starts only if at least half of its limit is left. So at the end, a later item that needs less time may run.
    """
    for item in items:
        if (left := until - now()) >= item.limit / 2:
            yield item, min(item.limit, left)


def run(root: Path, item: Item, seconds: float) -> Result:
    """Run an item in the folder `root` for at most so many seconds."""
    if missing := [name for name in item.modules if importlib.util.find_spec(name) is None]:
        return Result(f"can't run without {', '.join(missing)}", 0, "")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tplab-gpu-check-") as scratch:
        environment = os.environ | item.environment | {"TMPDIR": scratch, "PYTHONUNBUFFERED": "1"}
        path = [os.path.abspath(part) for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
        environment["PYTHONPATH"] = os.pathsep.join([str(root), *path])
        with open(Path(scratch, "output"), "w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                [sys.executable, *item.command], cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip
            status = _wait(process, seconds)
            output.seek(0)
            said = output.read()[-KEPT:]
    state = UNFINISHED if status is None else PASSED if status == 0 and item.says in said else FAILED
    if status is None and seconds >= item.limit:
        state, said = FAILED, f"{said}\n(stopped after {item.limit:.0f} s, its limit)"
    return Result(state, time.monotonic() - began, said)


def _wait(process: subprocess.Popen, seconds: float) -> int | None:
    """Return a process's exit status, or None if it was interrupted. Nothing that it started is left."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then shows the failures so far, and where it was
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def fingerprint(root: Path, *facts: str) -> str:
    """Return a hash of the code that the items run, and of facts about the machine."""
    digest = hashlib.sha256("\n".join(facts).encode())
    for folder in ("tplab", "tests", "benchmarks", "solutions"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
