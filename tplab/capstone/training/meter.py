"""What a step costs a rank: time, bytes, memory, and the share of time in which it stands still for others.

The collectives of a step come from the record (`tplab.record`), which is forgotten after each step: a run of days would
fill the memory with it.

    communication    seconds in which the rank waited for a collective / seconds of the step. What is hidden behind
                     computation is not in it; waiting for a slower rank is. On a GPU the rank itself never waits: its
                     stream does, and is asked (`tplab.runtime.stream_waits`). It is a step or two behind, so there
                     this is the share of the newest step that the GPU had ended; None before the first of these
    sent             message bytes, as in the record
    memory           GPU: the most that tensors held so far. CPU: what the process holds now (resident set), torch and
                     Python included
"""

import os
import platform
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psutil
import torch

from tplab.cost.flops import model_flops
from tplab.cost.machines import MACHINES, Machine
from tplab.memory.config import GPTConfig
from tplab.runtime import hooks, record
from tplab.runtime.stream_waits import StreamWaits


class Figures(NamedTuple):
    """Of one step, on one rank."""

    communication: float | None
    sent: int
    memory: int


class Meter:
    """Measures the steps of this rank; `figures` are those of the last one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.figures = Figures(None, 0, 0)
        self._process = psutil.Process()
        self._on_the_stream: deque[StreamWaits] = deque()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step is carried out inside the block."""
        began = time.perf_counter()
        with record(keep=False) as section, self._stream():
            yield
        seconds = time.perf_counter() - began
        if self.device.type == "cpu":
            waits: float | None = sum(collective.waited for collective in section) / seconds
        else:
            waits = self._newest_share()
        self.figures = Figures(waits, sum(collective.bytes for collective in section), self._memory())

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """On a GPU, marks on its stream around what the step waits for."""
        if self.device.type == "cpu":
            yield
            return
        self._on_the_stream.append(StreamWaits())
        with hooks.marked(self._on_the_stream[-1]):
            yield

    def _newest_share(self) -> float | None:
        """Of the newest step that the GPU has ended by now, as far as one has."""
        share = self.figures.communication
        while self._on_the_stream and self._on_the_stream[0].is_over:
            share = self._on_the_stream.popleft().share
        return share

    def _memory(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self._process.memory_info().rss


class Clock:
    """Seconds of steps, without what is done between them (evaluation, checkpoints)."""

    def __init__(self) -> None:
        self._since, self._seconds, self._steps = time.perf_counter(), 0.0, 0

    def go_on(self) -> None:
        """What happened since the last step doesn't count."""
        self._since = time.perf_counter()

    def lap(self) -> None:
        """A step is over."""
        now = time.perf_counter()
        self._seconds, self._since, self._steps = self._seconds + now - self._since, now, self._steps + 1

    def mean(self) -> float:
        """Seconds of a step, on average over those since this was asked last."""
        mean = self._seconds / max(1, self._steps)
        self._seconds, self._steps = 0.0, 0
        return mean


def memory_is(device: torch.device) -> str:
    """What the figure for memory counts."""
    return "resident set of the process" if device.type == "cpu" else "peak of tensors on the GPU"


def utilisation(config: GPTConfig, tokens_per_second: float, ranks: int, peak: float) -> float:
    """Model FLOPs utilization: FLOP/s that the model needs (`cost.flops`), relative to what `ranks` devices can do.

    peak    FLOP/s of one device, dense products of 16-bit numbers
    """
    return model_flops(config) / config.seq_length * tokens_per_second / (ranks * peak)


def known_machine(device: torch.device) -> Machine | None:
    """The published figures of this rank's GPU; None for a CPU, and for a GPU that `tplab.cost.machines` doesn't know.

    Those figures are of the form that sits on a server's board (SXM). Cards of the same chip, and slices of it (MIG),
    reach less.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if set(re.split(r"[\s-]", name.upper())) & {"PCIE", "NVL", "MIG"}:
        return None
    return next((machine for key, machine in MACHINES.items() if key.split()[0] in name), None)


def this_machine() -> dict[str, Any]:
    """What the run runs on, to be named in its log and its report."""
    gpus = torch.cuda.device_count()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name(0) if gpus else None,
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
