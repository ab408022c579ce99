"""The cost of a step on a rank: time, bytes, memory, and the share of time that the rank waits for others.

The collectives of a step come from its trace (`tplab.record`), which is discarded after the step.

    communication    seconds in which the rank waited for a collective / seconds of the step. Communication hidden
                     behind computation doesn't count, but waiting for a slower rank does. On a GPU, the stream waits
                     instead of the rank (`tplab.runtime.stream_waits`), a step or two later. There, this is the share
                     of the newest step that the GPU has finished, and None before the first one
    sent             message bytes, as in the trace, without what a pipeline stage receives
    memory           GPU: peak bytes of tensors so far. CPU: resident bytes of the process, including torch and Python
    tensors          CPU: peak bytes of all tensors, counted one by one until two steps are done. 0: not counted
"""

import platform
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import psutil
import torch

from tplab.common.cores import cores
from tplab.cost.machines import MACHINES, Machine
from tplab.memory.meter import MemoryMeter
from tplab.runtime import hooks, record
from tplab.runtime.stream_waits import StreamWaits

COUNTED = 2  # steps in which tensors are counted


class Figures(NamedTuple):
    """The measurements of one step on one rank."""

    communication: float | None
    sent: int
    memory: int
    tensors: int = 0


class TensorCount:
    """Context manager that counts the memory of all tensors that this thread makes, until `COUNTED` steps are done.

    In the second step, the optimizer's state exists from the start, so the peak is that of all later steps.
    """

    def __init__(self, active: bool) -> None:
        self._meter, self._left = MemoryMeter(), COUNTED if active else 0
        self.peak = 0

    def __enter__(self) -> "TensorCount":
        if self._left:
            self._meter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._left:
            self._left = 0
            self._meter.__exit__(*error)

    def step_is_done(self) -> None:
        if self._left:
            self.peak = self._meter.peak
            if self._left == 1:
                self._meter.__exit__(None, None, None)
            self._left -= 1


class Meter:
    """Measures the steps of this rank. `figures` contains the measurements of the last step."""

    def __init__(self, device: torch.device, count: TensorCount | None = None) -> None:
        self.device, self.count = device, count or TensorCount(active=False)
        self.figures = Figures(None, 0, 0)
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
        self.count.step_is_done()
        self.figures = Figures(share, sent, memory, self.count.peak)


class Clock:
    """Measures the mean time per step, without the time between steps (evaluation, checkpoints)."""

    def __init__(self) -> None:
        self._since, self._seconds, self._steps = time.perf_counter(), 0.0, 0

    def go_on(self) -> None:
        """Exclude the time since the last step."""
        self._since = time.perf_counter()

    def lap(self) -> None:
        """Count a step that ends now."""
        now = time.perf_counter()
        self._seconds, self._since, self._steps = self._seconds + now - self._since, now, self._steps + 1

    def mean(self) -> float:
        """Return the mean seconds per step since the last call."""
        mean = self._seconds / max(1, self._steps)
        self._seconds, self._steps = 0.0, 0
        return mean


def known_machine(device: torch.device) -> Machine | None:
    """Return the published figures of this rank's GPU, or None on a CPU and for GPUs not in `tplab.cost.machines`.

    The figures are for server modules (SXM). PCIe and NVL cards and MIG slices are slower, so they get None, too.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if set(re.split(r"[\s-]", name.upper())) & {"PCIE", "NVL", "MIG"}:
        return None
    return next((machine for key, machine in MACHINES.items() if key.split()[0] in name), None)


def this_machine() -> dict[str, Any]:
    """Describe this machine for the log and the report."""
    gpus = torch.cuda.device_count()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": cores(),
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
