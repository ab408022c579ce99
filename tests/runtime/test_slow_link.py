"""A slow link: when an operation ends by the formula, with a clock of the test's own and with the real one.

No test here depends on how long anything takes: a busy machine only makes real operations end later.
"""

import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import tplab
from tests import saying
from tplab.collectives.links import Link
from tplab.cost import collective as formulas
from tplab.runtime import Record, hooks
from tplab.runtime.board import Board
from tplab.runtime.slow_link import SlowLink, slow_link
from tplab.trace import RankTrace, trace_rank

ALPHA, BANDWIDTH = 0.25, 100.0


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_seconds_are_those_of_the_cost_model(p: int) -> None:
    made, link = SlowLink(ALPHA, BANDWIDTH), Link(ALPHA, 1 / BANDWIDTH)
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        assert made.seconds(kind, 960, p) == pytest.approx(getattr(formulas, kind)(link, 960, p)), kind
    steps = {1: 0, 2: 1, 3: 2, 4: 2, 8: 3}[p]  # of a tree
    assert made.seconds("broadcast", 960, p) == pytest.approx(steps * link.seconds(960))
    assert made.seconds("all_to_all", 960, p) == pytest.approx((p - 1) * link.seconds(960 / p))
    for kind in ("send", "recv"):
        assert made.seconds(kind, 960, p) == pytest.approx(link.seconds(960) if p > 1 else 0)
    assert made.seconds("barrier", 0, p) == 2 * (p - 1) * ALPHA


class Clock:
    """A clock that only sleeping moves forward."""

    def __init__(self, time: float) -> None:
        self.time = time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def slow() -> Any:
    return slow_link(ALPHA, BANDWIDTH)


def on_a_clock(
    program: Callable[[Clock], Any], link: Callable[[], Any] = slow
) -> tuple[Any, list[tuple[str, float, float]]]:
    """Run a program on a link whose clock starts at 10 times the rank. Return what it returns, and all transfers."""
    clock, modules = Clock(10.0 * dist.get_rank()), [sys.modules[each.__module__] for each in (SlowLink, Board)]
    for module in modules:
        module.time = clock
    with link(), tplab.record() as section:
        result = program(clock)
    for module in modules:
        module.time = time
    origin = hooks.active.origin if hooks.active is not None else 0.0
    transfers = [(one.kind, one.transfer.start + origin, one.transfer.end + origin) for one in section if one.transfer]
    return result, transfers


def blocking(clock: Clock) -> list[float]:
    x = torch.ones(50, dtype=torch.float32)  # 200 bytes
    dist.all_reduce(x)
    assert bool((x == 2).all())
    return [clock.time]


def overlapped(clock: Clock) -> list[float]:
    """The matmul takes 1 second, the message 2.5, and everything after the latest start at 10."""
    x = torch.ones(50)
    work = dist.all_reduce(x, async_op=True)
    clock.time += 1
    early = work.is_completed()
    work.wait()
    times = [clock.time]
    clock.time += 7
    second = dist.all_reduce(x, async_op=True)
    clock.time += 9
    second.wait()
    return [*times, clock.time, float(early), float(second.is_completed())]


def one_after_another(clock: Clock) -> list[float]:
    """Two all-reduces of a group share the link, and another group has its own. They're waited for in any order."""
    group = dist.new_group(backend="cpu:gloo")
    x, y, z = (torch.ones(50) for _ in range(3))
    first, second = (dist.all_reduce(tensor, async_op=True) for tensor in (x, y))
    other = dist.all_reduce(z, async_op=True, group=group)
    times = []
    for work in (other, second, first):
        work.wait()
        times.append(clock.time)
    return times


def messages(clock: Clock) -> list[float]:
    rank = dist.get_rank()
    x, y = torch.full((25,), 1.0 + rank), torch.empty(25)  # 100 bytes
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)])
    times = []
    for work in reversed(works):
        work.wait()
        times.append(clock.time)
    assert bool((y == 2 - rank).all())
    return times


