"""Measure what a layer on p ranks costs, compared with other ways to compute it.

    python -m benchmarks.layers [mlp attention head] [--ranks 2] [--rounds 20] [--small]

The costs are CPU time, wall time, bytes and peak memory. The layers are an MLP, causal self-attention, and the LM head
with its loss, each forward and backward in float32 with one thread per rank. All ways live in the same ranks and take
turns (`benchmarks.turns`). Before anything is measured, their outputs and gradients are compared with those of plain
torch.

CPU time is summed over the ranks and includes gloo's threads. The ratio is that of CPU times, to the first way. `sent`
is the number of bytes that a rank sends in a ring for its collectives. The peak is the memory that a rank's allocator
handed out during one step, beyond x, the parameters and the target.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import blocks, heads
from benchmarks.turns import milliseconds, ratio, table, this_machine, turns
from benchmarks.ways import Problem, Way, gradient
from tplab import launch, record
from tplab.runtime import Record

Ways = Mapping[str, Callable[[Any], Way]]
LAYERS: dict[str, tuple[Callable[..., Problem], Ways, dict[str, int]]] = {  # problem, ways, small sizes
    "mlp": (blocks.mlp, blocks.WAYS, blocks.SMALL),
    "attention": (blocks.attention, blocks.WAYS, blocks.SMALL),
    "head": (heads.head, heads.WAYS, heads.SMALL),
}


@dataclass
class Outcome:
    """What one rank measured for one way."""

    cpu: list[float] = field(default_factory=list)  # seconds, one value per round
    wall: list[float] = field(default_factory=list)
    sent: int = 0
    collectives: int = 0
    peak: int = 0
    absent: str = ""


def measure(make_problem: Callable[[], Problem], ways: Ways, rounds: int) -> tuple[str, dict[str, Outcome]]:
    """Measure all ways on a rank, in turns. Returns the problem's title, and the outcome for each way.

    Raises AssertionError before the first turn if a way's output or gradients differ from those of plain torch.
    """
    torch.set_num_threads(1)
    problem = make_problem()
    outcomes = {name: Outcome() for name in ways}
    made: dict[str, Step] = {}
    for name, way in ways.items():
        try:
            made[name] = Step(way(problem), problem)
        except ImportError as error:
            outcomes[name].absent = str(error)
    right = problem.solve()
    for name, step in made.items():
        with record() as entered:
            found = step()
        _compare(name, found, {what: step.way.cut(what, whole) for what, whole in right.items()})
        outcomes[name].sent, outcomes[name].collectives = sent_in_a_ring(entered), len(entered)
    del right, found
    for name, step in made.items():
        outcomes[name].peak = peak_bytes(step)
    for name in turns(made, rounds):
        torch.set_num_threads(made[name].way.threads)
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        made[name]()
        outcomes[name].cpu.append(time.process_time() - cpu)
        outcomes[name].wall.append(time.perf_counter() - wall)
        torch.set_num_threads(1)
    return problem.title, outcomes


class Step:
    """A forward and a backward pass of one way. Calling it returns the output and all gradients."""

    def __init__(self, way: Way, problem: Problem) -> None:
        self.way = way
        self.takes_part = dist.get_rank() == 0 or not way.alone
        self.x = way.cut("x", problem.inputs["x"]).detach().clone().requires_grad_()
        self.upstream = None if problem.upstream is None else way.cut("output", problem.upstream).clone()

    def __call__(self) -> dict[str, Tensor]:
        if not self.takes_part:
            return {}
        output = self.way.forward(self.x)
        with self.way.around_backward():
            output.backward(self.upstream)
        leaves = {"x": self.x, **self.way.parameters}
        return {"output": output.detach()} | {name: gradient(leaf) for name, leaf in leaves.items()}


def _compare(name: str, found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for what, tensor in found.items():
        one = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        close = 1e-5 * right[what].abs().max().item()
        where = f"{name}, {what}: "
        torch.testing.assert_close(one, right[what], rtol=1e-4, atol=close, msg=where.__add__)


def sent_in_a_ring(entered: Record) -> int:
    """Return the bytes that a rank sends for these collectives in a ring, using the formulas of chapter 01."""
    sent = 0
    for collective in entered:
        p = len(collective.group)
        rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}[collective.kind]
        sent += collective.bytes * rounds * (p - 1) // p
    return sent


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the most bytes that the allocator had handed out during a step, beyond those from before the step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    results = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in results if event.name() == "[memory]")
    live = peak = 0
    for _, size in changes:
        live += size
        peak = max(peak, live)
    return peak


def report(title: str, results: list[dict[str, Outcome]]) -> str:
    """Return a table with a row for each way, given the outcomes of all ranks.

    CPU time is summed over the ranks, wall time is that of the slowest rank, and traffic and memory are those of rank
    0.
    """
    names = [name for name, outcome in results[0].items() if not outcome.absent]
    cpu = {name: [sum(ranks) for ranks in zip(*(r[name].cpu for r in results), strict=True)] for name in names}
    wall = {name: [max(ranks) for ranks in zip(*(r[name].wall for r in results), strict=True)] for name in names}
    rows: list[list[object]] = []
    for name, outcome in results[0].items():
        if outcome.absent:
            rows.append([name, "not installed"])
            continue
        walls = f"{1000 * min(wall[name]):.0f}, {1000 * statistics.median(wall[name]):.0f}"
        sent = f"{outcome.sent:,}"
        compared = ratio(cpu[name], cpu[names[0]])
        rows.append(
            [name, milliseconds(cpu[name]), compared, walls, outcome.collectives, sent, f"{outcome.peak / 1e6:.2f}"]
        )
    head = ("CPU ms: least, median (quartiles)", "ratio (quartiles)", "wall ms: least, median")
    return table((title, *head, "collectives", "sent", "MB peak"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", metavar="layer", help=f"{', '.join(LAYERS)}; all if none is named")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="2 or more")
    parser.add_argument("--small", action="store_true", help="an eighth of each size, to try it out")
    options = parser.parse_args()
    if unknown := set(options.layers) - set(LAYERS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(LAYERS)}")
    os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # keeps the profiler quiet
    for name in options.layers or LAYERS:
        problem, ways, small = LAYERS[name]
        arguments = (partial(problem, **small if options.small else {}), ways, options.rounds)
        results = launch(measure, options.ranks, args=arguments, backend="gloo", timeout=None)
        print(f"\np = {options.ranks}, float32, {options.rounds} rounds ({this_machine()})\n")
        print(report(results[0][0], [outcomes for _, outcomes in results]), flush=True)


if __name__ == "__main__":
    main()
