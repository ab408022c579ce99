"""Measure on one GPU what the cost model assumes about it.

    python -m benchmarks.gpu_constants [--small]

`tplab.cost.machines` takes the peak and the bandwidth of an H100 and an H200 from data sheets. The share of the peak
that large matmuls reach is from a published measurement. All other shares were published for an A100 (`Losses`), and
nobody has measured them on a newer GPU. A single GPU can tell us these:

    fraction       rate of the fastest large matmul / peak
    memory         bytes per second that element-wise kernels read and write / bandwidth
    launch         seconds per kernel when many tiny kernels follow each other
    a layer        seconds of a layer's parts, forward and backward, beside the model's prediction

It takes several GPUs to measure the share of NVLink that a ring reaches (`ring`), and the share of the SMs that a
collective keeps busy (`contention`). Every time is a median, and the inputs are random, because multiplying zeros is
faster. On GPUs that the model doesn't know, there are only measurements. `--small` is for trying it out on any machine,
so it compares its tiny sizes with an H100.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from benchmarks.turns import table, this_machine
from tplab import device, launch
from tplab.capstone.training.meter import known_machine
from tplab.cost.calibration import measure_kernels
from tplab.cost.layer import layer_time
from tplab.cost.machines import MACHINES, Machine
from tplab.memory.config import GPTConfig
from tplab.runtime.devices import backend_for

SIDES, SMALL_SIDES = (1024, 2048, 4096, 8192, 16384), (64, 128)
MEGABYTES, SMALL_MEGABYTES = (16, 128, 1024), (1,)
HIDDEN, SMALL_HIDDEN = (2048, 4096, 8192), (64,)
TINY = 1000  # tiny kernels in a row


def _seconds(run: Callable[[], object]) -> float:
    """Return the median time of a call. Calls that follow each other share the wait for the GPU."""
    run()
    return Timer("run()", globals={"run": run}).blocked_autorange().median


def _dtype() -> torch.dtype:
    return torch.bfloat16 if device().type == "cuda" else torch.float32


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=device(), dtype=_dtype())


def _share(rate: float, peak: float | None) -> str:
    return f"{rate / peak:.3f}" if peak else ""


def matmul_rates(machine: Machine | None, small: bool) -> str:
    assumed = f"; the model assumes {machine.fraction:.3f} for large ones" if machine else ""
    rows = []
    for side in SMALL_SIDES if small else SIDES:
        a, b = _random(side, side), _random(side, side)
        out = torch.empty_like(a)
        rate = 2 * side**3 / _seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
        rows.append((side, f"{rate / 1e12:.2f}", _share(rate, machine and machine.flops)))
    return f"fraction: square matmuls{assumed}\n\n" + table(("side", "TFLOP/s", "share of the peak"), rows)


def memory_rates(machine: Machine | None, small: bool) -> str:
    assumed = f"; the model assumes {machine.losses.memory:.2f}" if machine else ""
    rows = []
    for size in SMALL_MEGABYTES if small else MEGABYTES:
        x = _random(size * 2**20 // (_dtype().itemsize * 1024), 1024)
        y, out, scale = torch.randn_like(x), torch.empty_like(x), _random(1024)
        kernels: dict[str, tuple[int, Callable[[], object]]] = {  # tensors read and written
            "copy": (2, lambda x=x, out=out: out.copy_(x)),
            "add": (3, lambda x=x, y=y, out=out: torch.add(x, y, out=out)),
            "GELU": (2, lambda x=x: F.gelu(x, approximate="tanh")),
            "layer norm": (2, lambda x=x, scale=scale: F.layer_norm(x, (1024,), scale, scale)),
        }
        for name, (tensors, run) in kernels.items():
            rate = tensors * x.nbytes / _seconds(run)
            rows.append((name, size, f"{rate / 1e9:.0f}", _share(rate, machine and machine.bandwidth)))
    head = ("kernel", "MB per tensor", "GB/s", "share of the bandwidth")
    return f"memory: element-wise kernels{assumed}\n\n" + table(head, rows)


def launches(machine: Machine | None, small: bool) -> str:
    x = torch.zeros(1, device=device())

    def many() -> None:
        for _ in range(TINY):
            x.add_(1)

    assumed = f"; the model assumes {1e6 * machine.losses.launch:.1f}" if machine else ""
    return f"launch: {1e6 * _seconds(many) / TINY:.2f} microseconds per tiny kernel{assumed}"


def parts_of_layers(machine: Machine | None, small: bool) -> str:
    micro_batch, parameters = (1, 10_000) if small else (4, 8_000_000)
    texts = []
    for hidden in SMALL_HIDDEN if small else HIDDEN:
        config = GPTConfig(
            num_layers=1, hidden_size=hidden, num_heads=max(8, hidden // 128), vocab_size=512 if small else 51200,
            seq_length=64 if small else 2048, dropout=0.0, flash_attention=True,
        )  # fmt: skip
        kernels = measure_kernels(config, micro_batch, 1, parameters=parameters, dtype=_dtype())
        parts = {name: getattr(kernels, name) for name in ("matmuls", "elementwise", "attention")}
        parts["sum"] = tuple(map(sum, zip(*parts.values(), strict=True)))
        if machine:
            time = layer_time(config, machine, micro_batch=micro_batch)
            parts["predicted"] = time.forward.total, time.backward.total
        rows = [(name, *(f"{1e3 * seconds:.3f}" for seconds in both)) for name, both in parts.items()]
        texts += [
            f"a layer with h = {hidden}, {micro_batch} sequences of {config.seq_length} tokens, in milliseconds",
            table(("part", "forward", "backward"), rows),
            f"AdamW: {1e9 * kernels.optimizer:.4f} nanoseconds per parameter",
        ]
    return "\n\n".join(texts)


def measured(part: Callable[[Machine | None, bool], str], small: bool) -> str:
    """Measure a part on a rank, and return its table."""
    return part(known_machine(device()) or (MACHINES["H100 DGX"] if small else None), small)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try it out")
    options = parser.parse_args()
    backend = backend_for(1)
    print(this_machine(torch.device("cuda" if backend == "nccl" else "cpu")), flush=True)
    for part in (matmul_rates, memory_rates, launches, parts_of_layers):  # each printed as soon as it's there
        (found,) = launch(measured, 1, args=(part, options.small), backend=backend, timeout=None)
        print(f"\n{found}", flush=True)


if __name__ == "__main__":
    main()
