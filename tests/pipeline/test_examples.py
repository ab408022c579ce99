"""The stages of the examples are parts of one model."""

import torch
from torch import nn

from tplab.pipeline.examples import ByteStage


def test_stages_are_parts_of_the_full_model():
    full = ByteStage().double()
    ids = torch.randint(256, (3, 8))
    for count in (1, 2, 4):
        stages = [ByteStage(number, count).double() for number in range(count)]
        for stage in stages:
            stage.load_state_dict({name: full.state_dict()[name] for name in stage.state_dict()})
        names = [name for stage in stages for name in stage.state_dict()]
        assert sorted(names) == sorted(full.state_dict())
        torch.testing.assert_close(nn.Sequential(*stages)(ids), full(ids), rtol=0, atol=0)
