"""Time a training step of the capstone on one device, with tplab's layers at p = 1 and with plain PyTorch's.

    python -m benchmarks.gpu [--compile] [--profile] [--small]

This shows what parallel layers cost when there is nothing to share. Both kinds of layers, eager or compiled, train the
same GPT with the same weights, optimizer, sequences and precision. They take turns (`benchmarks.turns`).

The utilization is based on the FLOPs that the model needs (`tplab.cost.flops`), and appears only for GPUs that
`tplab.cost.machines` knows. The peak is the memory that torch's allocator handed out for this way alone: weights,
optimizer, gradients and activations. `--profile` adds the ten kernels (on a CPU, operations) in which each way spends
the most time in a step.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.profiler import profile

from benchmarks.turns import milliseconds, ratio, table, this_machine, timed
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

LAYERS: dict[str, Any] = {"plain PyTorch": "plain", "tplab": "tplab"}
SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_length": 32, "vocab_size": 512, "batch_size": 4,
    "micro_batch_size": 4,
}  # fmt: skip
ROUNDS = 10
CLOSE = 0.02  # the largest relative difference allowed between the two first losses, in bfloat16


def on_one_rank(**changes: Any) -> Settings:
    """Return the settings of the preset h100x1, with everything on one rank, and with these changes."""
    return replace(PRESETS["h100x1"], tp=1, dp=1, sequence_parallel=False, recompute="nothing", **changes)


@dataclass
class Outcome:
    """What was measured for one way. `kernels` is a table of those that take the most time, if they were profiled."""

    loss: float
    peak: int
    seconds: list[float] = field(default_factory=list)
    kernels: str = ""


def measure(settings: Settings, rounds: int, profiled: bool = False) -> dict[str, Outcome]:
    """Measure both kinds of layers on a rank, in turns. Raises ValueError if their losses differ in the first step."""
    made: dict[str, Callable[[], float]] = {}
    outcomes: dict[str, Outcome] = {}
    for name, layers in LAYERS.items():
        made[name], held = _make(replace(settings, layers=layers))
        loss = made[name]()  # the first step includes compilation and everything else that's done only once
        outcomes[name] = Outcome(loss, peak=held())
        print(f"{name}: loss {loss:.4f} in the first step", flush=True)
    first = outcomes["plain PyTorch"].loss
    for name, outcome in outcomes.items():
        if not abs(outcome.loss - first) <= CLOSE * abs(first):
            raise ValueError(f"{name} has loss {outcome.loss} in the first step, and plain PyTorch {first}")
    for name, step in made.items():
        for _ in range(2):
            step()
        outcomes[name].peak += _peak(step)
    for name, seconds in timed(made, rounds, now).items():
        outcomes[name].seconds = seconds
    for name, step in made.items() if profiled else ():
        with profile() as profiler:
            step()
        by = f"self_{device().type}_time_total".replace("cuda", "device")
        outcomes[name].kernels = profiler.key_averages().table(by, row_limit=10, max_name_column_width=80)
    return outcomes


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


def report(settings: Settings, outcomes: Mapping[str, Outcome], peak: float | None) -> str:
    """Return a table with a row for each way, including its ratio to the first one.

    peak: FLOP/s of the device (None: unknown)
    """
    first = next(iter(outcomes.values())).seconds
    rows = []
    for name, outcome in outcomes.items():
        speed = model_flops(settings.model, settings.batch_size) / statistics.median(outcome.seconds)
        share = f", {speed / peak:.1%}" if peak else ""
        rows.append([
            name, milliseconds(outcome.seconds, ".1f"), ratio(outcome.seconds, first, ".3f"),
            f"{speed / 1e12:.2f}{share}", f"{outcome.peak / 1e9:.2f}",
        ])  # fmt: skip
    head = ("a step", "ms: least, median (quartiles)", "ratio (quartiles)", "TFLOP/s, utilization", "GB peak")
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile the layers of both with torch.compile")
    parser.add_argument("--profile", action="store_true", help="show where each way spends its time")
    parser.add_argument("--small", action="store_true", help="a very small model and two rounds, to try it out")
    options = parser.parse_args()
    settings = on_one_rank(**(SMALL if options.small else {}), compile=options.compile)
    backend, rounds = backend_for(1), 2 if options.small else ROUNDS
    place = torch.device("cuda" if backend == "nccl" else "cpu")
    (outcomes,) = launch(measure, 1, args=(settings, rounds, options.profile), backend=backend, timeout=None)
    kind = "compiled" if options.compile else "eager"
    print(f"\n{this_machine(place)}, {settings.precision}, {kind}, {rounds} rounds\n")
    print(report(settings, outcomes, machine.flops if (machine := known_machine(place)) else None))
    for name, outcome in outcomes.items() if options.profile else ():
        print(f"\n{name}\n{outcome.kernels}")


if __name__ == "__main__":
    main()
