"""Chapter 11: a rank's trace: when it computed and communicated, and how much communication was hidden by computation.

    computes        ██ mm ██         █████ mm █████
    communicates              ▒▒▒▒▒▒▒ all_reduce ▒▒▒▒▒▒▒
                              exposed└──── hidden ────┘

    hidden share  =  |C ∩ W| / |C|        C: the times in which some collective is in flight on the rank
                                          W: the times in which the rank computes

|..| is the total length of a set of times, so overlapping operations count only once. Times come from torch's profiler,
which uses one clock for both lanes. The kind, bytes and line of a collective come from `tplab.record`. A hidden share
of 1 means that the rank never waited, but not that communication was free, because it may slow down a matmul that runs
at the same time. `tplab.trace.chrome` exports traces to a viewer.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile, record_function

from tplab.runtime import Collective, device, hooks, record

Lane = Literal["compute", "communicate"]
LANES: tuple[Lane, ...] = ("compute", "communicate")
Times = list[tuple[float, float]]


@dataclass(frozen=True)
class Span:
    """An operation or collective that a rank ran. Times are in seconds since the launch began.

    name:   "mm", "all_reduce", or the name of a GPU's kernel
    about:  other details, such as the shapes of an operation's inputs, or the bytes, group and line of a collective
    """

    lane: Lane
    name: str
    start: float
    end: float
    about: dict[str, Any] = field(default_factory=dict)


@dataclass
class RankTrace:
    """The spans of one rank, in the order in which they began."""

    rank: int
    spans: list[Span] = field(default_factory=list)

    def lane(self, lane: Lane) -> list[Span]:
        return [span for span in self.spans if span.lane == lane]

    @property
    def duration(self) -> float:
        """Seconds from the beginning of the first span to the end of the last."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def seconds(self, lane: Lane) -> float:
        """Return the time in seconds during which the rank computed, or some collective was in flight on it."""
        return _length(_times(self.lane(lane)))

    @property
    def hidden(self) -> float:
        """Seconds during which a collective is in flight while the rank computes: |C ∩ W|."""
        return self.seconds("communicate") - self.exposed

    @property
    def exposed(self) -> float:
        """Seconds during which a collective is in flight and the rank computes nothing: |C| - |C ∩ W|."""
        return _length(self.waits)

    @property
    def waits(self) -> Times:
        """The times, as (start, end), in which a collective is in flight and the rank computes nothing."""
        busy = _times(self.lane("compute"))
        found = []
        for start, end in _times(self.lane("communicate")):
            for begin, stop in busy:
                if start < begin < end:
                    found.append((start, begin))
                if begin < end and stop > start:
                    start = max(start, stop)
            found += [(start, end)] * (start < end)
        return found

    @property
    def link(self) -> str:
        """A description of the `slow_link` that the run was traced on, or "" if there was no slow link."""
        return ", ".join(dict.fromkeys(span.about["link"] for span in self.spans if "link" in span.about))

    @property
    def hidden_share(self) -> float:
        """|C ∩ W| / |C|, between 0 and 1. Raises ValueError for a rank that didn't communicate."""
        if not self.lane("communicate"):
            raise ValueError(f"rank {self.rank} communicated nothing here: there is nothing to hide")
        return self.hidden / self.seconds("communicate")


@contextmanager
def trace_rank() -> Iterator[RankTrace]:
    """Context manager that traces what this rank does. The trace is filled in when the block ends.

        def step():
            with trace_rank() as trace:
                layer(x).backward(dy)
            return trace

        traces = launch(step, 2)

    On a CPU, torch's operations count as computation, and a collective is in flight from the call until the backend has
    finished it, no matter when the rank waits for it. A send or a receive counts as communication only while the rank
    waits for it. On a GPU, kernels are traced, and NCCL's kernels count as communication. Run the block once before you
    trace it, because everything takes longer the first time.
    """
    on_gpu = device().type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # otherwise, every profile prints that it starts and stops
    trace = RankTrace(dist.get_rank() if dist.is_initialized() else 0)
    options: dict[str, Any] = {"use_device": "cuda", "use_kineto": True} if on_gpu else {}  # only Kineto traces kernels
    with record() as section, profile(record_shapes=True, **options) as profiler:
        marked = [_mark() for _ in range(3)]
        yield trace
        if on_gpu:
            torch.cuda.synchronize()
    events = list(profiler.function_events or ())
    marks = sorted((event for event in events if event.name == _MARK), key=lambda event: event.time_range.start)
    surest = min(range(len(marks)), key=lambda index: marked[index][1] - marked[index][0])
    shift = marked[surest][0] - _start(marks[surest])  # from the profiler's clock to the record's
    found = _on_gpu(events, shift) if on_gpu else _on_cpu(events, section, shift, marks[surest].thread)
    trace.spans = sorted(found, key=lambda span: span.start)


