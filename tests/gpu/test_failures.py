"""Ranks that wait forever on their GPUs are found, and the report names the collective. On a GPU, `wait()` returns."""

import re
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tests import saying
from tests.gpu.implementations import over_nccl
from tests.gpu.test_layers import check_is_open
from tplab import device
from tplab.runtime import Deadlock

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]  # two launches of at most 240 s, and NCCL's start


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=device())


def skips(rank: int) -> None:
    dist.all_reduce(ones(2))
    if rank == 0:
        dist.all_reduce(ones(4))


def skips_while_the_other_reads(rank: int) -> list[float]:
    x = ones(4)
    if rank == 0:
        dist.all_reduce(x)
    return x.tolist()


def skips_a_functional_one(rank: int) -> torch.Tensor | None:
    return None if rank else functional.all_reduce(ones(4), "sum", dist.group.WORLD) + 1


def two_groups_in_another_order(rank: int) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups if rank == 0 else groups[::-1]:
        x = ones(4)
        dist.all_reduce(x, group=group)
        x.sum().item()


def skips_after_a_slow_step(rank: int) -> None:
    """The line that deadlocks has been waiting before, so that it was on the board."""
    x = ones(4)
    for step in range(3):
        if rank == 1 and step == 1:
            time.sleep(2.5)
        if (rank, step) != (1, 2):
            dist.all_reduce(x)
        float(x.sum())


def ring(rank: int, sends: bool = True, sends_first: bool = False) -> None:
    x = ones(4)
    messages = [dist.P2POp(dist.irecv, x, 1 - rank)]
    if sends:
        messages.insert(0 if sends_first else 1, dist.P2POp(dist.isend, ones(4), 1 - rank))
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    float(x.sum())


def skips_its_part_of_a_ring(rank: int, sends_first: bool = False, later: bool = False) -> None:
    """NCCL doesn't hang in the first ring: it fails to open the connection between the two ranks.

    In a later ring that lists the send first, the send has all that it needs. Only the receive waits.
    """
    if later:
        ring(rank)
    ring(rank, sends=rank == 0, sends_first=sends_first)


def both_receive_first(rank: int) -> float:
    x = ones(4)
    dist.recv(x, 1 - rank)
    dist.send(x, 1 - rank)
    return float(x.sum())


def shapes_differ(rank: int) -> None:
    dist.all_reduce(ones(2 + rank))


SUM = "all_reduce #{} ([4] float32, sum)"
SENDS = ("rank 1", "send", "rank 0")
RECEIVES = ("rank 0", "recv from rank 1")
RING = skips_its_part_of_a_ring
DEADLOCKS: dict[str, tuple[Callable[[int], object], tuple[str, ...]]] = {
    "skips": (skips, ("rank 1", SUM.format(2), "rank 0")),
    "skips while the other reads": (skips_while_the_other_reads, ("rank 1", SUM.format(1), "rank 0")),
    "skips a functional one": (skips_a_functional_one, ("rank 1", SUM.format(1), "rank 0")),
    "skips after a slow step": (skips_after_a_slow_step, ("rank 1", SUM.format(3), "rank 0")),
    "skips its part of a ring": (RING, (*SENDS, "message #1", *RECEIVES)),
    "skips its part of a ring that sends first": (partial(RING, sends_first=True), (*SENDS, "message #1")),
    "skips its part of a later ring": (partial(RING, later=True), (*SENDS, "message #2")),
    "skips its part of a later ring that sends first": (
        partial(RING, sends_first=True, later=True),
        (*SENDS, "message #2"),
    ),
    "two groups in another order": (two_groups_in_another_order, ("rank 0", SUM.format(1), "rank 1")),
    "both receive first": (both_receive_first, (*SENDS, "message #1", *RECEIVES, "[4]")),
    "shapes differ": (shapes_differ, ("collective #1",)),
}


def on_this_rank(program: Callable[[int], object]) -> object:
    return program(dist.get_rank())


@pytest.mark.parametrize(("program", "says"), DEADLOCKS.values(), ids=DEADLOCKS)
def test_ranks_that_wait_forever_are_named(program: Callable[[int], object], says: tuple[str, ...]) -> None:
    check_is_open(over_nccl(2))
    with pytest.raises(Deadlock) as caught:  # another error fails the test with its full text
        over_nccl(2).run(on_this_rank, program, timeout=30)
    assert any(re.search(saying(*says), line) for line in str(caught.value).splitlines()), str(caught.value)
    assert caught.value.cause_type != "timeout"


def is_slow(rank: int) -> float:
    x = ones(4)
    time.sleep(3 * rank)
    dist.all_reduce(x)
    return float(x.sum())


def test_a_slow_rank_is_no_deadlock() -> None:
    check_is_open(over_nccl(2))
    assert list(over_nccl(2).run(on_this_rank, is_slow)) == [8.0, 8.0]
