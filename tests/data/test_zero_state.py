"""ZeRO's optimizer state is saved and loaded in the form of a plain optimizer's.

tests/capstone/training/test_loop.py goes on from its checkpoints on other grids.
"""

import pytest
import torch

from tplab.data.zero import ZeRO1
from tplab.data.zero_state import FullOptimizer


def test_zeros_state_is_that_of_the_plain_optimizer_and_can_be_loaded_into_it():
    def trained(make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = make(model.parameters())
        for x in torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(1)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return model, optimizer

    _, plain = trained(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    _, zero = trained(lambda parameters: ZeRO1(parameters, torch.optim.AdamW, lr=0.1, bucket_bytes=1000))
    full = FullOptimizer(zero)
    with pytest.raises(ValueError, match=r"call gather\(\) on all ranks first"):
        full.state_dict()
    full.gather()
    theirs, ours = plain.state_dict(), full.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(ours["state"][number][key], value)

    theirs["state"][0]["step"] += 1
    with pytest.raises(ValueError, match=r"step is \[3.0, 4.0\] for the parameters of a bucket"):
        full.load_state_dict(theirs)
    del theirs["state"][0]
    with pytest.raises(ValueError, match="for 1 of its 4 parameters"):
        full.load_state_dict(theirs)
