"""Measure how long it takes to run a function on 2 and on 4 ranks, with `tplab.launch` and in other ways.

    python -m benchmarks.launch [--rounds 15] [--cold 3] [--ranks 2 4]

One launch starts the ranks, creates the process group, all-reduces a single number, and ends. `warm` launches follow
others in the same program. A `cold` launch is the first one of a fresh Python, and includes the import of torch. Each
way of launching has its own process, and all ways take turns (`benchmarks.turns`). A way that fails or hangs has no
times from then on, and its row says so.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection

from benchmarks.turns import milliseconds, ratio, table, this_machine, turns

PATIENCE = 60  # seconds, after which a launch counts as hanging


class Failed(Exception):  # noqa: N818 (a launch that did)
    """Raised if a launch ended with an error, didn't end, or wasn't possible. The message says why."""


class Driver:
    """A process that runs one way of launching, once per request."""

    def __init__(self, name: str) -> None:
        fresh = multiprocessing.get_context("spawn")
        self._requests, theirs = fresh.Pipe()
        self._process = fresh.Process(target=drive, args=(name, theirs))
        self._process.start()
        theirs.close()

    def launch(self, world_size: int) -> float:
        """Launch once, and return the seconds. Raises Failed if there was no successful launch."""
        try:
            self._requests.send(world_size)
            if not self._requests.poll(PATIENCE):
                raise Failed(f"no answer within {PATIENCE} s")
            answer = self._requests.recv()
        except (EOFError, OSError):
            raise Failed("died") from None
        if isinstance(answer, str):
            raise Failed(answer)
        return answer

    def close(self) -> None:
        self._requests.close()
        self._process.join(20)
        if self._process.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)  # including the ranks of a launch that hangs
            self._process.join()


def drive(name: str, requests: Connection) -> None:
    """Run a driver's process: launch once for every request. The first time includes the imports."""
    os.setsid()
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # some ways are talkative
        os.dup2(quiet, stream)
    way = None
    with contextlib.suppress(EOFError):
        while world_size := requests.recv():
            begin = time.perf_counter()
            try:
                if way is None:
                    from benchmarks.launchers import WAYS

                    way = WAYS[name]()
                way(world_size)
                requests.send(time.perf_counter() - begin)
            except Exception as error:  # including that of a launcher that isn't installed
                requests.send(repr(error))


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
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    from benchmarks.launchers import WAYS  # here, so that a driver's first launch includes the import of torch

    race = Race(list(WAYS), options.ranks)
    race.cold(options.cold)
    race.warm(options.rounds)
    print(f"\nLaunching a function with one all_reduce, process group included ({this_machine()})\n")
    print(race.table())


if __name__ == "__main__":
    main()
