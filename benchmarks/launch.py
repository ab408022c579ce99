"""Measure how long it takes to run a function on 2 and on 4 ranks, with `tplab.launch` and in other ways.

    python -m benchmarks.launch [--rounds 15] [--cold 3] [--ranks 2 4]

One launch starts the ranks, creates the process group, all-reduces a single number, and ends. `warm` launches follow
others in the same program. A `cold` launch is the first one of a fresh Python, and includes the import of torch. Each
way of launching has its own process, and all ways take turns (`benchmarks.turns`). A way that fails or hangs has no
times from then on, and its row says so.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.turns import milliseconds, ratio, table, this_machine, turns

PATIENCE = 60  # seconds, after which a launch counts as hanging


class Failed(Exception):  # noqa: N818 (a launch that did)
    """Raised if a launch ended with an error, didn't end, or wasn't possible. The message says why."""


class Driver:
    """A process that runs one way of launching, once per request."""

    def __init__(self, name: str) -> None:
        answers, theirs = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the driver)
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.launch", "--drive", name, str(theirs)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors, pass_fds=[theirs],
            env=dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=loopback), start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._answers = os.fdopen(answers, "r")

    def launch(self, world_size: int) -> float:
        """Launch once, and return the seconds. Raises Failed if there was no successful launch."""
        assert self._process.stdin
        self._process.stdin.write(f"{world_size}\n".encode())
        self._process.stdin.flush()
        ready = select.select([self._answers], [], [], PATIENCE)[0]
        line = self._answers.readline() if ready else ""
        answer = json.loads(line) if line else {"error": f"no answer within {PATIENCE} s" if not ready else "died"}
        if "error" in answer:
            self._errors.seek(0)
            print(self._errors.read().decode()[-3000:], file=sys.stderr)
            raise Failed(answer["error"])
        return answer["seconds"]

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # including the ranks of a launch that hangs
            self._process.wait()
        self._answers.close()
        self._errors.close()


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
            answer = {"seconds": time.perf_counter() - begin}
        except Exception as error:  # including that of a launcher that isn't installed
            answer = {"error": repr(error)}
        os.write(answers, (json.dumps(answer) + "\n").encode())


class Race:
    """The ways that are left, with their times in seconds, by kind of launch, number of ranks, and way."""

    def __init__(self, names: Sequence[str], ranks: Sequence[int]) -> None:
        self.names, self.ranks = names, ranks
        self.failed: dict[str, str] = {}
        self.times: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)

    def left(self) -> list[str]:
        return [name for name in self.names if name not in self.failed]

    def run(self, kind: str, name: str, driver: Driver, world_size: int) -> None:
        """Launch once. A way that fails loses its times."""
        try:
            self.times[kind, world_size, name].append(driver.launch(world_size))
        except Failed as reason:
            self.failed[name] = str(reason)

    def cold(self, repetitions: int) -> None:
        for world_size in self.ranks:
            for name in turns(self.left(), repetitions):
                if name not in self.failed:
                    driver = Driver(name)
                    self.run("cold", name, driver, world_size)
                    driver.close()

    def warm(self, rounds: int) -> None:
        drivers = {name: Driver(name) for name in self.left()}
        try:
            for kind, repetitions in (("first", 1), ("warm", rounds)):
                for world_size in self.ranks:
                    for name in turns(drivers, repetitions):
                        if name not in self.failed:
                            self.run(kind, name, drivers[name], world_size)
        finally:
            for driver in drivers.values():
                driver.close()

    def table(self) -> str:
        head = [f"{p} ranks, {what}" for p in self.ranks for what in ("warm", "ratio", "cold")]
        rows = [[name, *(text for p in self.ranks for text in self._cells(name, p))] for name in self.left()]
        rows += [[name, f"failed: {reason}"] for name, reason in self.failed.items()]
        return table(["ms: least, median (quartiles)", *head], rows)

    def _cells(self, name: str, world_size: int) -> tuple[str, str, str]:
        warm, cold = self.times["warm", world_size, name], self.times["cold", world_size, name]
        compared = ratio(warm, self.times["warm", world_size, self.left()[0]])
        return milliseconds(warm), compared, milliseconds(cold) if len(cold) > 1 else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="warm launches of each way, 2 or more")
    parser.add_argument("--cold", type=int, default=3, help="first launches of each way")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(options.drive[0], int(options.drive[1]))
        return
    from benchmarks.launchers import WAYS  # here, so that a driver's first launch includes the import of torch

    race = Race(list(WAYS), options.ranks)
    race.cold(options.cold)
    race.warm(options.rounds)
    print(f"\nLaunching a function with one all_reduce, process group included ({this_machine()})\n")
    print(race.table())


if __name__ == "__main__":
    main()
