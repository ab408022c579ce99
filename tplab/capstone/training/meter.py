"""The cost of a step on one rank: time, bytes sent, memory, and the fraction of the time spent waiting for others."""

import platform
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from tplab.common.cores import cores
from tplab.cost.machines import MACHINES, Machine
from tplab.memory.meter import MemoryMeter
from tplab.runtime import hooks, record
from tplab.runtime.streams import StreamWaits

COUNTED = 2  # steps. The optimizer's state exists throughout the second step, so later steps have the same peak


class Figures(NamedTuple):
    """The measurements of one step on one rank.

    communication    the time that the rank spent waiting for collectives / the step time. Communication hidden behind
                     computation doesn't count, but waiting for a slower rank does. On a GPU, it's the stream that
                     waits (`tplab.runtime.streams`), a step or two later. The value is then that of the newest
                     step that the GPU has finished, or None if there is no such step yet
    sent             bytes of messages, as in the trace, except for those that a pipeline stage receives
    memory           on a GPU, peak tensor bytes so far. On a CPU, the process's resident bytes, with torch and Python
    tensors          on a CPU, peak bytes of all tensors, counted one by one until two steps are done (0 if not counted)
    """

    communication: float | None
    sent: int
    memory: int
    tensors: int = 0


class Meter:
    """Measures this rank's steps. `figures` contains the measurements of the latest step.

    counts    if True, count the memory of all tensors that this thread creates, until `COUNTED` steps are done or the
              stack `counting` is closed
    """

    def __init__(self, device: torch.device, counts: bool = False) -> None:
        self.device, self.figures, self._steps = device, Figures(None, 0, 0), 0
        self._tensors, self.counting = MemoryMeter(), ExitStack()
        if counts:
            self.counting.enter_context(self._tensors)
        self._process = psutil.Process()
        self._on_the_stream: deque[StreamWaits] = deque()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager that measures the step inside the block."""
        began = time.perf_counter()
        with ExitStack() as stack:
            section = stack.enter_context(record(keep=False))
            if self.device.type != "cpu":
                self._on_the_stream.append(StreamWaits())
                stack.enter_context(hooks.marked(self._on_the_stream[-1]))
            yield
        share = self.figures.communication
        if self.device.type == "cpu":
            share = sum(collective.waited for collective in section) / (time.perf_counter() - began)
        while self._on_the_stream and self._on_the_stream[0].is_over:
            share = self._on_the_stream.popleft().share
        sent = sum(collective.bytes for collective in section if collective.kind != "recv")
        on_gpu = self.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(self.device) if on_gpu else self._process.memory_info().rss
        self._steps += 1
        if self._steps == COUNTED:
            self.counting.close()
        self.figures = Figures(share, sent, memory, self._tensors.peak)


class Clock:
    """Measures the mean time per step, excluding work between steps such as evaluation and checkpoints."""

    def __init__(self) -> None:
        self.go_on()

    def go_on(self) -> None:
        """Start to measure anew, because steps have been logged, or other work is done."""
        self._since, self._steps = time.perf_counter(), 0

    def count(self) -> None:
        self._steps += 1

    def mean(self) -> float:
        """Return the mean time per step since `go_on` was last called, in seconds."""
        return (time.perf_counter() - self._since) / self._steps


def known_machine(device: torch.device) -> Machine | None:
    """Return the published figures for this rank's GPU, or None for a CPU or a GPU that isn't in `tplab.cost.machines`.

    The figures are for server modules (SXM). For PCIe and NVL cards and MIG slices, which are slower, returns None.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if set(re.split(r"[\s-]", name.upper())) & {"PCIE", "NVL", "MIG"}:
        return None
    return next((machine for key, machine in MACHINES.items() if key.split()[0] in name), None)


def this_machine(device: torch.device) -> dict[str, Any]:
    """Describe this machine for the log and the report. `peak` is a GPU's published FLOP/s, which are for bfloat16."""
    gpus, cpu = torch.cuda.device_count(), Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.*)", cpu.read_text("utf-8"), re.MULTILINE) if cpu.exists() else []
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": cores(), "memory": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name(0) if gpus else None, "gpus": gpus,
        "peak": known.flops if (known := known_machine(device)) else None,
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
