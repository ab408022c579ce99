"""Time a training step of the capstone on one device, with tplab's layers at p = 1 and with plain PyTorch's.

    python -m benchmarks.gpu [--rounds 20] [--eager] [--profile] [--small]

This shows what parallel layers cost when there is nothing to share. A way is one kind of layers, either eager or
compiled. All ways train the same GPT with the same weights, optimizer, sequences and precision. They take turns
(`benchmarks.turns`). The ratio is that to plain PyTorch of the same kind, eager or compiled.

The utilization is based on the FLOPs that the model needs (`tplab.cost.flops`), and appears only for GPUs that
`tplab.cost.machines` knows. The peak is the memory that torch's allocator handed out for this way alone: weights,
optimizer, gradients and activations. `waits` counts how often a step makes the CPU wait for the GPU. Two or three
waits, for the first and last numbers of a step, do no harm. `--profile` adds the ten kernels (on a CPU, operations) in
which each way spends the most time in a step.
"""

import argparse
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from traceback import format_exception_only
from typing import Any

import torch

from benchmarks.turns import milliseconds, ratio, table, this_machine, turns
from tplab import device, launch
from tplab.capstone.settings.io import PRESETS
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import build_model
from tplab.capstone.training.loop import compile_layers
from tplab.capstone.training.meter import known_machine
from tplab.capstone.training.ranks import join
from tplab.capstone.training.trainer import Trainer
from tplab.collectives.links import now
from tplab.cost.flops import model_flops
from tplab.memory.meter import optimizer_bytes, parameter_bytes
from tplab.runtime.devices import backend_for
from tplab.trace.rank_trace import trace_rank

LAYERS = {"plain PyTorch": "plain", "tplab": "tplab"}
EAGER: dict[str, dict[str, Any]] = {name: {"layers": layers, "compile": False} for name, layers in LAYERS.items()}
COMPILED = {f"{name}, compiled": changes | {"compile": True} for name, changes in EAGER.items()}
SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_length": 32, "vocab_size": 512, "batch_size": 4,
    "micro_batch_size": 4,
}  # fmt: skip
SHOWN_KERNELS = 10
CLOSE = 0.02  # the largest relative difference allowed between two ways' first losses, in bfloat16


def on_one_rank(**changes: Any) -> Settings:
    """Return the settings of the preset h100x1, with everything on one rank, and with these changes."""
    return replace(PRESETS["h100x1"], tp=1, dp=1, sequence_parallel=False, recompute="nothing", **changes)


@dataclass
class Outcome:
    """What was measured for one way.

    kernels    (name, calls, seconds) of the kernels in which a step spends the most time, if they were profiled
    missing    why the way couldn't take a step, in which case nothing was measured
    """

    loss: float = 0.0
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    waits: int = 0
    kernels: list[tuple[str, int, float]] = field(default_factory=list)
    missing: str = ""


def measure(
    settings: Settings, ways: Mapping[str, Mapping[str, Any]], rounds: int, profile: bool = False
) -> dict[str, Outcome]:
    """Measure all ways on a rank, in turns.

    A way whose first step fails is left out, and its outcome says why. Raises ValueError before the first turn if the
    loss of a way differs from that of the first way.
    """
    made: dict[str, Callable[[], float]] = {}
    outcomes: dict[str, Outcome] = {}
    for name, changes in ways.items():
        try:
            step, held = _make(replace(settings, **changes))
            loss = step()  # the first step includes compilation and everything else that's done only once
        except Exception as error:  # without this way, the others can still be compared
            outcomes[name] = Outcome(missing="".join(format_exception_only(error)).splitlines()[0])
            continue
        made[name], outcomes[name] = step, Outcome(loss, peak=held())
        print(f"{name}: loss {loss:.4f} in the first step", flush=True)
    names = list(made)
    for name in names:
        loss, first = outcomes[name].loss, outcomes[names[0]].loss
        if not abs(loss - first) <= CLOSE * abs(first):
            raise ValueError(f"{name} has loss {loss} in the first step, and {names[0]} {first}")
    for name, step in made.items():
        for _ in range(2):
            step()
        outcomes[name].peak += _peak(step)
        outcomes[name].waits = _waits(step)
    for name in turns(made, rounds):
        began = now()
        made[name]()
        outcomes[name].seconds.append(now() - began)
    for name, step in made.items() if profile else ():
        outcomes[name].kernels = _kernels(step)
    return outcomes


