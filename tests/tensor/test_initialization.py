"""First values of shards: `tplab.tensor.initialization`."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.reference import cut
from tests.tensor.on_ranks import assert_refused, refusals
from tplab import launch
from tplab.tensor.initialization import init_parameter
from tplab.tensor.sharding import Sharding

OUT, IN = 600, 400


def _normal_through_data(weight):
    weight.data.normal_(0, 0.02)


def _in_three_steps(weight):
    weight.uniform_(-1, 1).mul_(0.5).add_(3.0)


# init method -> the std of the whole [OUT, IN] matrix
METHODS = {
    nn.init.xavier_normal_: math.sqrt(2 / (IN + OUT)),
    nn.init.xavier_uniform_: math.sqrt(2 / (IN + OUT)),
    nn.init.kaiming_normal_: math.sqrt(2 / IN),
    nn.init.kaiming_uniform_: math.sqrt(2 / IN),
    _normal_through_data: 0.02,
    _in_three_steps: 0.5 / math.sqrt(3),
}


def _shard(dim, stride=1, dtype=None):
    shape = [OUT, IN]
    shape[dim] //= dist.get_world_size() if dist.is_initialized() else 1
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype))
    parameter.tensor_parallel = Sharding(dim, stride)
    return parameter


def _draw(method, dim, stride, per_rank, seed=5):
    torch.manual_seed(seed)
    parameter = _shard(dim, stride)
    init_parameter(parameter, method, per_rank=per_rank)
    return parameter.detach(), torch.rand(4)


CUTS = [(0, 1), (0, 3), (1, 2)]


def _draw_from_master():
    return [_draw(nn.init.xavier_normal_, dim, stride, False) for dim, stride in CUTS]


@pytest.mark.parametrize("p", [1, 2, 4])
def test_from_a_master_weight_every_rank_has_its_part_of_the_same_matrix(p):
    torch.manual_seed(5)
    whole = nn.init.xavier_normal_(torch.empty(OUT, IN))
    afterwards = torch.rand(4)
    for rank, draws in enumerate(launch(_draw_from_master, p)):
        for (part, rank_afterwards), (dim, stride) in zip(draws, CUTS, strict=True):
            assert torch.equal(part, cut(whole, dim, rank, p, stride))
            assert torch.equal(rank_afterwards, afterwards)


def _draw_all():
    """Each method, by rows and by columns; a replicated parameter; and methods that need the whole matrix."""
    drawn = [[_draw(method, dim, 1, per_rank=True) for method in METHODS] for dim in (0, 1)]
    replicated = []
    for per_rank in (False, True):
        torch.manual_seed(5)
        replicated.append(nn.Parameter(torch.empty(OUT)))
        init_parameter(replicated[-1], nn.init.normal_, per_rank=per_rank)
    methods = (nn.init.orthogonal_, nn.init.eye_, _copy_ones, _nothing)
    refused = refusals(*(partial(init_parameter, _shard(0), method, per_rank=True) for method in methods))
    return drawn, [parameter.detach() for parameter in replicated], refused


def test_drawn_per_rank_shards_have_the_std_of_the_whole_and_differ_from_rank_to_rank():
    torch.manual_seed(5)
    expected = nn.init.normal_(torch.empty(OUT))
    results = launch(_draw_all, 4)
    for dim in (0, 1):
        for number, (method, std) in enumerate(METHODS.items()):
            draws = [drawn[dim][number] for drawn, _, _ in results]
            parts = [part for part, _ in draws]
            for part in parts:  # 60,000 numbers: 2 % is seven standard errors, and a wrong fan gives 13 % or more
                assert abs(part.std().item() / std - 1) < 0.02, method.__name__
            for first in range(4):
                for second in range(first):
                    assert (parts[first] == parts[second]).float().mean() < 0.001, method.__name__
            assert all(torch.equal(afterwards, draws[0][1]) for _, afterwards in draws)
    for _, replicated, refused in results:
        assert all(torch.equal(parameter, expected) for parameter in replicated)
        assert_refused([refused], *["per_rank_init can't draw a shard with this init_method"] * 4)
        assert all("or per_rank_init=False" in message for message in refused)


def _copy_ones(weight):
    weight.copy_(torch.ones(OUT, IN))


def _nothing(weight):
    pass


def _truncated():
    """Depending on torch's version a truncated normal is drawn in plain steps or in a loop until it fits."""
    try:
        return _draw(nn.init.trunc_normal_, 0, 1, per_rank=True)[0].std().item()
    except ValueError as error:
        return str(error)


def test_a_truncated_normal_is_drawn_right_or_refused():
    for outcome in launch(_truncated, 2):
        assert "can't draw a shard" in outcome if isinstance(outcome, str) else abs(outcome / 0.88 - 1) < 0.02


@pytest.mark.parametrize("per_rank", [False, True])
def test_without_a_process_group_the_method_fills_the_parameter(per_rank):
    part, _ = _draw(nn.init.orthogonal_, 0, 1, per_rank)
    torch.manual_seed(5)
    assert torch.equal(part, nn.init.orthogonal_(torch.empty(OUT, IN)))
