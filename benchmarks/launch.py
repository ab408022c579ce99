"""Time `tplab.launch` and `torch.multiprocessing.spawn`, which take turns in one program.

    python -m benchmarks.launch [--rounds 15] [--ranks 2 4]

A launch starts the ranks, creates the process group, all-reduces one number, and ends. With torch's `spawn`, every rank
imports torch. Ours forks the ranks from a process that has already done so. It starts before the first round.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.turns import milliseconds, ratio, table, this_machine, turns
from tplab import launch


def add_up() -> None:
    """All-reduce one number on each rank, and check the sum."""
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    size = dist.get_world_size()
    if number.item() != size * (size + 1) / 2:
        raise RuntimeError(f"rank {dist.get_rank()} got {number.item()}")


def with_tplab(world_size: int) -> None:
    launch(add_up, world_size, backend="gloo")


def with_torch(world_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_join_and_add_up, (world_size, os.path.join(folder, "store")), nprocs=world_size)


def _join_and_add_up(rank: int, world_size: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    add_up()
    dist.destroy_process_group()


WAYS: dict[str, Callable[[int], None]] = {"tplab.launch": with_tplab, "torch.multiprocessing.spawn": with_torch}


def measure(ranks: Iterable[int], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Return the seconds of each launch by number of ranks and way, one per round. The first launches don't count."""
    times: dict[int, dict[str, list[float]]] = {}
    for world_size in ranks:
        for way in WAYS.values():
            way(world_size)
        seconds = defaultdict(list)
        for name in turns(WAYS, rounds):
            began = time.perf_counter()
            WAYS[name](world_size)
            seconds[name].append(time.perf_counter() - began)
        times[world_size] = seconds
    return times


def report(times: dict[int, dict[str, list[float]]]) -> str:
    rows = [
        (name, p, milliseconds(seconds[name]), ratio(seconds[name], seconds["tplab.launch"]))
        for p, seconds in times.items()
        for name in WAYS
    ]
    return table(("a launch", "ranks", "ms: least, median (quartiles)", "ratio (quartiles)"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="2 or more")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    times = measure(options.ranks, options.rounds)
    print(f"\nLaunching a function with one all-reduce ({options.rounds} rounds, {this_machine()})\n")
    print(report(times), flush=True)


if __name__ == "__main__":
    main()
