"""Measure what the record costs, by timing all-reduces with and without the recorder, in turns.

    python -m benchmarks.record [--ranks 2 4] [--rounds 400] [--megabytes 1]

It prints rank 0's medians and quartiles in microseconds, and the median over the rounds of (with - without) as a share
of the median without. The difference is what the recorder adds, and the quartiles show how far you can trust it.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from tplab import launch
from tplab.runtime import hooks


def alternate(rounds: int, numel: int) -> tuple[list[float], list[float]]:
    """Return a rank's microseconds for `rounds` all-reduces with the recorder, and for as many without."""
    x = torch.zeros(numel)
    recorder = hooks.active
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * rounds):
        dist.barrier()
        hooks.active = recorder if turn % 2 == 0 else None
        began = time.perf_counter()
        dist.all_reduce(x)
        times[turn % 2].append(1e6 * (time.perf_counter() - began))
        hooks.active = recorder
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--megabytes", type=float, default=1.0, help="size of the tensor (1 MB = 2**20 bytes)")
    options = parser.parse_args()
    numel = round(options.megabytes * 2**20 / 4)
    print(f"all_reduce of {options.megabytes:g} MB, {options.rounds} rounds, microseconds on rank 0")
    print(f"{'ranks':>5}  {'with the record':>24}  {'without':>24}  {'added':>7}")
    for p in options.ranks:
        recorded, plain = launch(alternate, p, args=(options.rounds, numel), backend="gloo", timeout=None)[0]
        added = statistics.median(mine - other for mine, other in zip(recorded, plain, strict=True))
        print(f"{p:5}  {_spread(recorded):>24}  {_spread(plain):>24}  {added / statistics.median(plain):+7.1%}")


def _spread(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


if __name__ == "__main__":
    main()
