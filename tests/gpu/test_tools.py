"""What is made for GPUs in particular: traces of kernels, torch.compile's own kernels, the capstone."""

import pytest
import torch

from tests.gpu import real_gpu
from tests.gpu.implementations import WAYS, Way
from tests.gpu.models import compiled_mlp
from tests.gpu.subject import SINGLE, Difference, differences
from tests.gpu.test_layers import SHARED_NCCL, check_is_open
from tests.gpu.waiting import check_shares, shares_of_waiting
from tplab import device
from tplab.tensor.mlp import ParallelMLP
from tplab.trace.rank_trace import RankTrace, trace_rank

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]  # two launches of at most 240 s, and NCCL's start

WITH_MESSAGES = [SHARED_NCCL, "2 GPUs, NCCL"]


def traced() -> RankTrace:
    """One layer forward and backward, after once to warm up."""
    mlp = ParallelMLP(512, 2048, device=device())
    x = torch.randn(4, 256, 512, device=device(), requires_grad=True)
    mlp(x).sum().backward()
    with trace_rank() as trace:
        mlp(x).sum().backward()
    return trace


@real_gpu
@pytest.mark.parametrize("name", ["1 rank, NCCL", *WITH_MESSAGES])
def test_a_trace_shows_kernels_and_which_of_them_communicate(name: str) -> None:
    check_is_open(name)
    for trace in WAYS[name].run(traced):
        assert len(trace.lane("compute")) >= 6  # four products backward, two forward
        assert trace.seconds("compute") > 0
        sums = len(trace.lane("communicate"))
        assert sums == (0 if WAYS[name].world_size == 1 else 2), [span.name for span in trace.lane("communicate")]


@pytest.mark.parametrize("name", ["2 ranks share a GPU, gloo", *WITH_MESSAGES])
def test_the_meter_knows_who_waits(name: str) -> None:
    check_is_open(name)
    check_shares(*WAYS[name].run(shares_of_waiting))


def compiled() -> dict[str, Difference]:
    return differences(compiled_mlp("inductor"), SINGLE)


@real_gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MESSAGES)
def test_a_compiled_layer_agrees_with_plain_torch(name: str) -> None:
    check_is_open(name)
    way: Way = WAYS[name]
    for found in way.run(compiled):
        assert {what: difference.problem() for what, difference in found.items()} == dict.fromkeys(found)