# From the profiler's events

_MARK = "tplab: the same moment on two clocks"
_NOT_COMPUTED = ("Memcpy", "Memset")
_PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"}


def _mark() -> tuple[float, float]:
    """Add a mark to the profile, and return the times just before and after it on the record's clock."""
    early = _now()
    with record_function(_MARK):
        pass
    return early, _now()


def _now() -> float:
    return hooks.active.now() if hooks.active is not None else time.monotonic()


def _start(event: Any) -> float:
    return event.time_range.start * 1e-6


def _end(event: Any) -> float:
    return event.time_range.end * 1e-6


def _on_gpu(events: Iterable[Any], shift: float) -> Iterator[Span]:
    for event in events:
        kernel = event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        if kernel and not event.name.startswith(_NOT_COMPUTED):
            lane: Lane = "communicate" if event.name.startswith("nccl") else "compute"
            yield Span(lane, event.name, _start(event) + shift, _end(event) + shift)


def _on_cpu(events: Sequence[Any], section: Iterable[Collective], shift: float, thread: int) -> Iterator[Span]:
    for event in events:
        if event.thread == thread and event.name.startswith("aten::") and not _belongs_to_another(event):
            worker = _worker(event)
            shapes = [list(shape) for shape in worker.input_shapes or () if shape]
            name = worker.name.removeprefix("aten::")
            yield Span("compute", name, _start(event) + shift, _end(event) + shift, {"shapes": shapes})
    yield from _collectives(events, list(section), shift)


def _belongs_to_another(event: Any) -> bool:
    """Return True if the event is a step of another torch operation, or of a collective."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(("aten::", "c10d::")):
            return True
        parent = parent.cpu_parent
    return False


def _worker(event: Any) -> Any:
    """Return the matmul that an operation consists of, such as addmm for linear, or the operation itself."""
    for child in event.cpu_children:
        if (product := _worker(child)).name in _PRODUCTS:
            return product
    return event


def _collectives(events: Iterable[Any], section: Sequence[Collective], shift: float) -> Iterator[Span]:
    """Yield the span of each collective, from the rank's call to the end of the backend's event.

    If the number of events differs from the number of collectives (some backends have no events), the times in the
    record are used. A message between two ranks counts while this rank waits for it, because neither rank can tell when
    it is under way. On a slow link, both ranks can tell, and a collective is in flight until the link has carried it.
    """
    in_order = sorted(events, key=lambda event: event.time_range.start)
    started = [event for event in in_order if event.name.startswith("c10d::") and not _belongs_to_another(event)]
    finished: dict[str, deque[Any]] = {}
    for event in in_order:
        if event.name.startswith("gloo:"):
            finished.setdefault(event.name.removeprefix("gloo:"), deque()).append(event)
    calls = Counter(collective.kind for collective in section)
    known = {kind for kind, count in calls.items() if len(finished.get(kind, ())) == count}
    for index, collective in enumerate(section):
        kind, start, end = collective.kind, collective.start, collective.end
        if len(started) == len(section):
            start = _start(started[index]) + shift
        message, transfer = kind in ("send", "recv"), collective.transfer
        if kind in known and not message:
            end = _end(finished[kind].popleft()) + shift
        if transfer is not None:
            start, end = transfer.start if message else start, transfer.end
        elif message and end is not None:
            start = end - collective.waited
        if len(collective.group) > 1 and end is not None:
            about = {"bytes": collective.bytes, "group": list(collective.group), "where": collective.where}
            about |= {} if transfer is None else {"link": transfer.link}
            yield Span("communicate", kind, start, end, about)


# Lengths of sets of times


def _times(spans: Iterable[Span]) -> Times:
    """Merge the times of the spans into disjoint intervals, in order."""
    merged: Times = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(times: Times) -> float:
    return sum(end - start for start, end in times)
