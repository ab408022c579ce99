"""Faults that a CPU with gloo forgives. The emulated GPUs find each of them, and say what a GPU would do."""

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import saying
from tests.gpu import test_pipelines as pipelines
from tplab import device, launch
from tplab.collectives.subgroups import split
from tplab.pipeline.p2p import Channels
from tplab.runtime import RankError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("EMULATED_GPUS" not in os.environ, reason="a real GPU would hang, or show nothing"),
]


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, device=device())


def a_tensor_of_the_cpu_in_a_collective() -> None:
    dist.all_reduce(torch.ones(4))


def a_batch_that_stayed_on_the_cpu() -> Tensor:
    return torch.nn.Linear(4, 4, device=device())(torch.ones(2, 4))


def targets_that_stayed_on_the_cpu() -> Tensor:
    return torch.nn.functional.cross_entropy(ones(2, 4), torch.zeros(2, dtype=torch.long))


def a_message_of_int16() -> None:
    dist.all_reduce(ones(4).to(torch.int16))


def a_group_made_by_its_members_only() -> None:
    if dist.get_rank() != 1:
        dist.new_group([0, 2], use_local_synchronization=True)
    dist.barrier()


def a_ring_of_sends_one_by_one() -> None:
    p, rank = dist.get_world_size(), dist.get_rank()
    send = dist.isend(ones(4), (rank + 1) % p)
    dist.irecv(ones(4), (rank - 1) % p).wait()
    send.wait()


def two_large_sends_first() -> None:
    other = (dist.get_rank() + 1) % dist.get_world_size()
    dist.send(ones(4), other)
    dist.recv(ones(4), other)


def a_received_tensor_read_too_early() -> None:
    if dist.get_rank() == 0:
        time.sleep(0.5)
        dist.send(ones(4), 1)
    elif dist.get_rank() == 1:
        x = ones(4)
        work = dist.irecv(x, 0)
        print(x + 1)
        work.wait()


def a_sent_tensor_overwritten_too_early() -> None:
    if dist.get_rank() == 0:
        x = ones(4)
        work = dist.isend(x, 1)
        x.zero_()
        work.wait()
    elif dist.get_rank() == 1:
        x = ones(4)
        time.sleep(0.5)
        dist.recv(x, 0)


def a_sum_read_before_it_is_waited_for() -> None:
    x = ones(4)
    if dist.get_rank() == 0:
        time.sleep(0.5)
    work = dist.all_reduce(x, async_op=True)
    print(x.sum().item())
    work.wait()


def a_sum_whose_memory_is_freed_too_early() -> None:
    x = ones(4)
    work = dist.all_reduce(x, async_op=True)
    x.untyped_storage().resize_(0)
    work.wait()


def a_pipeline_whose_connections_were_not_opened() -> None:
    Channels.open_connections = lambda *_: None  # type: ignore[method-assign]
    pipelines.of_this_rank(3)


FAULTS: dict[Callable[[], object], str] = {
    a_tensor_of_the_cpu_in_a_collective: "No backend type associated with device type cpu",
    a_batch_that_stayed_on_the_cpu: "Expected all tensors to be on the same device",
    targets_that_stayed_on_the_cpu: "Expected all tensors to be on the same device",
    a_message_of_int16: saying("torch.int16", "NCCL"),
    a_group_made_by_its_members_only: saying("new_group([0, 2])", "ranks [1]"),
    a_ring_of_sends_one_by_one: saying("rank ", "rank ", "message #1", "rank ", "send to rank "),
    two_large_sends_first: saying("rank ", "rank ", "message #1", "rank ", "send to rank "),
    a_received_tensor_read_too_early: saying("reads", "[4]", "writes"),
    a_sent_tensor_overwritten_too_early: saying("writes", "[4]", "reads"),
    a_sum_read_before_it_is_waited_for: saying("reads", "[4]", "writes"),
    a_sum_whose_memory_is_freed_too_early: saying("resize_", "[16]", "writes"),
    a_pipeline_whose_connections_were_not_opened: saying("rank ", "rank ", "message #1", "rank ", "recv from rank "),
}


@pytest.mark.parametrize(("fault", "says"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_that_gloo_forgives_is_found(fault: Callable[[], object], says: str) -> None:
    with pytest.raises(RankError, match=says):
        launch(fault, 3, backend="nccl", timeout=30)


def a_group_made_by_splitting() -> float:
    x = ones(4)
    dist.all_reduce(x, group=split(None, [[0, 2], [1]]))
    return float(x.sum())


def a_ring_of_sends_in_one_batch() -> float:
    p, rank = dist.get_world_size(), dist.get_rank()
    x = ones(4) * 0
    operations = [dist.P2POp(dist.isend, ones(4), (rank + 1) % p), dist.P2POp(dist.irecv, x, (rank - 1) % p)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return float(x.sum())


def a_sent_tensor_that_is_only_read() -> float:
    x, p, rank = ones(4), dist.get_world_size(), dist.get_rank()
    y = x * 0
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, (rank + 1) % p), dist.P2POp(dist.irecv, y, (rank - 1) % p)]
    )
    z = x * 2
    for work in works:
        work.wait()
    return float((y + z).sum())


@pytest.mark.parametrize(
    ("program", "results"),
    [(a_group_made_by_splitting, [8.0, 4.0, 8.0]),
     (a_ring_of_sends_in_one_batch, [4.0] * 3),
     (a_sent_tensor_that_is_only_read, [12.0] * 3)],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_what_is_right_on_a_gpu_is_not_refused(program: Callable[[], float], results: list[float]) -> None:
    assert list(launch(program, 3, backend="nccl", timeout=30)) == results


def draws(seed: int) -> tuple[float, float]:
    torch.manual_seed(seed)
    return float(torch.rand(1, device=device())), float(torch.rand(1))


def test_a_seed_means_other_numbers_on_a_gpu_and_the_same_for_every_p_of_a_session() -> None:
    on_gpus = {p: launch(draws, p, args=(5,), backend="nccl")[0] for p in (1, 2)}
    assert on_gpus[1] == on_gpus[2]
    assert on_gpus[1][0] != on_gpus[1][1]
    chosen = {p: launch(draws, p, args=(5,))[0] for p in (1, 2, 4)}
    assert len(set(chosen.values())) == 1


def test_a_gpu_beyond_the_last_one_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ordinal 64"):
        torch.cuda.set_device(64)
