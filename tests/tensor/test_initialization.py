"""First values of shards that are drawn per rank: `tplab.tensor.initialization`.

test_linear.py, test_qkv.py and test_embedding.py compare those that come from a master weight with torch's own layers.
"""

import math
from unittest import mock

import pytest
import torch
from torch import nn

from tests.tensor.on_ranks import refusals
from tplab.tensor import initialization
from tplab.tensor.initialization import init_parameter
from tplab.tensor.sharding import Sharding

OUT, IN, P = 600, 400, 4


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


def draw(method, dim=0, rank=0):
    """This rank's shard of P, and what is drawn next."""
    shape = [OUT, IN]
    shape[dim] //= P
    parameter = nn.Parameter(torch.empty(shape))
    parameter.tensor_parallel = Sharding(dim)
    torch.manual_seed(5)
    with mock.patch.object(initialization, "rank_and_size", return_value=(rank, P)):
        init_parameter(parameter, method, per_rank=True)
    return parameter.detach(), torch.rand(4)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_drawn_per_rank_shards_have_the_std_of_the_whole_and_differ_from_rank_to_rank(method, dim):
    parts, afterwards = zip(*(draw(method, dim, rank) for rank in range(P)), strict=True)
    for part in parts:  # 60,000 numbers: 2 % is seven standard errors, and a wrong fan gives 13 % or more
        assert abs(part.std().item() / METHODS[method] - 1) < 0.02
    for first in range(P):
        for second in range(first):
            assert (parts[first] == parts[second]).float().mean() < 0.001
    assert all(torch.equal(numbers, afterwards[0]) for numbers in afterwards)


def _copy_ones(weight):
    weight.copy_(torch.ones(OUT, IN))


def _nothing(weight):
    pass


def test_methods_that_need_the_whole_matrix_are_refused():
    """Depending on torch's version, a truncated normal is drawn in plain steps or in a loop until it fits."""
    for method in (nn.init.orthogonal_, nn.init.eye_, _copy_ones, _nothing):
        (message,) = refusals(lambda method=method: draw(method))
        assert "per_rank_init can't draw a shard with this init_method" in message
        assert "or per_rank_init=False" in message
    drawn = []
    (message,) = refusals(lambda: drawn.append(draw(nn.init.trunc_normal_)[0]))
    assert abs(drawn[0].std() / 0.88 - 1) < 0.02 if drawn else "can't draw a shard" in message


def test_what_is_replicated_and_what_has_no_process_group_is_filled_by_the_method():
    for method, shape, sharding in ((nn.init.normal_, (OUT,), None), (nn.init.orthogonal_, (OUT, IN), Sharding(0))):
        torch.manual_seed(5)
        expected = method(torch.empty(shape))
        for per_rank in (False, True):
            parameter = nn.Parameter(torch.empty(shape))
            if sharding:
                parameter.tensor_parallel = sharding
            torch.manual_seed(5)
            init_parameter(parameter, method, per_rank=per_rank)
            assert torch.equal(parameter, expected)
