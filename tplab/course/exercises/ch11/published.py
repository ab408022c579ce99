"""Published measurements to compare the cost model with. The model doesn't use them, but the tests and chapter 11 do.

Each row contains a configuration and what was measured for it. Every GPT that `gpt` builds has a vocabulary of 51,200
(padded so that 8 ranks share it in multiples of 128), dropout 0.1, a tied embedding, and learned positions, as in the
papers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from tplab.cost.layer import layer_time
from tplab.cost.machines import Machine
from tplab.cost.step import Program, step_time, throughput
from tplab.memory.config import PRESETS, GPTConfig, Recompute
from tplab.memory.memory_bill import Layout

VOCABULARY = 51200


def gpt(num_layers: int, hidden_size: int, num_heads: int, seq_length: int = 2048) -> GPTConfig:
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        vocab_size=VOCABULARY,
        seq_length=seq_length,
    )


@dataclass(frozen=True)
class Run:
    """A measured training run, with its layout and the performance that it achieved."""

    name: str
    config: GPTConfig
    layout: Layout
    program: Program
    parameters: float  # according to the paper
    tflops: float  # achieved per GPU, including FLOPs of recomputation
    share_of_peak: float


# Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", table 1,
# measured on A100s. All activations are recomputed. The micro-batch sizes and the numbers of chunks aren't in the
# paper, but in the script that reproduces its results (NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh). The
# scatter/gather optimization is on (section 5.1). Without a pipeline, torch's DDP sums the gradients during the
# backward pass, because the script sets DDP=torch.
_TABLE_1 = (
    # billions, heads, hidden, layers, tp, pp, GPUs, batch, TFLOP/s, % of peak; micro-batch, chunks
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 44, 16, 1),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 44, 16, 1),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 46, 16, 1),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 43, 8, 1),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 44, 4, 1),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 45, 2, 3),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 47, 2, 2),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 50, 1, 2),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 52, 1, 3),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 52, 1, 1),
)


def _narayanan(row: tuple) -> Run:
    billions, heads, hidden, layers, tp, pp, gpus, batch, tflops, percent, micro_batch, chunks = row
    dp = gpus // (tp * pp)
    layout = Layout(tp, pp, dp, micro_batch, batch // (dp * micro_batch), recompute="layers", chunks=chunks)
    program = Program(overlap_input_gradient=False, overlap_gradients=pp == 1, scatter_gather=True)
    return Run(f"{billions:g}B", gpt(layers, hidden, heads), layout, program, billions * 1e9, tflops, percent / 100)


NARAYANAN_TABLE_1 = tuple(map(_narayanan, _TABLE_1))


@dataclass(frozen=True)
class LayerRow:
    """The milliseconds that a layer of the 22-billion-parameter model takes, with micro-batch size 4 and tp = 8."""

    name: str
    sequence_parallel: bool
    recompute: Recompute
    forward: float
    backward: float  # including recomputation


# Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", table 4, measured
# on A100s. The all-reduce of the input's gradient overlaps with the computation of the weight's gradient (section 6.2).
LAYER_22B = gpt(48, 6144, 64)
KORTHIKANTI_TABLE_4 = (
    LayerRow("baseline", False, "nothing", 7.7, 11.9),
    LayerRow("sequence parallel", True, "nothing", 7.2, 11.8),
    LayerRow("baseline, layers again", False, "layers", 7.7, 19.5),
    LayerRow("attention again", False, "attention", 7.7, 13.2),
    LayerRow("sequence parallel, attention again", True, "attention", 7.2, 13.1),
)


@dataclass(frozen=True)
class Iteration:
    """The seconds per iteration without data parallelism, both with full recomputation of every layer and with less."""

    name: str
    config: GPTConfig
    layout: Layout  # of the paper's "present work": sequence parallel, attention recomputed
    program: Program
    layers_again: float
    present_work: float
    mfu: float
    hfu: float


# Tables 3 and 5 of the same paper. The 175B and 530B models run with three chunks (section 6).
def _korthikanti(row: tuple) -> Iteration:
    name, config, pp, batch, micro_batch, chunks, again, present, mfu, hfu = row
    layout = Layout(8, pp, 1, micro_batch, batch // micro_batch, True, "attention", chunks)
    return Iteration(name, config, layout, Program(), again, present, mfu, hfu)


KORTHIKANTI_TABLE_5 = tuple(
    map(
        _korthikanti,
        (
            ("22B", LAYER_22B, 1, 4, 4, 1, 1.42, 1.10, 0.415, 0.437),
            ("175B", gpt(96, 12288, 96), 8, 64, 1, 3, 18.13, 13.75, 0.514, 0.528),
            ("530B", gpt(105, 20480, 128), 35, 280, 1, 3, 49.05, 37.83, 0.560, 0.570),
            ("1T", gpt(128, 25600, 160), 64, 512, 1, 1, 94.42, 71.49, 0.563, 0.570),
        ),
    )
)


@dataclass(frozen=True)
class Measured:
    """One published value, expressed as a speed (FLOP/s per GPU, layers per second, or iterations per second)."""

    name: str
    published: float
    predicted: Callable[[Machine], float]


def published_rows() -> list[Measured]:
    """Return the 28 published values for A100s: ten runs, plus two times each for five layers and four iterations."""
    rows = [
        Measured(f"{run.name}, Narayanan", run.tflops * 1e12, partial(_run_speed, run)) for run in NARAYANAN_TABLE_1
    ]
    for row in KORTHIKANTI_TABLE_4:
        rows.append(Measured(f"layer forward, {row.name}", 1e3 / row.forward, partial(_layer_speed, row, False)))
        rows.append(Measured(f"layer backward, {row.name}", 1e3 / row.backward, partial(_layer_speed, row, True)))
    for iteration in KORTHIKANTI_TABLE_5:
        name = f"{iteration.name}, Korthikanti"
        rows.append(Measured(name, 1 / iteration.present_work, partial(_iteration_speed, iteration, False)))
        again = Measured(
            f"{name}, layers again", 1 / iteration.layers_again, partial(_iteration_speed, iteration, True)
        )
        rows.append(again)
    return rows


def summary(speeds: list[float]) -> dict[str, str]:
    """Return, as text, the mean and extremes of predicted over published speed, and how many are within 10% of 1."""
    within = sum(abs(speed - 1) <= 0.1 for speed in speeds)
    return {
        "mean": f"{fmean(speeds):.2f}", "from": f"{min(speeds):.2f}", "to": f"{max(speeds):.2f}",
        "within 10%": f"{within} of {len(speeds)}",
    }  # fmt: skip


def _run_speed(run: Run, machine: Machine) -> float:
    return throughput(run.config, run.layout, machine, run.program).hardware


def _layer_speed(row: LayerRow, backward: bool, machine: Machine) -> float:
    time = layer_time(
        LAYER_22B, machine, micro_batch=4, tp=8, sequence_parallel=row.sequence_parallel, recompute=row.recompute,
        overlap=True,
    )  # fmt: skip
    return 1 / ((time.recompute + time.backward).total if backward else time.forward.total)


def _iteration_speed(row: Iteration, again: bool, machine: Machine) -> float:
    layout, program = row.layout, row.program
    if again:
        layout = replace(layout, sequence_parallel=False, recompute="layers")
        program = replace(program, scatter_gather=True)
    return 1 / step_time(row.config, layout, machine, program).total


@dataclass(frozen=True)
class LlamaRun:
    """A stage of Llama 3 405B's pre-training on H100s."""

    config: GPTConfig
    layout: Layout
    program: Program
    tflops: float  # model FLOPs per GPU


# Dubey et al. 2024, "The Llama 3 herd of models", table 4, without the row that uses context parallelism. Sequences
# have 8192 tokens, and a step processes 16 million tokens. FSDP shards the optimizer state and doesn't reshard the
# weights after the forward pass (section 3.3.2).
LLAMA_3_TABLE_4 = tuple(
    LlamaRun(
        PRESETS["Llama 3 405B"],
        Layout(tp=8, pp=16, dp=dp, micro_batches=sequences, sequence_parallel=True),
        Program(overlap_gradients=True, shard_optimizer=True),
        tflops,
    )
    for dp, sequences, tflops in ((64, 32, 430), (128, 16, 400))
)
