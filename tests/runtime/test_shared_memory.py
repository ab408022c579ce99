"""All-reduces through shared memory: the same sums as in float64, the same records and reports as through gloo."""

import datetime
import os
import re
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

import tplab
from tests import saying
from tplab.runtime import shared_memory
from tplab.runtime.hooks import unrecorded
from tplab.runtime.shared_memory import share_memory

LARGEST = 1 << 20  # bytes
LIMIT = 25.0


def taken(program):
    """Call program() on this rank, and return its result and how many of its all-reduces went through the slots."""
    count = 0
    original = shared_memory._Slots.all_reduce

    def counted(*args):
        nonlocal count
        count += 1
        return original(*args)

    shared_memory._Slots.all_reduce = counted
    try:
        return program(), count
    finally:
        shared_memory._Slots.all_reduce = original


def terms(p, *shape, dtype):
    """Return the tensor of each rank, the same list on every rank."""
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(p)]


def summed(dtype, size):
    p, rank = dist.get_world_size(), dist.get_rank()
    given = terms(p, size, dtype=dtype)
    x = given[rank].clone()
    _, count = taken(lambda: dist.all_reduce(x))
    right = sum(term.double() for term in given)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(x.double(), right, rtol=tolerance, atol=10 * tolerance)
    return x, count


