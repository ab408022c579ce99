"""The record: every collective a rank enters, with its size, place and times. Sizes are held to the formulas."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import tplab
from tplab.runtime import Collective, Record, hooks

FLOAT = 4  # bytes


def everything(p: int) -> None:
    """Every kind of collective once, on tensors whose sizes tell them apart."""
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(10))
    dist.broadcast(torch.ones(11), src=1)
    dist.reduce(torch.ones(12), dst=1, op=dist.ReduceOp.MAX)
    dist.all_gather([torch.empty(13) for _ in range(p)], torch.ones(13))
    dist.all_gather_into_tensor(torch.empty(p * 14), torch.ones(14))
    dist.reduce_scatter_tensor(torch.empty(15), torch.ones(p * 15))
    dist.reduce_scatter(torch.empty(16), [torch.ones(16) for _ in range(p)])
    dist.gather(torch.ones(17), [torch.empty(17) for _ in range(p)] if rank == 0 else None, dst=0)
    dist.scatter(torch.empty(18), [torch.ones(18) for _ in range(p)] if rank == 0 else None, src=0)
    dist.all_to_all_single(torch.empty(p * 19), torch.ones(p * 19))
    dist.barrier()


def test_every_kind_is_seen_on_every_rank_with_its_size_in_the_order_of_time(two) -> None:
    p = 2
    expected = [
        ("all_reduce", (10,), 10, "sum", None),
        ("broadcast", (11,), 11, None, 1),
        ("reduce", (12,), 12, "max", 1),
        ("all_gather", (13,), 13 * p, None, None),
        ("all_gather", (14,), 14 * p, None, None),
        ("reduce_scatter", (p * 15,), 15 * p, "sum", None),
        ("reduce_scatter", (16,), 16 * p, "sum", None),
        ("gather", (17,), 17 * p, None, 0),
        ("scatter", (18,), 18 * p, None, 0),
        ("all_to_all", (p * 19,), 19 * p, None, None),
        ("barrier", (), 0, None, None),
    ]
    for rank in range(p):
        found = two.record.of_rank(rank)[: len(expected)]  # it's what a rank does first
        assert [(c.kind, c.shape, c.bytes // FLOAT, c.op, c.peer) for c in found] == expected
        assert [c.number for c in found] == list(range(1, len(expected) + 1))
        assert {c.group for c in found} == {(0, 1)}
        assert {c.where.rpartition(":")[2] for c in found} == {"everything"}, "torch decorates some"
        starts = [c.start for c in two.record.of_rank(rank)]
        began, returned = two.spans[rank]
        assert starts == sorted(starts)
        assert 0 < began < starts[0] < returned, "times count from the launch"


LOCAL = {  # methods of ProcessGroup that send nothing to other ranks, or that only torch itself calls
    "rank", "size", "name", "group_name", "group_desc", "bound_device_id", "boxed", "unbox", "BackendType", "options",
    "get_group_store", "get_backend", "merge_remote_group", "abort", "shutdown", "set_timeout",
    "use_pg_for_symm_mem_rendezvous", "new_window", "supports_window", "reconfigure", "supports_reconfigure",
    "get_reconfigure_handle", "register_abort_hook", "register_post_hook", "register_pre_hook",
    "unregister_abort_hook", "unregister_post_hook", "unregister_pre_hook",
}  # fmt: skip


def test_every_method_of_a_process_group_that_communicates_is_recorded() -> None:
    """A new version of torch may bring more of them, as 2.14 did with gather_single."""
    hooks.install()
    methods = {name: method for name, method in vars(ProcessGroup).items() if callable(method)}
    ours = {name for name, method in methods.items() if getattr(method, "__module__", "").startswith("tplab.")}
    assert {name for name in methods.keys() - ours - LOCAL if not name.startswith("_")} == set()
    assert ours >= {"allreduce", "send", "barrier", "monitored_barrier"}


CALLS = [  # shape, dtype, operation, group, and its number in the group
    ((2,), "float32", "sum", (0, 1, 2), 1),
    ((3,), "float32", "sum", (0, 1, 2), 2),
    ((3,), "float64", "sum", (0, 1, 2), 3),
    ((3,), "float64", "max", (0, 1, 2), 4),
    ((3,), "float64", "max", (0, 1), 1),
    ((2,), "float32", "sum", (0, 1, 2), 5),
]


def one_line() -> None:
    groups = {(0, 1): dist.new_group([0, 1]), (0, 1, 2): None}
    for shape, dtype, op, members, _ in CALLS:
        if dist.get_rank() in members:
            x, operation = torch.ones(shape, dtype=getattr(torch, dtype)), getattr(dist.ReduceOp, op.upper())
            dist.all_reduce(x, op=operation, group=groups[members])


def messages() -> float:
    if dist.get_rank() == 1:
        for value in (7.0, 5.0):
            dist.send(torch.full((2,), value), dst=0)
        dist.irecv(torch.empty(3), src=0).wait()
    elif dist.get_rank() == 0:
        first, second = torch.empty(2), torch.empty(2)
        dist.recv(first)
        dist.recv(second, src=1)
        dist.isend(torch.ones(3), dst=1).wait()
        return (first - second).sum().item()
    return 0


def test_one_line_may_communicate_something_else_each_time_and_messages_name_both_ends() -> None:
    """A receive from anyone is counted with those of its sender."""
    results = tplab.launch(lambda: one_line() or messages(), 3, backend="gloo")
    own = results.record.of_rank(0)
    assert [(c.shape, c.dtype, c.op, c.group, c.number) for c in own[: len(CALLS)]] == CALLS
    assert results[0] == 4
    seen = [(c.rank, c.kind, c.peer, c.number, c.numel, c.group) for c in results.record]
    assert [one for one in seen if one[1] in ("send", "recv")] == [
        (0, "recv", 1, 1, 2, (1, 0)),
        (0, "recv", 1, 2, 2, (1, 0)),
        (0, "send", 1, 1, 3, (0, 1)),
        (1, "send", 0, 1, 2, (1, 0)),
        (1, "send", 0, 2, 2, (1, 0)),
        (1, "recv", 0, 1, 3, (0, 1)),
    ]


def asynchronous() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    never_awaited = dist.all_reduce(torch.ones(4), async_op=True)
    time.sleep(0.3)
    work.wait()
    dist.all_reduce(torch.ones(5))  # waited for at once
    del never_awaited


def test_an_asynchronous_collective_ends_when_wait_returns_and_computing_meanwhile_is_not_waiting(two) -> None:
    for found in two:
        awaited, forgotten, exposed = found["asynchronous"]
        assert forgotten.end is None
        assert awaited.end is not None
        assert exposed.end is not None
        assert awaited.end - awaited.start - awaited.waited >= 0.3
        assert awaited.end <= exposed.start
        assert 0 < exposed.waited <= exposed.end - exposed.start


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        own = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(own)
        return own * 2


def of_dtensor() -> None:
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()


@torch.compile(backend="aot_eager")
def summed(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def of_a_compiled_function() -> None:
    summed(torch.ones(3))


def of_a_batch() -> None:
    other = 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, torch.ones(2), other), dist.P2POp(dist.irecv, torch.empty(2), other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def of_a_backward() -> None:
    Doubled.apply(torch.ones(2, requires_grad=True)).sum().backward()


def every_way() -> dict[str, Any]:
    """What each way to communicate leaves in a section of its own, and what a section that isn't kept leaves."""
    found: dict[str, Any] = {}
    everything(2)
    with tplab.record() as section:
        asynchronous()
    found["asynchronous"] = list(section)
    for name, program in {
        "DTensor": of_dtensor, "compiled": of_a_compiled_function, "compiled again": of_a_compiled_function,
        "batched": of_a_batch, "backward": of_a_backward,
    }.items():  # fmt: skip
        with tplab.record() as section:
            program()
        found[name] = sorted((c.kind, c.numel) for c in section)
        if name == "compiled":
            found["ended"] = [c.end is not None for c in section]
    found["where"] = section[0].where
    with tplab.record() as outer:
        dist.all_reduce(torch.ones(2))
        with tplab.record(keep=False) as inner:
            dist.barrier()
            dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(4))
    found |= {"outer": outer.totals(), "inner": inner.totals()}
    for _ in range(500):
        with tplab.record(keep=False):
            dist.all_reduce(torch.ones(2))
    recorder = hooks.active
    assert recorder is not None
    assert len(recorder.pending) <= 1  # the handle of the last one may still be known
    return found


