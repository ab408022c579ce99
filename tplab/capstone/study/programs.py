"""The programs that a study runs on every rank. They measure a few steps and don't touch the run's log or checkpoints.

They train as `tplab.capstone.training.loop` does, from the run's initial weights and on its tokens in their order.
"""

import time
from typing import Any

import torch

from tplab.capstone.data.prepare import Batches, prepare
from tplab.capstone.planning.predictions import kernels_of
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import build_model
from tplab.capstone.training.loop import compile_layers
from tplab.capstone.training.meter import known_machine
from tplab.capstone.training.ranks import join
from tplab.capstone.training.step import Step
from tplab.cost.calibration import Kernels
from tplab.cost.machines import matrix_rate, measure_machine, memory_rate


class Short:
    """Runs the first steps of a run on this rank, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.ranks, self.tokens = settings, join(settings), prepare(settings)
        self.batches = Batches(self.tokens.train, settings.seq_length, settings.batch_size, settings.seed)
        self.model = build_model(settings, settings.model, mesh=self.ranks.mesh, device=self.ranks.device)
        if settings.compile:
            compile_layers(self.model)
        self.step = Step(self.model, settings, self.ranks)
        self.optimizer = self.step.training.torch_optimizer
        self.done = 0

    def once(self) -> tuple[float, float]:
        """Run one more step. Return the full batch's loss, and the time in seconds that this rank took for its part."""
        own = self.batches.own(self.done, self.ranks.place.dp, self.settings.dp)  # ids and targets, [B/dp, s] each
        ids, targets = (tensor.to(self.ranks.device) for tensor in own)
        self.done += 1
        began = time.perf_counter()
        loss, norm = self.step.run(self.done, ids, targets)
        float(norm)  # waits until the GPU has finished
        seconds = time.perf_counter() - began
        return self.ranks.mean(loss), seconds


def steps(settings: Settings, count: int) -> tuple[list[float], list[float]]:
    """Return the losses of the first `count` steps, and their times in seconds."""
    short = Short(settings)
    losses, seconds = zip(*(short.once() for _ in range(count)), strict=True)
    return list(losses), list(seconds)


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