def sums():
    """Of all dtypes and of several sizes, and which of the latter went through the slots."""
    dtypes = torch.float32, torch.float64, torch.bfloat16, torch.float16
    found = [summed(dtype, 10_001) for dtype in dtypes]
    return found, [summed(torch.float32, size)[1] for size in (0, 1, LARGEST // 4, LARGEST // 4 + 1)]


def extremes(p, rank):
    """Return a rank's tensor, whose row 0 starts with a NaN on the first rank, one on the last, a zero, and -inf."""
    x = terms(p, 9, 1000, dtype=torch.float32)[rank]
    x[0, :4] = torch.tensor([torch.nan if rank == 0 else 1, torch.nan if rank == p - 1 else 1, 0.0, -torch.inf])
    x[0, 2] *= (-1) ** rank
    return x


def most_and_least():
    p, rank = dist.get_world_size(), dist.get_rank()
    largest, least = extremes(p, rank), extremes(p, rank)
    _, count = taken(
        lambda: (dist.all_reduce(largest, dist.ReduceOp.MAX), dist.all_reduce(least, op=dist.ReduceOp.MIN))
    )
    return count, largest, least


def others():
    x = torch.full((9000,), float(dist.get_rank() + 1))
    product, whole = x.clone(), x.long()
    _, count = taken(lambda: (dist.all_reduce(product, dist.ReduceOp.PRODUCT), dist.all_reduce(whole)))
    return count, product[0].item(), whole[-1].item()


def in_place(transposed):
    given = terms(dist.get_world_size(), 90, 110, dtype=torch.float32)
    buffer = torch.zeros(2, 90, 110)
    x = buffer[1].T.contiguous().T if transposed else buffer[1]
    x.copy_(given[dist.get_rank()])
    _, count = taken(lambda: dist.all_reduce(x))
    torch.testing.assert_close(x, sum(given))
    return count, buffer[0].abs().max().item()


def without_memory():
    """As on macOS."""
    del os.memfd_create, os.sched_getaffinity
    return share_memory(None, LARGEST)


def many_at_once():
    rank, p = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((5000,), float(10**turn * (rank + 1))) for turn in range(7)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() for work in works)
    return [(x[0] / (10**turn * p * (p + 1) / 2)).item() for turn, x in enumerate(tensors)]


def with_a_slow_reader():
    """Rank 1 reads each set of slots only after a pause, in which rank 0 goes on as far as it can."""
    rank = dist.get_rank()
    if rank == 1:

        def slow(*args, **kwargs):
            time.sleep(0.05)
            return torch.add(*args, **kwargs)

        shared_memory._OPERATIONS["sum"] = slow
    tensors = [torch.full((5000,), float(turn)) for turn in range(8)]
    for x in tensors:
        dist.all_reduce(x)
    shared_memory._OPERATIONS["sum"] = torch.add
    return [x[0].item() for x in tensors]


def unusual_calls():
    own = torch.full((5,), dist.get_rank() + 1.0)
    wrapped = funcol.all_reduce(own, "sum", dist.group.WORLD)  # an AsyncCollectiveTensor has no memory of its own
    dist.all_reduce(wrapped)
    single = torch.tensor(dist.get_rank() + 1.0)
    dist.group.WORLD.allreduce(single, dist.ReduceOp.SUM).wait()  # an overload without options
    return wrapped[-1].item(), single.item()


def two_groups():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    mine = groups[rank // 2]
    share_memory(None, 0)
    assert share_memory(mine, LARGEST)
    x, everywhere = torch.full((6000,), float(rank)), torch.full((6000,), float(rank))
    _, count = taken(lambda: (dist.all_reduce(x, group=mine), dist.all_reduce(everywhere)))
    right = 1 if rank < 2 else 5
    return count, x[0].item() - right, everywhere[0].item()


def on_two_machines():
    opened = os.open
    if dist.get_rank() == 1:  # another machine has no such file, or one of somebody else
        os.open = lambda path, *flags: opened("/dev/zero" if "/proc/" in str(path) else path, *flags)
    shared = share_memory(None, LARGEST)
    os.open = opened
    x = torch.full((9000,), float(dist.get_rank() + 1))
    _, count = taken(lambda: dist.all_reduce(x))
    return shared, count, x[0].item()


PROGRAMS = {  # of each number of ranks: the program, its arguments, and what it returns on every rank
    2: {
        "a slice is overwritten in its own memory": (in_place, (False,), (1, 0.0)),
        "a transposed tensor is overwritten in its own layout": (in_place, (True,), (1, 0.0)),
        "a slow rank can still read": (with_a_slow_reader, (), [2.0 * turn for turn in range(8)]),
        "wrapped tensors and calls without options use gloo": (unusual_calls, (), (6.0, 3.0)),
        "where there is no such memory, gloo is used": (without_memory, (), False),
    },
    3: {
        "products and integers go through gloo": (others, (), (0, 6.0, 6)),
        "several asynchronous sums may be on their way": (many_at_once, (), pytest.approx([1.0] * 7)),
        "ranks that can't share memory use gloo": (on_two_machines, (), (False, 0, 6.0)),
    },
    4: {"each group has memory of its own, and other groups use gloo": (two_groups, (), (1, 0.0, 6.0))},
}


def everything(programs):
    """On a rank, with fresh slots for each program: sums, extremes, and what the programs return."""
    found = {}
    for name, (program, args) in {"sums": (sums, ()), "extremes": (most_and_least, ()), **programs}.items():
        assert share_memory(None, LARGEST)
        found[name] = program(*args)
    return found


@cache
def results_on(p: int) -> list[dict]:
    """What `everything` returns on each of p ranks, launched once."""
    programs = {name: (program, args) for name, (program, args, _) in PROGRAMS[p].items()}
    return list(tplab.launch(everything, p, args=(programs,), timeout=240))


@pytest.mark.parametrize("p", PROGRAMS)
def test_the_sum_is_right_and_has_the_same_bits_on_every_rank_up_to_the_limit(p):
    results = [found["sums"] for found in results_on(p)]
    for found, through in results:
        assert through == [1, 1, 1, 0]
        for (x, count), (first, _) in zip(found, results[0][0], strict=True):
            assert count == 1
            assert torch.equal(x, first)


@pytest.mark.parametrize("p", PROGRAMS)
def test_maxima_and_minima_are_right_and_have_the_same_bits_on_every_rank(p):
    every = torch.stack([extremes(p, rank) for rank in range(p)])
    results = [found["extremes"] for found in results_on(p)]
    for count, largest, least in results:
        assert count == 2
        torch.testing.assert_close(largest, every.amax(0), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(least, every.amin(0), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(largest.view(torch.int32), results[0][1].view(torch.int32))
        assert torch.equal(least.view(torch.int32), results[0][2].view(torch.int32))


@pytest.mark.parametrize(("p", "name"), [(p, name) for p, programs in PROGRAMS.items() for name in programs])
def test_programs_do_what_they_would_do_with_gloo(p, name):
    assert [found[name] for found in results_on(p)] == [PROGRAMS[p][name][2]] * p


def one_rank_stays_away():
    """Rank 0 waits for its first all-reduce when it starts the second one."""
    assert share_memory(None, LARGEST)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(5000), async_op=True)
        dist.all_reduce(torch.ones(5000))


def test_a_deadlock_is_reported_with_the_call_and_its_line():
    with pytest.raises(tplab.Deadlock) as caught:
        tplab.launch(one_rank_stays_away, 2, timeout=LIMIT)
    assert caught.value.cause_type != "timeout"
    assert "all_reduce #" in str(caught.value)
    assert "test_shared_memory.py" in str(caught.value)


def late_and_lost():
    """Return what rank 0 is told by a group that waits for one second, and by one whose rank 1 has gone."""
    x, group = torch.ones(5000), dist.new_group(timeout=datetime.timedelta(seconds=1))
    assert share_memory(None, LARGEST)
    assert share_memory(group, LARGEST)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        time.sleep(3)
        dist.destroy_process_group()
        return None
    with pytest.raises(RuntimeError) as late, unrecorded():  # so that launch doesn't report it first
        dist.all_reduce(x, group=group)
    with pytest.raises(RuntimeError) as lost:
        dist.all_reduce(x)
    return str(late.value), str(lost.value)


def test_a_rank_waits_only_as_long_as_its_group_says_and_a_lost_connection_raises_gloos_error():
    late, lost = tplab.launch(late_and_lost, 2, timeout=LIMIT)[0]
    assert re.search(saying("1 s", "20,000 bytes", " 1"), late)
    assert "peer" in lost
