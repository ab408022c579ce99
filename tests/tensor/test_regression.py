"""The regression problem of chapter 04 has its solution, and a correct layer finds it on several ranks."""

import pytest
import torch
from torch import nn

from tplab import launch
from tplab.tensor import RowParallelLinear, regression


def test_the_targets_are_linear_in_the_inputs_and_every_bias_is_2():
    inputs, targets = (tensor.double() for tensor in regression.problem())
    with_ones = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], dim=1)  # [64, 9]
    found = torch.linalg.lstsq(with_ones, targets).solution  # [9, 4]
    torch.testing.assert_close(with_ones @ found, targets, rtol=0, atol=1e-5)
    torch.testing.assert_close(found[-1], torch.full((4,), 2.0, dtype=torch.float64), rtol=0, atol=1e-5)


def test_a_row_parallel_layer_learns_what_a_plain_one_learns():
    (plain,), ranks = (launch(regression.fit, p, args=(kind,)) for p, kind in ((1, nn.Linear), (4, RowParallelLinear)))
    for rank, found in enumerate(ranks):
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-4)
        torch.testing.assert_close(found["weight"], plain["weight"].chunk(4, dim=1)[rank], rtol=1e-4, atol=1e-5)
        assert regression.loss_in_one_process(ranks, bias_of=rank) == pytest.approx(plain["losses"][-1], rel=1e-4)
    ranks[1]["bias"] = torch.zeros(4)
    assert regression.loss_in_one_process(ranks, bias_of=1) > 3
