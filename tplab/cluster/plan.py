"""Chapter 14: every layout of a model over a cluster, with the memory that it needs and its predicted step time.

    n GPUs = tp · pp · dp          tp divides the heads and the MLP size, and each stage has at least one layer
                                   dp · micro-batch divides the number of sequences

We try every such factorization of n with every micro-batch size that is a power of two, every number of chunks that
the pipeline can interleave, with and without sequence parallelism, and with each kind of recomputation (none, attention
or full layers). We keep layouts that fit into a GPU's memory (`tplab.memory.bill`) and sort them by step time
(`tplab.cost.step.step_time`). A tenth of the memory is left free for what the bill doesn't count, such as library
buffers and fragmentation. Gradients are summed over replicas during the backward pass, as DistributedDataParallel does.
`python -m tplab plan` prints these layouts, and what the first one would lose by other choices (`reasons`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

from tplab.cost.machines import Machine
from tplab.cost.step import Program, StepTime, Throughput, achieved, step_time
from tplab.memory.config import PRESETS, GPTConfig, Recompute, parameter_count, tensor_parallel_sizes
from tplab.memory.memory_bill import Bill, Layout, bill

GB = 10**9
TOKENS = 4_000_000  # per step, by default; GPT-3 175B took 3.2 million (Brown et al. 2020, table 2.1)
RESERVE = 0.1  # the share of a GPU's memory that a plan leaves free for what the bill doesn't count
VOCAB_SIZE = 51200  # of a GPT that `gpt_shape` designs
OPTIONS = ("sequence_parallel", "recompute", "chunks", "micro_batch")  # that `reasons` changes, one at a time
SMALLEST, LARGEST = 1e6, 1e14  # parameters of a GPT that `gpt_shape` can design


class NothingFits(ValueError):  # noqa: N818 (it names what was found)
    """Raised if no layout fits into memory. The message says how much memory the smallest layout would need."""


@dataclass(frozen=True)
class Plan:
    """A layout that fits into memory, with the memory bill of its fullest GPU, its step time, and its throughput."""

    layout: Layout
    bill: Bill
    time: StepTime
    achieved: Throughput


def plans(
    config: GPTConfig,
    gpus: int,
    machine: Machine,
    *,
    sequences: int | None = None,
    shard_optimizer: bool = False,
) -> list[Plan]:
    """Return every layout of the model over `gpus` GPUs that fits into their memory, fastest first.

    sequences         the number of sequences per step, over all replicas; None means `default_sequences`
    shard_optimizer   whether each replica keeps only 1/dp of the optimizer's state (ZeRO-1)
    Raises ValueError if no layout divides the model and the batch, and NothingFits if none fits into memory.
    """
    if gpus < 1:
        raise ValueError(f"gpus={gpus}: there must be at least one")
    sequences = sequences if sequences is not None else default_sequences(config, gpus)
    if sequences < 1:
        raise ValueError(f"a step has at least one sequence, got {sequences}")
    candidates = [(layout, _bill(config, layout, shard_optimizer)) for layout in layouts(config, gpus, sequences)]
    if not candidates:
        raise ValueError(
            f"no layout over {gpus} GPUs: tp must divide {config.num_heads} heads, pp may be at most the "
            f"{config.num_layers} layers, dp must divide {sequences} sequences, and tp pp dp must be {gpus}. Take "
            f"another number of GPUs, or a batch that is a multiple of {gpus}."
        )
    usable = machine.memory * (1 - RESERVE)
    program = program_of(shard_optimizer)
    fitting = []
    for layout, need in candidates:
        if need.total <= usable:
            time = step_time(config, layout, machine, program)
            fitting.append(Plan(layout, need, time, achieved(config, layout, machine, time.total)))
    if not fitting:
        raise NothingFits(_why_not(config, machine, gpus, usable, *min(candidates, key=lambda pair: pair[1].total)))
    return sorted(fitting, key=lambda plan: (plan.time.total, plan.bill.total))


def program_of(shard_optimizer: bool = False) -> Program:
    """Return the program that a plan assumes: communication overlaps with computation wherever it can."""
    return Program(overlap_input_gradient=True, overlap_gradients=True, shard_optimizer=shard_optimizer)


def best_of_each_split(found: list[Plan]) -> list[Plan]:
    """Keep only the fastest plan for each (tp, pp, dp), whatever its other options, in input order."""
    best: dict[tuple[int, int, int], Plan] = {}
    for plan in found:
        best.setdefault((plan.layout.tp, plan.layout.pp, plan.layout.dp), plan)
    return list(best.values())


def reasons(config: GPTConfig, found: list[Plan]) -> dict[str, list[tuple[object, float | None]]]:
    """For each option of the best plan, return its other values and how much longer a step takes (0.04 is 4%).

    The split over GPUs and all other options stay the same. None in place of the number means that the changed layout
    needs too much memory. We try half and twice the micro-batch. Values for which there's no such layout are left out:
    twice the micro-batch, for example, if the number of sequences isn't divisible.
    """
    best, fits = found[0].layout, {plan.layout: plan.time.total for plan in found}
    possible = set(layouts(config, best.gpus, best.sequences))
    changed: dict[str, list[tuple[object, float | None]]] = {}
    for option in OPTIONS:
        chosen = getattr(best, option)
        values = {getattr(plan.layout, option) for plan in found if plan.layout.pp == best.pp} - {chosen}
        if option == "micro_batch":
            values &= {chosen // 2, chosen * 2}
        for value in sorted(values, key=str):
            layout = replace(best, **{option: value})
            if option == "micro_batch":
                if best.sequences < best.dp * value:
                    continue
                layout = replace(layout, micro_batches=best.sequences // (best.dp * value))
            if layout in possible:
                longer = fits[layout] / fits[best] - 1 if layout in fits else None
                changed.setdefault(option, []).append((value, longer))
    return changed


def layouts(config: GPTConfig, gpus: int, sequences: int) -> Iterator[Layout]:
    """Yield all layouts over `gpus` GPUs.

    tp divides the number of heads and the MLP size, and dp times the micro-batch size divides `sequences`. If pp
    doesn't divide the number of layers, each of the first stages gets one more layer than the others
    (`tplab.memory.memory_bill.layers_of_stage`).
    """
    for tp in tensor_parallel_sizes(config, min(gpus, config.num_heads)):  # each rank takes at least one head
        for pp in _divisors(gpus // tp, config.num_layers) if gpus % tp == 0 else ():
            dp = gpus // (tp * pp)
            for exponent in range(sequences.bit_length()):
                micro_batch = 2**exponent
                if sequences % (dp * micro_batch):
                    break
                steps = sequences // (dp * micro_batch)
                for sequence_parallel in (False, True) if tp > 1 and config.seq_length % tp == 0 else (False,):
                    for recompute in get_args(Recompute):
                        if recompute != "attention" or not config.flash_attention:  # flash attention saves no scores
                            for chunks in _chunks(config, pp, steps):
                                yield Layout(tp, pp, dp, micro_batch, steps, sequence_parallel, recompute, chunks)


def default_sequences(config: GPTConfig, gpus: int) -> int:
    """Return how many sequences have about `TOKENS` tokens, as a multiple of `gpus`, so that every dp divides it."""
    return max(1, round(TOKENS / config.seq_length / gpus)) * gpus


def gpt_shape(parameters: float, *, seq_length: int = 4096) -> GPTConfig:
    """Return a GPT with about `parameters` parameters, head size 128, MLP size 4h, and h about 128 times num_layers.

    Below 1e8 parameters, the head size is 16. From 1e9 parameters on, the number of heads is a multiple of 8 and the
    number of layers is a multiple of 4, so that many splits are possible. The GPT has FlashAttention and rotary
    positions, but no dropout. Raises ValueError below a million parameters and above a hundred trillion.
    """
    if not SMALLEST <= parameters <= LARGEST:
        raise ValueError(f"{parameters:.3g} parameters are no GPT that this can make up: give from 1e6 to 1e14")
    unit = 8 if parameters >= 1e9 else 1  # num_heads is a multiple of this, num_layers a multiple of half of it
    head = 128 if parameters >= 1e8 else 16
    few = max(unit // 2, 1)
    found: tuple[float, GPTConfig] | None = None
    heads = unit
    while 12 * few * (heads * head) ** 2 <= 4 * parameters or found is None:
        hidden = heads * head
        each = 12 * hidden**2 + 13 * hidden
        layers = max(round((parameters - VOCAB_SIZE * hidden) / each / few), 1) * few
        config = GPTConfig(
            num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=VOCAB_SIZE, seq_length=seq_length,
            learned_positions=False, dropout=0.0, flash_attention=True,
        )  # fmt: skip
        away = 10 * abs(math.log(parameter_count(config) / parameters)) + abs(math.log(hidden / layers / 128))
        if found is None or away < found[0]:
            found = away, config
        heads += unit
    return found[1]


def model(name: str) -> GPTConfig:
    """Return the configuration called `name` in `tplab.memory.config.PRESETS`, ignoring case, spaces, - and _.

    Raises ValueError, listing the known names, if there is none.
    """

    def plain(text: str) -> str:
        return "".join(text.lower().replace("-", " ").replace("_", " ").split())

    for known, config in PRESETS.items():
        if plain(known) == plain(name):
            return config
    raise ValueError(f"no model is called {name!r}; known: {', '.join(PRESETS)}. Or give --params")


def _bill(config: GPTConfig, layout: Layout, shard_optimizer: bool) -> Bill:
    """Return the bill of the fullest GPU, which is in the first stage (most micro-batches) or the last (logits)."""
    of_stages = (bill(config, layout, stage=stage) for stage in {0, layout.pp - 1})
    if shard_optimizer:
        of_stages = (replace(one, optimizer=-(-one.optimizer // layout.dp)) for one in of_stages)
    return max(of_stages, key=lambda one: one.total)


def _why_not(config: GPTConfig, machine: Machine, gpus: int, usable: float, layout: Layout, need: Bill) -> str:
    largest = max(need.parts(), key=lambda part: need.parts()[part])
    return (
        f"nothing fits: {parameter_count(config) / 1e9:.1f} billion parameters on {gpus} GPUs need at least "
        f"{need.total / GB:.0f} GB on a GPU (tp={layout.tp}, pp={layout.pp}, dp={layout.dp}; most of it {largest}, "
        f"{need.parts()[largest] / GB:.0f} GB), and {machine.name} has {machine.memory / GB:.0f} GB, of which "
        f"{usable / GB:.0f} are counted on. Take more GPUs, or GPUs with more memory."
    )


def _chunks(config: GPTConfig, pp: int, steps: int) -> list[int]:
    """Return the possible numbers of chunks per rank of the pipeline."""
    if pp == 1 or config.num_layers % pp or steps % pp:
        return [1]
    return _divisors(config.num_layers // pp, config.num_layers)


def _divisors(n: int, largest: int) -> list[int]:
    return [k for k in range(1, min(n, largest) + 1) if n % k == 0]
