"""A correct layer finds the solution of chapter 04's regression problem on several ranks, with one bias."""

import pytest
import torch
from torch import nn

from tplab import launch
from tplab.tensor import RowParallelLinear, regression


def test_a_row_parallel_layer_learns_what_a_plain_one_learns():
    (plain,), ranks = (launch(regression.fit, p, args=(kind,)) for p, kind in ((1, nn.Linear), (4, RowParallelLinear)))
    for rank, found in enumerate(ranks):
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-4)
        torch.testing.assert_close(found["weight"], plain["weight"].chunk(4, dim=1)[rank], rtol=1e-4, atol=1e-5)
        assert regression.loss_in_one_process(ranks, bias_of=rank) == pytest.approx(plain["losses"][-1], rel=1e-4)
    ranks[1]["bias"] = torch.zeros(4)
    assert regression.loss_in_one_process(ranks, bias_of=1) > 3