@pytest.fixture(scope="module")
def two() -> tplab.Results:
    return tplab.launch(every_way, 2)


def test_every_way_to_communicate_is_recorded_once_with_the_callers_line_and_what_is_not_kept_is_forgotten(two) -> None:
    for found in two:
        sums = [call for call in found["DTensor"] if call[0] == "all_reduce"]  # besides what distributes the weights
        assert sums == [("all_reduce", 8)] * 2  # one forward, one backward, b*h elements each
        assert found["compiled"] == found["compiled again"] == [("all_reduce", 3)]  # when it runs, not when it's traced
        assert found["ended"] == [True], "the graph has waited for it"
        assert found["batched"] == [("recv", 2), ("send", 2)]
        file, line, function = found["where"].rsplit(":", 2)
        assert (file, function) == (__file__, "backward")
        assert int(line) == Doubled.backward.__code__.co_firstlineno + 3
        assert found["inner"] == {"barrier": (1, 0), "all_reduce": (1, 3 * FLOAT)}
        assert found["outer"] == {"all_reduce": (2, 6 * FLOAT)}
    before, last = two.record.of_rank(0)[-2:]
    assert (before.numel, last.numel, last.number - before.number) == (2, 4, 3)  # those that were forgotten count on


def test_totals_add_calls_and_bytes_of_one_rank() -> None:
    def entered(rank: int, kind: str, size: int) -> Collective:
        return Collective(rank, kind, (0, 1), 1, (size,), "float32", size * FLOAT, "sum", None, "f:1:g", 0.0, 1.0)

    record = Record([entered(0, "all_reduce", 3), entered(0, "all_reduce", 5), entered(1, "broadcast", 7)])
    assert (record.totals(), record.totals(1)) == ({"all_reduce": (2, 32)}, {"broadcast": (1, 28)})
