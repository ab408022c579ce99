"""What a layer on p ranks costs, beside other ways to compute the same: CPU time, wall time, bytes and peak memory.

    python -m benchmarks.layers [--ranks 2] [--rounds 20] [--vocabulary 32768] [--hidden 1024] [--tokens 1024]

So far the LM head with its loss: logits [n, v] of x [n, h], the mean cross-entropy, and the gradients of x and of the
weight, in float32, one thread a rank. All ways live in the same ranks and take turns in every round, in an order drawn
anew, so that a busy moment meets them all. CPU time is summed over the ranks, and includes the threads of gloo. The
ratio is the median over the rounds of (this way / the first way in the same round). Bytes are those of the collectives
that one rank enters (the record's message sizes); the peak is what the allocator of a rank handed out during one step,
beyond x, the weight and the target. Losses and gradients of all ways are compared before anything is measured.
"""

import argparse
import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.lm_heads import WAYS
from tplab import launch, record


@dataclass
class Outcome:
    """What one rank measured of one way."""

    cpu: list[float] = field(default_factory=list)  # seconds, one for each round
    wall: list[float] = field(default_factory=list)
    bytes: int = 0
    collectives: int = 0
    peak: int = 0
    absent: str = ""


def measure(rounds: int, vocabulary: int, hidden: int, tokens: int) -> dict[str, Outcome]:
    """On a rank: all ways in turns."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5
    x = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    outcomes = {name: Outcome() for name in WAYS}
    steps: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    for name, way in WAYS.items():
        try:
            steps[name] = _step(*way(weight), x, target)
        except ImportError as error:
            outcomes[name].absent = str(error)
    _compare(steps)
    for name, step in steps.items():
        with record() as sent:
            step()
        outcomes[name].bytes = sum(collective.bytes for collective in sent)
        outcomes[name].collectives = len(sent)
        outcomes[name].peak = _peak(step)
    order = random.Random(0)  # the same on every rank
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            outcomes[name].cpu.append(time.process_time() - cpu)
            outcomes[name].wall.append(time.perf_counter() - wall)
    return outcomes


def _step(forward: Callable, weight: Tensor, x: Tensor, target: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    def step() -> tuple[Tensor, ...]:
        """Loss and gradients of x and of the weight; the gradients of the last step are gone before."""
        x.grad = weight.grad = None
        loss = forward(x, target)
        with getattr(forward, "backward_inside", contextlib.nullcontext)():
            loss.backward()
        assert x.grad is not None
        assert weight.grad is not None
        result = loss.detach(), x.grad, weight.grad
        x.grad = weight.grad = None
        return result

    return step


def _compare(steps: dict[str, Callable[[], tuple[Tensor, ...]]]) -> None:
    first: list[Tensor] = []
    for name, step in steps.items():
        found = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in step()]
        first = first or found
        for what, one, other in zip(("loss", "dx", "dW"), first, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-7, msg=lambda text: f"{name}, {what}: {text}")  # noqa: B023


def _peak(step: Callable[[], object]) -> int:
    """Bytes that the allocator had handed out at the fullest moment of a step, over what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    results = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in results if event.name() == "[memory]")
    live = peak = 0
    for _, size in changes:
        live += size
        peak = max(peak, live)
    return peak


def table(results: list[dict[str, Outcome]]) -> str:
    """Rows of (way, CPU ms, ratio, wall ms, collectives, bytes, MB at the peak), of the outcomes of all ranks."""
    names = [name for name in WAYS if not results[0][name].absent]
    cpu = {
        name: [sum(ranks) for ranks in zip(*(result[name].cpu for result in results), strict=True)] for name in names
    }
    wall = {name: [max(ranks) for ranks in zip(*(r[name].wall for r in results), strict=True)] for name in names}
    lines = [
        "| LM head and loss | CPU ms: least, median (quartiles) | ratio | wall ms: least, median "
        "| collectives | bytes | MB peak |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for name in names:
        ratios = [mine / first for mine, first in zip(cpu[name], cpu[names[0]], strict=True)]
        low, middle, high = (1000 * value for value in statistics.quantiles(cpu[name], n=4))
        outcome = results[0][name]
        lines.append(
            f"| {name} | {1000 * min(cpu[name]):.0f}, **{middle:.0f}** ({low:.0f}-{high:.0f}) "
            f"| {statistics.median(ratios):.2f} "
            f"| {1000 * min(wall[name]):.0f}, {1000 * statistics.median(wall[name]):.0f} "
            f"| {outcome.collectives} | {outcome.bytes:,} | {outcome.peak / 1e6:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("quartiles need at least 2 rounds")
    sizes = (options.vocabulary, options.hidden, options.tokens)
    results = launch(measure, options.ranks, args=(options.rounds, *sizes), backend="gloo", timeout=None)
    shape = "v = {:,}, h = {:,}, {:,} tokens".format(*sizes)
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{shape}, p = {options.ranks}, {options.rounds} rounds ({machine})\n")
    print(table(list(results)))
    for name, outcome in results[0].items():
        if outcome.absent:
            print(f"\nabsent: {name} ({outcome.absent})")


if __name__ == "__main__":
    main()
