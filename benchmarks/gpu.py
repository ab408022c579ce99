"""Time a training step of the capstone on one device, with tplab's layers at p = 1 and with plain PyTorch's.

    python -m benchmarks.gpu [--preset h100x1] [--rounds 20] [--eager] [--small]

This shows what parallel layers cost when there is nothing to share. A way is one kind of layers, either eager or
compiled. All ways train the same GPT with the same weights, optimizer, sequences and precision. They take turns in
every round, in a new random order. The ratio is the median over the rounds of (this way / plain PyTorch of the same
kind, eager or compiled, in the same round). If the quartiles of two ways overlap, the ways can't be told apart.

The utilization is based on the FLOPs that the model needs (`tplab.cost.flops`), and appears only for GPUs that
`tplab.cost.machines` knows. The peak is the memory that torch's allocator handed out for this way alone: weights,
optimizer, gradients and activations. `waits` counts how often a step makes the CPU wait for the GPU. Two or three
waits, for the first and last numbers of a step, do no harm.
"""

import argparse
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tplab import device, launch
from tplab.capstone.settings.io import PRESETS
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import build_model
from tplab.capstone.training.loop import compile_layers
from tplab.capstone.training.meter import known_machine
from tplab.capstone.training.ranks import join
from tplab.capstone.training.step import Step
from tplab.cost.flops import model_flops
from tplab.memory.meter import optimizer_bytes, parameter_bytes
from tplab.runtime.devices import backend_for

EAGER: dict[str, dict[str, Any]] = {
    "plain PyTorch": {"layers": "plain", "compile": False},
    "tplab": {"layers": "tplab", "compile": False},
}
COMPILED: dict[str, dict[str, Any]] = {
    "plain PyTorch, compiled": {"layers": "plain", "compile": True},
    "tplab, compiled": {"layers": "tplab", "compile": True},
}
SMALL = {
    "num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_length": 32, "vocab_size": 512, "batch_size": 4,
    "micro_batch_size": 4,
}  # fmt: skip
CLOSE = 0.02  # the largest relative difference allowed between two ways' first losses, in bfloat16


@dataclass
class Outcome:
    """What was measured for one way."""

    loss: float
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    waits: int = 0


def measure(settings: Settings, ways: Mapping[str, Mapping[str, Any]], rounds: int) -> dict[str, Outcome]:
    """Measure all ways on a rank, in turns.

    Raises ValueError before the first turn if a way's loss differs from that of the first way.
    """
    made: dict[str, Callable[[], float]] = {}
    outcomes: dict[str, Outcome] = {}
    for name, changes in ways.items():
        made[name], held = _make(replace(settings, **changes))
        loss = made[name]()  # the first step includes compilation and everything else that's done only once
        outcomes[name] = Outcome(loss, peak=held())
    first = next(iter(outcomes.values())).loss
    for name, outcome in outcomes.items():
        if not abs(outcome.loss - first) <= CLOSE * abs(first):
            raise ValueError(f"{name} has loss {outcome.loss} in the first step, and {next(iter(outcomes))} {first}")
    for name, step in made.items():
        for _ in range(2):
            step()
        outcomes[name].peak += _peak(step)
        outcomes[name].waits = _waits(step)
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(made), len(made)):
            _finish()
            began = time.perf_counter()
            made[name]()
            outcomes[name].seconds.append(time.perf_counter() - began)
    return outcomes


def _make(settings: Settings) -> tuple[Callable[[], float], Callable[[], int]]:
    """Return a function that runs a step, and one that counts the bytes of the weights and of the optimizer.

    The first function returns the loss when the device is done.
    """
    ranks = join(settings)
    model = build_model(settings, settings.model, mesh=ranks.mesh, device=ranks.device)
    if settings.compile:
        compile_layers(model)
    step = Step(model, settings, ranks)
    text = torch.randint(settings.vocab_size, (settings.batch_size, settings.seq_length + 1), generator=_seeded())
    ids, targets = text[:, :-1].to(ranks.device), text[:, 1:].to(ranks.device)

    def run() -> float:
        loss, _ = step.run(1, ids, targets)
        return float(loss)

    return run, lambda: parameter_bytes(model) + optimizer_bytes(step.training.torch_optimizer)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _finish() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def _peak(step: Callable[[], object]) -> int:
    """Return the most bytes that the GPU's allocator had handed out during a step, beyond those from before it."""
    if device().type != "cuda":
        return 0
    _finish()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def _waits(step: Callable[[], object]) -> int:
    if device().type != "cuda":
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def table(settings: Settings, outcomes: Mapping[str, Outcome], peak: float | None) -> str:
    """Return a table with a row for each way, including its ratio to plain PyTorch of the same kind.

    peak: FLOP/s of the device (None: unknown)
    """
    plain = {_kind(name): outcome.seconds for name, outcome in reversed(list(outcomes.items()))}
    flops = model_flops(settings.model, settings.batch_size)
    lines = [
        "| a step | ms: least, median (quartiles) | ratio (quartiles) | tokens/s | TFLOP/s, utilisation | GB peak "
        "| waits |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for name, outcome in outcomes.items():
        ratios = [mine / other for mine, other in zip(outcome.seconds, plain[_kind(name)], strict=True)]
        median = statistics.median(outcome.seconds)
        share = f", {flops / median / peak:.1%}" if peak else ""
        lines.append(
            f"| {name} | {1000 * min(outcome.seconds):.1f}, {_spread(outcome.seconds, 1000, '.1f')} "
            f"| {_spread(ratios, 1, '.3f')} | {settings.tokens_per_step / median:,.0f} "
            f"| {flops / median / 1e12:.2f}{share} | {outcome.peak / 1e9:.2f} | {outcome.waits} |"
        )
    return "\n".join(lines)


def _kind(way: str) -> str:
    """Return a way's kind, "" for eager or "compiled". Only a comparison within a kind shows what the layers cost."""
    return way.partition(", ")[2]


def _spread(values: list[float], factor: int, digits: str) -> str:
    low, middle, high = (
        f"{factor * value:{digits}}" for value in statistics.quantiles(values, n=4, method="inclusive")
    )
    return f"**{middle}** ({low}-{high})"


def _what() -> tuple[str, float | None]:
    """Return the device's name and its peak in FLOP/s (None: unknown)."""
    place = device()
    if place.type == "cpu":
        return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", None
    machine = known_machine(place)
    return torch.cuda.get_device_name(place), None if machine is None else machine.flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), default="h100x1", help="whose model and sequences")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="leave torch.compile out")
    parser.add_argument("--small", action="store_true", help="a very small model, to try it out")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("quartiles need at least 2 rounds")
    settings = replace(PRESETS[options.preset], tp=1, dp=1, sequence_parallel=False, recompute="nothing")
    settings = replace(settings, **SMALL) if options.small else settings
    ways = EAGER if options.eager else EAGER | COMPILED
    given = (settings, ways, options.rounds)
    ((outcomes, (name, peak)),) = launch(_measured, 1, args=given, backend=backend_for(1), timeout=None)
    print(f"\n{name}, torch {torch.__version__}, {settings.precision}, {options.rounds} rounds\n")
    print(table(settings, outcomes, peak), flush=True)


def _measured(settings: Settings, ways: Mapping[str, Any], rounds: int) -> tuple[dict[str, Outcome], Any]:
    return measure(settings, ways, rounds), _what()


if __name__ == "__main__":
    main()
