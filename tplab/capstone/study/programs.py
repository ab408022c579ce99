"""The programs that a study runs on every rank. They measure a few steps and don't touch the run's log or checkpoints.

They train as `tplab.capstone.training.loop` does, from the run's initial weights and on its tokens in their order.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.capstone.data.prepare import Batches, prepare
from tplab.capstone.planning.predictions import kernels_of
from tplab.capstone.settings.settings import Layers, Settings
from tplab.capstone.training.build_model import build_model, hooks_of
from tplab.capstone.training.loop import compile_layers
from tplab.capstone.training.meter import known_machine
from tplab.capstone.training.ranks import join
from tplab.capstone.training.step import Step
from tplab.cost.calibration import Kernels
from tplab.cost.machines import matrix_rate, measure_machine, memory_rate
from tplab.memory.meter import MemoryMeter
from tplab.runtime import Collective, device, record
from tplab.trace.rank_trace import trace_rank

CURVE_POINTS = 1500  # number of points to which the live-memory curve is reduced
BARS = 1500  # if a rank's timeline has more bars, `drawn` merges some of them
FINEST = 2000  # a gap of less than 1/FINEST of a step is too small to see
NAME = 60  # characters; a GPU kernel's name can have hundreds

Bar = tuple[str, str, float, float]  # lane, name, start, end


class Short:
    """Runs the first steps of a run on this rank, one at a time."""

    def __init__(self, settings: Settings, answers: Any = None) -> None:
        self.settings, self.ranks, self.tokens = settings, join(settings), prepare(settings)
        self.batches = Batches(self.tokens.train, settings.seq_length, settings.batch_size, settings.seed)
        self.model = build_model(
            settings, settings.model, answers=answers, mesh=self.ranks.mesh, device=self.ranks.device
        )
        if settings.compile:
            compile_layers(self.model)
        self.step = Step(self.model, settings, self.ranks)
        self.optimizer = self.step.training.torch_optimizer
        self.done = 0

    def once(self) -> tuple[float, float]:
        """Run one more step. Return the full batch's loss, and the time in seconds that this rank took for its part."""
        step, began = self.next(), time.perf_counter()
        loss, norm = step()
        float(norm)  # waits until the GPU has finished
        seconds = time.perf_counter() - began
        return self.ranks.mean(loss), seconds

    def next(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """Return a function that runs one more step (`Step.run`). The step's batch is already on the device."""
        own = self.batches.own(self.done, self.ranks.place.dp, self.settings.dp)  # ids and targets, [B/dp, s] each
        self.done += 1
        return partial(self.step.run, self.done, *(tensor.to(self.ranks.device) for tensor in own))


def steps(settings: Settings, count: int, answers: Any = None) -> tuple[list[float], list[float], frozenset[str]]:
    """Return the first `count` steps' losses and times in seconds, and the exercises whose answers are never called."""
    short = Short(settings, answers)
    losses, seconds = zip(*(short.once() for _ in range(count)), strict=True)
    return list(losses), list(seconds), hooks_of(short.model).idle


def turns(
    settings: Settings, layers: Sequence[Layers], rounds: int, count: int
) -> list[dict[Layers, list[tuple[float, float]]]]:
    """Train with each kind of layers in turn, `count` steps at a time. Return each round's (loss, seconds) pairs.

    All of them use the same initial weights and batches. Because they take turns, other load on the machine slows all
    of them down.
    """
    shorts = {name: Short(replace(settings, layers=name)) for name in layers}
    return [{name: [short.once() for _ in range(count)] for name, short in shorts.items()} for _ in range(rounds)]


def machine(settings: Settings) -> dict[str, Any]:
    """Measure the speed of the slowest rank's device in the run's precision while all ranks are busy.

    `peak` is the published FLOP/s of a GPU listed in `tplab.cost.machines`, which only has figures for bfloat16.
    """
    ranks, dtype = join(settings), getattr(torch, settings.precision)
    known = known_machine(ranks.device)
    peak = {"peak": known.flops} if known and settings.precision == "bfloat16" else {}
    if ranks.size == 1:
        return {"ranks": 1, "flops": matrix_rate(dtype=dtype), "bandwidth": memory_rate(), **peak}
    found = measure_machine(rounds=4, dtype=dtype)
    return {
        "ranks": ranks.size, "flops": found.flops, "bandwidth": found.bandwidth, "memory": found.memory,
        "alpha": found.inside.alpha, "beta": found.inside.beta, **peak,
    }  # fmt: skip


def kernels(settings: Settings) -> Kernels:
    """Measure the kernels of one of the run's layers with `kernels_of`, on freshly started ranks."""
    return kernels_of(settings, join(settings).mesh)


def timed(settings: Settings, count: int) -> tuple[Kernels, list[float]]:
    """Return the times of a layer's kernels, and how long each of the first `count` steps took, in seconds."""
    return kernels(settings), steps(settings, count)[1]


def sent(settings: Settings, answers: Any = None) -> list[Collective]:
    """Return the collectives that this rank entered in the second step, in order."""
    short = Short(settings, answers)
    short.once()
    step = short.next()
    with record() as section:
        step()
    return list(section)


def traced(settings: Settings, warm_up: int, answers: Any = None) -> list[Bar]:
    """Return this rank's operations in one step, after `warm_up` steps, as (lane, name, start, end) in seconds."""
    short = Short(settings, answers)
    for _ in range(warm_up):
        short.once()
    step = short.next()
    if short.ranks.size > 1:
        dist.barrier()
    with trace_rank() as trace:
        step()
    return drawn([(span.lane, span.name, span.start, span.end) for span in trace.spans if span.name != "barrier"])


def drawn(bars: Sequence[Bar]) -> list[Bar]:
    """Shorten the bars' names. If there are too many bars, merge adjacent ones that have no visible gap between them.

    A merged bar is named after the longest of its operations.
    """
    named = [(lane, name[:NAME], start, end) for lane, name, start, end in bars]
    if len(named) <= BARS:
        return named
    finest = (max(bar[3] for bar in named) - min(bar[2] for bar in named)) / FINEST
    merged: list[Bar] = []
    for lane in dict.fromkeys(bar[0] for bar in named):
        groups: list[list[Bar]] = []
        until = -math.inf
        for bar in sorted((bar for bar in named if bar[0] == lane), key=lambda bar: bar[2]):
            if bar[2] - until >= finest:
                groups.append([])
            groups[-1].append(bar)
            until = max(until, bar[3])
        for group in groups:
            longest = max(group, key=lambda bar: bar[3] - bar[2])
            merged.append((lane, longest[1], group[0][2], max(bar[3] for bar in group)))
    return merged


def metered(settings: Settings, answers: Any = None) -> dict[str, Any]:
    """Return this rank's peak of live bytes in the second step and, on a CPU, a curve of live bytes with its phases."""
    if device().type == "cuda":
        short = Short(settings, answers)
        short.once()
        torch.cuda.reset_peak_memory_stats()
        short.once()
        return {"peak": torch.cuda.max_memory_allocated(), "curve": [], "marks": []}
    with MemoryMeter() as meter:
        short = Short(settings, answers)
        short.once()
        begin = len(meter.curve)
        short.model.register_forward_pre_hook(lambda *_: meter.mark("forward"))
        short.model.register_forward_hook(lambda *_: meter.mark("backward"))
        short.optimizer.register_step_pre_hook(lambda *_: meter.mark("optimizer"))
        short.once()
    curve = meter.curve[begin:]
    every = max(1, len(curve) // CURVE_POINTS)
    return {
        "peak": max(curve),
        "curve": [max(curve[at : at + every]) for at in range(0, len(curve), every)],
        "marks": [((place - begin) // every, name) for place, name in meter.marks],
    }


def untrained(settings: Settings, answers: Any = None) -> tuple[str, float]:
    """Return the text that the model generates before the first step, and the loss of the first step."""
    short = Short(settings, answers)
    text = short.step.sample(short.tokens.tokenizer, 0)
    return text, short.once()[0]