def _kernels(step: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Return (name, calls, seconds) of the kernels in which a step spends the most time."""
    with trace_rank() as trace:
        step()
    kernels: dict[str, list[float]] = defaultdict(list)
    for span in trace.spans:
        kernels[span.name].append(span.end - span.start)
    found = [(name, len(seconds), sum(seconds)) for name, seconds in kernels.items()]
    return sorted(found, key=lambda kernel: kernel[2], reverse=True)[:SHOWN_KERNELS]


def _make(settings: Settings) -> tuple[Callable[[], float], Callable[[], int]]:
    """Return a function that runs a step, and one that counts the bytes of the weights and of the optimizer.

    The first function returns the loss when the device is done.
    """
    ranks = join(settings)
    model = build_model(settings, settings.model, mesh=ranks.mesh, device=ranks.device)
    if settings.compile:
        compile_layers(model)
    trainer = Trainer(model, settings, ranks)
    seeded = torch.Generator().manual_seed(0)
    text = torch.randint(settings.vocab_size, (settings.batch_size, settings.seq_length + 1), generator=seeded)
    ids, targets = text[:, :-1].to(ranks.device), text[:, 1:].to(ranks.device)

    def run() -> float:
        loss, _ = trainer.run(1, ids, targets)
        return float(loss)

    return run, lambda: parameter_bytes(model) + optimizer_bytes(trainer.training.torch_optimizer)


def _peak(step: Callable[[], object]) -> int:
    """Return the most bytes that the GPU's allocator had handed out during a step, beyond those from before it."""
    if device().type != "cuda":
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def _waits(step: Callable[[], object]) -> int:
    """Return how often a step makes the CPU wait for the GPU."""
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


def report(settings: Settings, outcomes: Mapping[str, Outcome], peak: float | None) -> str:
    """Return a table with a row for each way, including its ratio to plain PyTorch of the same kind.

    peak: FLOP/s of the device (None: unknown)
    """
    plain = {_kind(name): outcome.seconds for name, outcome in reversed(outcomes.items()) if not outcome.missing}
    flops = model_flops(settings.model, settings.batch_size)
    rows: list[list[object]] = []
    for name, outcome in outcomes.items():
        if outcome.missing:
            rows.append([name, f"missing: {outcome.missing}"])
            continue
        median = statistics.median(outcome.seconds)
        share = f", {flops / median / peak:.1%}" if peak else ""
        rows.append([
            name, milliseconds(outcome.seconds, ".1f"), ratio(outcome.seconds, plain[_kind(name)], ".3f"),
            f"{settings.tokens_per_step / median:,.0f}", f"{flops / median / 1e12:.2f}{share}",
            f"{outcome.peak / 1e9:.2f}", outcome.waits,
        ])  # fmt: skip
    head = ("a step", "ms: least, median (quartiles)", "ratio (quartiles)", "tokens/s", "TFLOP/s, utilization")
    return table((*head, "GB peak", "waits"), rows)


def kernel_tables(outcomes: Mapping[str, Outcome]) -> str:
    """Return a table for each way that was profiled, with the kernels in which it spends the most time."""
    return "\n\n".join(
        table(
            (f"kernel of {name}", "calls", "ms in a step"),
            [(kernel[:100], calls, f"{1000 * seconds:.2f}") for kernel, calls, seconds in outcome.kernels],
        )
        for name, outcome in outcomes.items()
        if outcome.kernels
    )


def _kind(way: str) -> str:
    """Return a way's kind, "" for eager or "compiled". Only a comparison within a kind shows what the layers cost."""
    return way.partition(", ")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="2 or more")
    parser.add_argument("--eager", action="store_true", help="leave torch.compile out")
    parser.add_argument("--profile", action="store_true", help="show where each way spends its time")
    parser.add_argument("--small", action="store_true", help="a very small model, to try it out")
    options = parser.parse_args()
    settings = on_one_rank(**(SMALL if options.small else {}))
    backend = backend_for(1)
    place = torch.device("cuda" if backend == "nccl" else "cpu")
    ways = EAGER if options.eager else EAGER | COMPILED
    given = (settings, ways, options.rounds, options.profile)
    (outcomes,) = launch(measure, 1, args=given, backend=backend, timeout=None)
    print(f"\n{this_machine(place)}, {settings.precision}, {options.rounds} rounds\n")
    print(report(settings, outcomes, machine.flops if (machine := known_machine(place)) else None))
    print("\n" + kernel_tables(outcomes), flush=True)
    sys.exit(any(one.missing for one in outcomes.values()))


if __name__ == "__main__":
    main()
