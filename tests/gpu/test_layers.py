"""Every case in every way that this machine's GPUs allow."""

from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests.gpu.implementations import WAYS, Way, problems
from tplab import device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]  # two launches of at most 240 s, and NCCL's start

SHARED_NCCL = "2 ranks share a GPU, NCCL"


def check_is_open(way: str | Way) -> None:
    """Skip the test if it needs two GPUs and there is one. Ranks share GPUs in all others, which fail if they can't."""
    gpus = torch.cuda.device_count()
    if way == "2 GPUs, NCCL" and gpus < 2:
        pytest.skip(f"needs 2 GPUs, and here are {gpus}")
    way = WAYS[way] if isinstance(way, str) else way
    if way.shares and way.backend == "nccl" and (refused := what_nccl_says()):
        pytest.fail(f"{way.world_size} ranks have to share {gpus} GPUs, but NCCL doesn't let them: {refused}")


@cache
def what_nccl_says() -> str | None:
    """None where two ranks with hosts of their own (NCCL_HOSTID) can add up numbers on one GPU, else the last words.

    NCCL refuses two ranks with the same GPU and the same host; that the hosts only say to be two is a trick of ours.
    """
    try:
        totals = WAYS[SHARED_NCCL].run(_sum_of_ranks, timeout=60.0)
    except Exception as error:  # whatever it is, it is what there is to tell
        return str(error).strip().splitlines()[-1]
    return None if totals == [3.0, 3.0] else f"1 + 2 is {totals}"


def _sum_of_ranks() -> float:
    x = torch.full((1000,), 1.0 + dist.get_rank(), device=device())
    dist.all_reduce(x)
    return float(x.max())


@pytest.mark.parametrize(
    ("way", "name"), [pytest.param(way, name, id=f"{way}: {name}") for way in WAYS for name in WAYS[way].names()]
)
def test_parallel_layers_agree_with_plain_torch(way: str, name: str) -> None:
    check_is_open(way)
    assert problems(WAYS[way], name) == []


@pytest.mark.parametrize("name", WAYS)
def test_every_rank_computes_on_its_gpu(name: str) -> None:
    check_is_open(name)
    way = WAYS[name]
    places = [torch.device("cuda", rank % way.gpus_here) for rank in range(way.world_size)]
    assert way.run(device) == places
