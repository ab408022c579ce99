"""All-reduces through shared memory: the same sums as in float64, the same records and reports as through gloo."""

import datetime
import os
import resource
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import tplab
from tplab.memory.meter import MemoryMeter
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
    assert share_memory(None, LARGEST)
    p, rank = dist.get_world_size(), dist.get_rank()
    given = terms(p, size, dtype=dtype)
    x = given[rank].clone()
    _, count = taken(lambda: dist.all_reduce(x))
    right = sum(term.double() for term in given)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(x.double(), right, rtol=tolerance, atol=10 * tolerance)
    return x, count


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_sum_is_right_and_has_the_same_bits_on_every_rank(p, dtype):
    results = tplab.launch(summed, p, args=(dtype, 10_001))
    assert [count for _, count in results] == [1] * p
    assert all(torch.equal(x, results[0][0]) for x, _ in results)


@pytest.mark.parametrize(("size", "through"), [(0, 1), (1, 1), (LARGEST // 4, 1), (LARGEST // 4 + 1, 0)])
def test_only_messages_up_to_the_limit_are_taken(size, through):
    assert [count for _, count in tplab.launch(summed, 2, args=(torch.float32, size))] == [through] * 2


def extremes(p, rank):
    """Return a rank's tensor, whose row 0 starts with a NaN on the first rank, one on the last, a zero, and -inf."""
    x = terms(p, 9, 1000, dtype=torch.float32)[rank]
    x[0, :4] = torch.tensor([torch.nan if rank == 0 else 1, torch.nan if rank == p - 1 else 1, 0.0, -torch.inf])
    x[0, 2] *= (-1) ** rank
    return x


def most_and_least():
    assert share_memory(None, LARGEST)
    p, rank = dist.get_world_size(), dist.get_rank()
    largest, least = extremes(p, rank), extremes(p, rank)
    _, count = taken(
        lambda: (dist.all_reduce(largest, dist.ReduceOp.MAX), dist.all_reduce(least, op=dist.ReduceOp.MIN))
    )
    return count, largest, least


@pytest.mark.parametrize("p", [2, 3])
def test_maxima_and_minima_are_right_and_have_the_same_bits_on_every_rank(p):
    every = torch.stack([extremes(p, rank) for rank in range(p)])
    results = tplab.launch(most_and_least, p)
    for count, largest, least in results:
        assert count == 2
        torch.testing.assert_close(largest, every.amax(0), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(least, every.amin(0), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(largest.view(torch.int32), results[0][1].view(torch.int32))
        assert torch.equal(least.view(torch.int32), results[0][2].view(torch.int32))


def others():
    assert share_memory(None, LARGEST)
    x = torch.full((9000,), float(dist.get_rank() + 1))
    product, whole = x.clone(), x.long()
    _, count = taken(lambda: (dist.all_reduce(product, dist.ReduceOp.PRODUCT), dist.all_reduce(whole)))
    return count, product[0].item(), whole[-1].item()


def test_products_and_integers_still_go_through_gloo():
    assert list(tplab.launch(others, 3)) == [(0, 6.0, 6)] * 3


def in_place(layout):
    assert share_memory(None, LARGEST)
    given = terms(dist.get_world_size(), 90, 110, dtype=torch.float32)
    buffer = torch.zeros(2, 90, 110)
    x = buffer[1] if layout == "slice" else buffer[1].T if layout == "transposed" else buffer[1].T.contiguous().T
    with torch.no_grad():
        x.copy_(given[dist.get_rank()].T if layout == "transposed" else given[dist.get_rank()])
    _, count = taken(lambda: dist.all_reduce(x))
    right = sum(given)
    torch.testing.assert_close(x, right.T if layout == "transposed" else right)
    return count, buffer[0].abs().max().item()


@pytest.mark.parametrize("layout", ["slice", "transposed", "columns"])
def test_the_tensor_is_overwritten_in_its_own_memory_and_layout(layout):
    assert list(tplab.launch(in_place, 2, args=(layout,))) == [(1, 0.0)] * 2


def many_at_once():
    assert share_memory(None, LARGEST)
    rank, p = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((5000,), float(10**turn * (rank + 1))) for turn in range(7)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() for work in works)
    return [(x[0] / (10**turn * p * (p + 1) / 2)).item() for turn, x in enumerate(tensors)]


def test_several_asynchronous_sums_may_be_on_their_way():
    for found in tplab.launch(many_at_once, 3):
        assert found == pytest.approx([1.0] * 7)


def with_a_slow_reader():
    """Rank 1 reads each set of slots only after a pause, in which rank 0 goes on as far as it can."""
    assert share_memory(None, LARGEST)
    rank = dist.get_rank()
    if rank == 1:

        def slow(*args, **kwargs):
            time.sleep(0.05)
            return torch.add(*args, **kwargs)

        shared_memory._OPERATIONS["sum"] = slow
    tensors = [torch.full((5000,), float(turn)) for turn in range(8)]
    for x in tensors:
        dist.all_reduce(x)
    return [x[0].item() for x in tensors]


def test_no_rank_overwrites_what_a_slow_rank_has_not_read_yet():
    assert list(tplab.launch(with_a_slow_reader, 2)) == [[2.0 * turn for turn in range(8)]] * 2


def functional(way):
    assert share_memory(None, LARGEST)
    given = terms(dist.get_world_size(), 90, 110, dtype=torch.float32)
    x = given[dist.get_rank()].clone()

    def program(x):
        return funcol.all_reduce(x, "sum", dist.group.WORLD) * 1

    if way == "DTensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        y, count = taken(lambda: DTensor.from_local(x, mesh, [Partial()]).redistribute(mesh, [Replicate()]).to_local())
    else:
        y, count = taken(lambda: (torch.compile(program, backend=way) if way != "eager" else program)(x))
    torch.testing.assert_close(y, sum(given))
    torch.testing.assert_close(x, given[dist.get_rank()])  # the input is unchanged
    with tplab.record() as section:
        program(x)
    return count, [(call.kind, call.bytes) for call in section]


@pytest.mark.parametrize("way", ["eager", "aot_eager", "DTensor"])
def test_functional_all_reduces_are_taken_too(way):
    assert list(tplab.launch(functional, 2, args=(way,))) == [(1, [("all_reduce", 90 * 110 * 4)])] * 2


def after_inference():
    assert share_memory(None, LARGEST)
    with torch.inference_mode():
        for _ in range(2):  # once per set of slots
            dist.all_reduce(torch.ones(5))
    x = torch.ones(5)
    _, count = taken(lambda: dist.all_reduce(x))
    return count, x[-1].item()


def test_training_may_follow_inference():
    assert list(tplab.launch(after_inference, 2)) == [(1, 2.0)] * 2


def unusual_calls():
    assert share_memory(None, LARGEST)
    own = torch.full((5,), dist.get_rank() + 1.0)
    wrapped = funcol.all_reduce(own, "sum", dist.group.WORLD)  # an AsyncCollectiveTensor has no memory of its own
    dist.all_reduce(wrapped)
    single = torch.tensor(dist.get_rank() + 1.0)
    dist.group.WORLD.allreduce(single, dist.ReduceOp.SUM).wait()  # an overload without options
    return wrapped[-1].item(), single.item()


def test_tensors_that_wrap_others_and_calls_without_options_use_gloo():
    assert list(tplab.launch(unusual_calls, 2)) == [(6.0, 3.0)] * 2


def compiled_with_a_graph_break():
    assert share_memory(None, LARGEST)

    @torch.compile(backend="aot_eager")
    def program(x):
        y = x * 2
        dist.all_reduce(y, async_op=True).wait()
        return y + 1

    return [program(torch.ones(size))[-1].item() for size in (5, 6, 7, 9000, 9001)]


def test_compiled_programs_may_break_at_an_asynchronous_all_reduce_of_any_size():
    assert list(tplab.launch(compiled_with_a_graph_break, 2)) == [[5.0] * 5] * 2


def never_waited_for():
    """A functional all-reduce that nobody waits for, and then one through gloo into the same memory."""
    assert share_memory(None, LARGEST)
    x, large = torch.ones(5000), torch.ones(LARGEST // 2)
    torch.ops._c10d_functional.all_reduce_(large[:5000].view(-1), "sum", dist.group.WORLD.group_name)
    y = torch.ops._c10d_functional.all_reduce_(large, "sum", dist.group.WORLD.group_name)
    torch.ops._c10d_functional.wait_tensor(y)
    dist.all_reduce(x)
    return x[0].item(), large[-1].item()


def test_a_functional_all_reduce_that_nobody_waits_for_is_not_taken_for_a_later_one():
    assert list(tplab.launch(never_waited_for, 2)) == [(2.0, 2.0)] * 2


def metered():
    assert share_memory(None, LARGEST)
    x = torch.ones(9000)
    with MemoryMeter() as meter:
        works = [dist.all_reduce(x.clone(), async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
    return meter.peak


def test_a_meter_counts_the_tensors_and_not_the_slots():
    assert list(tplab.launch(metered, 2)) == [2 * 9000 * 4] * 2


def two_groups():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    mine = groups[rank // 2]
    assert share_memory(mine, LARGEST)
    x, everywhere = torch.full((6000,), float(rank)), torch.full((6000,), float(rank))
    _, count = taken(lambda: (dist.all_reduce(x, group=mine), dist.all_reduce(everywhere)))
    return count, x[0].item(), everywhere[0].item()


def test_each_group_has_memory_of_its_own_and_other_groups_use_gloo():
    assert list(tplab.launch(two_groups, 4)) == [(1, 1.0, 6.0)] * 2 + [(1, 5.0, 6.0)] * 2


def on_two_machines():
    if dist.get_rank() == 1:  # another machine has no such file, or one of somebody else
        opened = os.open
        os.open = lambda path, *flags: opened("/dev/zero" if "/proc/" in str(path) else path, *flags)
    shared = share_memory(None, LARGEST)
    x = torch.full((9000,), float(dist.get_rank() + 1))
    _, count = taken(lambda: dist.all_reduce(x))
    return shared, count, x[0].item()


def test_ranks_that_cannot_share_memory_use_gloo():
    assert list(tplab.launch(on_two_machines, 3)) == [(False, 0, 6.0)] * 3


def without_memory(name):
    if name == "memfd_create":
        del os.memfd_create, os.sched_getaffinity  # as on macOS
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST // 2, LARGEST // 2))
    return share_memory(None, LARGEST)


@pytest.mark.parametrize("name", ["memfd_create", "ftruncate"])
def test_where_there_is_no_such_memory_gloo_is_used(name):
    assert list(tplab.launch(without_memory, 2, args=(name,))) == [False] * 2


def changed_and_stopped():
    x, counts = torch.ones(9000), []
    for largest in (LARGEST, LARGEST // 32, 0, LARGEST):
        assert share_memory(None, largest) == (largest > 0)
        counts.append(taken(lambda: dist.all_reduce(x))[1])
    return counts, x[0].item()


def test_the_limit_may_change_and_0_ends_it():
    assert list(tplab.launch(changed_and_stopped, 2)) == [([1, 0, 0, 1], 16.0)] * 2


def without_hooks():
    shared_memory._hooked = False
    with pytest.raises(RuntimeError, match="ranks that tplab.launch has started"):
        share_memory(None, LARGEST)


def test_it_is_refused_where_it_would_do_nothing():
    tplab.launch(without_hooks, 2)


def test_one_rank_has_nothing_to_share():
    assert list(tplab.launch(lambda: share_memory(None, LARGEST), 1)) == [False]


def recorded(shares):
    if shares:
        assert share_memory(None, LARGEST)
    with tplab.record() as section:
        dist.all_reduce(torch.ones(50, 100))
    (call,) = section
    return call.kind, call.group, call.shape, call.dtype, call.bytes, call.op


def test_the_record_is_that_of_an_ordinary_all_reduce():
    shared, gloos = (tplab.launch(recorded, 2, args=(shares,)) for shares in (True, False))
    assert list(shared) == list(gloos)


def one_rank_stays_away(first):
    assert share_memory(None, LARGEST)
    x = torch.ones(5000)
    if dist.get_rank() == 0:
        if first:
            dist.all_reduce(x, async_op=True)
        dist.all_reduce(torch.ones(5000))
    elif not first:
        dist.barrier()


@pytest.mark.parametrize("first", [False, True], ids=["waits for its own", "waits for the one before"])
def test_a_deadlock_is_reported_with_the_call_and_its_line(first):
    with pytest.raises(tplab.Deadlock) as caught:
        tplab.launch(one_rank_stays_away, 2, args=(first,), timeout=LIMIT)
    assert "not finished after" not in str(caught.value)
    assert "all_reduce #" in str(caught.value)
    assert "test_shared_memory.py" in str(caught.value)


def other_sizes():
    assert share_memory(None, LARGEST)
    dist.all_reduce(torch.ones(5000 + dist.get_rank()))


def test_different_shapes_are_refused():
    with pytest.raises(tplab.Deadlock, match="not the same on all ranks"):
        tplab.launch(other_sizes, 2, timeout=LIMIT)


def a_rank_ends():
    assert share_memory(None, LARGEST)
    for turn in range(100):
        if dist.get_rank() == 1 and turn == 3:
            raise ValueError("enough")
        dist.all_reduce(torch.ones(5000))


def test_a_rank_that_fails_ends_the_run():
    with pytest.raises(tplab.RankError, match="enough"):
        tplab.launch(a_rank_ends, 2, timeout=LIMIT)


def a_rank_loses_its_connections():
    assert share_memory(None, LARGEST)
    x = torch.ones(5000)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        return str(error)
    return f"the sum is {x[0]}"


def test_a_lost_connection_raises_gloos_error():
    assert "peer" in tplab.launch(a_rank_loses_its_connections, 2, timeout=LIMIT)[0]


def too_late():
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    assert share_memory(group, LARGEST)
    if dist.get_rank() == 1:
        time.sleep(3)
        return ""
    try:
        with unrecorded():  # so that launch doesn't report it first
            dist.all_reduce(torch.ones(5000), group=group)
    except RuntimeError as error:
        return str(error)


def test_a_rank_waits_only_as_long_as_its_group_says():
    message = tplab.launch(too_late, 2, timeout=LIMIT)[0]
    assert message == (
        "Timed out after 1 s in an all-reduce of 20,000 bytes: these ranks of the group haven't joined it: 1"
    )


def saved_for_backward():
    assert share_memory(None, LARGEST)
    x = torch.ones(5000, requires_grad=True)
    y = x * 3
    z = y.exp()  # saves z
    dist.all_reduce(z.detach())
    z.sum().backward()
    return x.grad[0].item()


def test_autograd_sees_as_much_of_it_as_of_gloos():
    """Neither notices that a saved tensor was overwritten, so a program doesn't depend on the transport."""
    assert list(tplab.launch(saved_for_backward, 2)) == pytest.approx([2 * 3 * torch.e**3] * 2)
