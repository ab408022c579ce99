"""What all benchmarks have in common: tables, a line that describes the machine, and ways that take turns.

A comparison has several ways to do the same thing, and its table shows the ratio of each to the first.

In every round, each way has one turn, in a new random order, so that a busy moment of the machine affects all of them.
The ratio is the median over the rounds of (this way / the first way in the same round). If the quartiles of two ways
overlap, the ways can't be told apart.
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tplab.common.cores import cores


def timed(
    ways: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return each way's seconds, one per round. The order is random, but the same on every rank."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(ways), len(ways)):
            began = clock()
            ways[name]()
            times[name].append(clock() - began)
    return times


def spread(values: Sequence[float], factor: float = 1.0, digits: str = ".0f") -> str:
    """Format the median and the quartiles, multiplied by `factor`: "**12** (11-14)"."""
    low, middle, high = (
        f"{factor * value:{digits}}" for value in statistics.quantiles(values, n=4, method="inclusive")
    )
    return f"**{middle}** ({low}-{high})"


def ratio(values: Sequence[float], first: Sequence[float], digits: str = ".2f") -> str:
    """Format the ratio to the first way, whose values come from the same rounds."""
    return spread([mine / other for mine, other in zip(values, first, strict=True)], digits=digits)


def milliseconds(seconds: Sequence[float], digits: str = ".0f") -> str:
    """Format times: the least one, the median, and the quartiles."""
    return f"{1000 * min(seconds):{digits}}, {spread(seconds, 1000, digits)}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. Its first column is aligned to the left, and all others to the right."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for row in rows:
        cells = [*map(str, row), *[""] * (len(head) - len(row))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def this_machine(place: torch.device) -> str:
    """Describe the machine and its software in a few words."""
    gpu = place.type == "cuda"
    where = torch.cuda.get_device_name(place) if gpu else f"{cores()} cores, load {os.getloadavg()[0]:.1f}"
    return f"{where}, torch {torch.__version__}"
