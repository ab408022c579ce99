"""Measure how long it takes to run a function on 2 and on 4 ranks, with `tplab.launch` and in other ways.

    python -m benchmarks.launch [--rounds 15] [--cold 3] [--ranks 2 4]

One launch starts the ranks, creates the process group, all-reduces a single number, and ends. `warm` launches follow
others in the same program. A `cold` launch is the first one of a fresh Python, and includes the import of torch. Each
way of launching has its own process. All ways take turns in every round, so that a busy moment of the machine affects
all of them. The table shows the median, the quartiles, and the median over the rounds of (this way / tplab.launch in
the same round). If a launch fails or hangs, it's counted, and its way goes on in a new process.
"""

import argparse
import json
import math
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable

PATIENCE = 60  # seconds, after which a launch counts as hanging
NAMES = (
    "tplab.launch",
    "worker pool, new group",
    "torch.multiprocessing, fork server",
    "torch elastic",
    "accelerate.notebook_launcher",
    "torch.multiprocessing.spawn",
)
OURS, POOL = NAMES[:2]


class Absent(Exception):  # noqa: N818 (a state, not a fault)
    """Raised if a way can't be used here. The message says why."""


class Failed(Exception):  # noqa: N818 (a launch that did)
    """Raised if a launch ended with an error, or didn't end."""


class Driver:
    """A process that runs one way of launching, once per request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._answers, theirs = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the driver)
        environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=_loopback())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.launch", "--drive", name, str(theirs)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors, pass_fds=[theirs], env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._file = os.fdopen(self._answers, "r")

    def launch(self, world_size: int) -> float:
        """Launch once, and return the milliseconds. Raises Absent or Failed if there was no successful launch."""
        assert self._process.stdin
        self._process.stdin.write(f"{world_size}\n".encode())
        self._process.stdin.flush()
        ready = select.select([self._file], [], [], PATIENCE)[0]
        line = self._file.readline() if ready else ""
        answer = json.loads(line) if line else {"error": f"no answer within {PATIENCE} s" if not ready else "died"}
        if "absent" in answer:
            raise Absent(answer["absent"])
        if "error" in answer:
            self._errors.seek(0)
            raise Failed(f"{self.name}: {answer['error']}\n{self._errors.read().decode()[-3000:]}")
        return answer["ms"]

    def close(self, patience: float = 20) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # including the ranks of a launch that hangs
            self._process.wait()
        self._file.close()
        self._errors.close()


def _loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


def drive(name: str, answers: int) -> None:
    """Run a driver's process: launch once for every line of stdin. The first time includes the imports."""
    way = None
    for line in sys.stdin:
        begin = time.perf_counter()
        try:
            if way is None:
                from benchmarks.launchers import WAYS

                way = WAYS[name]()
            way(int(line))
            answer = {"ms": 1000 * (time.perf_counter() - begin)}
        except ImportError as error:
            answer = {"absent": str(error)}
        except Exception as error:
            answer = {"error": repr(error)}
        os.write(answers, (json.dumps(answer) + "\n").encode())


def measure_cold(names: Iterable[str], ranks: list[int], repetitions: int) -> dict[tuple[str, int], list[float]]:
    times: dict[tuple[str, int], list[float]] = {}
    for repetition in range(repetitions):
        for world_size in ranks:
            for name in names:
                _say(f"cold {repetition + 1}/{repetitions}, {world_size} ranks: {name}")
                driver = Driver(name)
                try:
                    times.setdefault((name, world_size), []).append(driver.launch(world_size))
                except Failed as reason:
                    print(f"\n{reason}", file=sys.stderr)
                finally:
                    driver.close()
    return times


def measure_warm(names: list[str], ranks: list[int], rounds: int) -> dict[tuple[str, int], list[float]]:
    """Return the milliseconds for each way and number of ranks, one per round, and nan if the launch failed."""
    drivers = {name: _warm_driver(name, ranks) for name in names}
    times: dict[tuple[str, int], list[float]] = {(name, size): [] for name in names for size in ranks}
    try:
        for number in range(rounds):
            for world_size in ranks:
                for name in random.sample(names, len(names)):
                    _say(f"round {number + 1}/{rounds}, {world_size} ranks: {name}")
                    try:
                        times[name, world_size].append(drivers[name].launch(world_size))
                    except Failed as reason:
                        print(f"\n{reason}", file=sys.stderr)
                        times[name, world_size].append(math.nan)
                        drivers[name].close(patience=0)
                        drivers[name] = _warm_driver(name, ranks)
    finally:
        for driver in drivers.values():
            driver.close()
    return times


def _warm_driver(name: str, ranks: list[int], attempts: int = 3) -> Driver:
    """Return a driver that has already launched once on every number of ranks."""
    for _ in range(attempts):
        driver = Driver(name)
        try:
            for world_size in ranks:
                _say(f"warming up: {name}")
                driver.launch(world_size)
            return driver
        except Failed as reason:
            print(f"\n{reason}", file=sys.stderr)
            driver.close(patience=0)
    raise Failed(f"{name} failed {attempts} times in a row")


def find_absent(names: Iterable[str]) -> dict[str, str]:
    """Return the ways that can't be used here, each with the reason."""
    absent = {}
    for name in names:
        driver = Driver(name)
        try:
            driver.launch(2)
        except Absent as reason:
            absent[name] = str(reason)
        finally:
            driver.close()
    return absent


def table(
    names: list[str],
    ranks: list[int],
    warm: dict[tuple[str, int], list[float]],
    cold: dict[tuple[str, int], list[float]],
) -> str:
    lines = ["| ms | " + " | ".join(f"{p} ranks, warm | times ours | {p} ranks, cold" for p in ranks) + " |"]
    lines.append("|---" + "|---:" * 3 * len(ranks) + "|")
    for name in names:
        cells = []
        for world_size in ranks:
            pairs = list(zip(warm[name, world_size], warm[OURS, world_size], strict=True))
            times = [this for this, _ in pairs if not math.isnan(this)]
            ratios = [this / ours for this, ours in pairs if not math.isnan(this + ours)]
            low, middle, high = statistics.quantiles(times, n=4)
            failed = f", {len(pairs) - len(times)} of {len(pairs)} failed" if len(times) < len(pairs) else ""
            first = cold.get((name, world_size))
            cells += [f"**{middle:.0f}** ({low:.0f}-{high:.0f}{failed})", f"{statistics.median(ratios):.2f}"]
            cells.append(f"{statistics.median(first):.0f} ({min(first):.0f}-{max(first):.0f})" if first else "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="warm launches of each way")
    parser.add_argument("--cold", type=int, default=3, help="first launches of each way")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(options.drive[0], int(options.drive[1]))
        return
    if options.rounds < 2:
        parser.error("quartiles need at least 2 rounds")
    absent = find_absent(NAMES)
    names = [name for name in NAMES if name not in absent]
    cold = measure_cold(names, options.ranks, options.cold)
    warm = measure_warm(names, options.ranks, options.rounds)
    _say("")
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"Launching a function with one all_reduce, process group included, in ms ({load}).")
    print(f"Warm: median (quartiles) of {options.rounds} launches. Cold: median (least-most) of {options.cold}.\n")
    print(table(names, options.ranks, warm, cold))
    for name, reason in absent.items():
        print(f"\nabsent: {name} ({reason})")
    print(
        f"\n{POOL!r} keeps its processes, and with them whatever a failed run left there; all others start fresh ones."
    )


if __name__ == "__main__":
    main()