def every_kind(clock: Clock) -> list[float]:
    """On two ranks, 8 elements of 4 bytes. What every kind takes, from the same start on both ranks."""
    x, two = torch.ones(8), [torch.ones(8), torch.ones(8)]
    rank = dist.get_rank()
    taken = []
    for call in (
        lambda: dist.broadcast(x, 1), lambda: dist.reduce(x, 0), lambda: dist.all_gather(two, x),
        lambda: dist.reduce_scatter(x, two), lambda: dist.all_to_all_single(torch.empty(8), x),
        lambda: dist.gather(x, two if rank == 0 else None), lambda: dist.scatter(x, two if rank == 0 else None),
        dist.barrier,
    ):  # fmt: skip
        start = clock.time = 100.0 + 10 * len(taken)
        call()
        taken.append(clock.time - start)
    return taken


def test_the_clock_starts_with_the_latest_member() -> None:
    def program() -> list[Any]:
        return [on_a_clock(each) for each in (blocking, overlapped, one_after_another, messages, every_kind)]

    size = BANDWIDTH
    took = 2 * (ALPHA + 100 / size)  # an all-reduce of 200 bytes
    for rank, seen in enumerate(tplab.launch(program, 2, backend="gloo")):
        (first, transfers), (overlap, _), (shared, _), (sent, moved), (kinds, _) = seen
        assert first == [10 + took]
        assert transfers == [("all_reduce", pytest.approx(10), pytest.approx(10 + took))]
        second = 10 + took + 7  # the ranks are in step after the first one
        assert overlap == [10 + took, second + 9, 0, 1]
        assert shared == [10 + took, 10 + 2 * took, 10 + 2 * took], "whoever waits late has waited"
        message = ALPHA + 100 / size
        assert sent == [10 + message] * 2
        assert [(one, round(end - start, 9)) for one, start, end in moved] == [("send", message), ("recv", message)]
        half, whole = ALPHA + 32 / size, ALPHA + 16 / size
        assert kinds == pytest.approx([half, half, half, half, whole, half, half, 2 * ALPHA]), rank


def refused() -> list[str]:
    said = []
    replicated = DistributedDataParallel(torch.nn.Linear(1, 1))
    with slow_link(1e-3):
        for call in (
            lambda: functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD),
            lambda: replicated(torch.ones(1, 1)),
        ):
            try:
                call()
            except NotImplementedError as error:
                said.append(str(error))
    replicated(torch.ones(1, 1)).sum().backward()  # outside, it works as before
    return said


def test_what_it_cannot_delay_is_refused() -> None:
    first, second = tplab.launch(refused, 2, backend="gloo")
    assert re.search(saying("all_reduce", "torch.distributed"), second[0])
    assert "DistributedDataParallel" in second[1]


def one_member_outside(clock: Clock) -> float:
    with slow() if dist.get_rank() == 0 else nullcontext():
        x = torch.ones(50)
        dist.all_reduce(x)
    assert bool((x == 2).all())
    return clock.time


def test_a_member_outside_is_not_delayed_and_does_not_hold_up_the_others() -> None:
    delayed, outside = tplab.launch(on_a_clock, 2, args=(one_member_outside, nullcontext), backend="gloo")
    assert (delayed[0], outside[0]) == (10 + 2 * (ALPHA + 100 / BANDWIDTH), 10)


def traced() -> tuple[RankTrace, Record, str]:
    with slow_link(alpha=0.02) as link, tplab.record() as section, trace_rank() as trace:
        dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
    return trace, section, link.text


def test_a_trace_shows_the_transfers_of_the_link() -> None:
    for trace, section, text in tplab.launch(traced, 2, backend="gloo"):
        (span,) = trace.lane("communicate")
        assert span.end == pytest.approx(section[0].transfer.end)
        assert section[0].end >= section[0].transfer.end, "on the real clock, nothing ends too early"
        assert trace.link == text
        assert "20 ms" in text
