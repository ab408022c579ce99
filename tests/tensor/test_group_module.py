"""Copies of modules that have process groups, and that they can't be pickled: `tplab.tensor.group_module`."""

import copy
import io

import pytest
import torch

from tests import saying
from tests.tensor.on_ranks import own_group
from tplab import launch
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.tensor.linear import ColumnParallelLinear
from tplab.tensor.sharding import shard_ranks

CONFIG = GPTConfig(
    num_layers=1, hidden_size=8, num_heads=4, num_kv_heads=2, vocab_size=11, seq_length=6, gated=True, bias=False,
    learned_positions=False, dropout=0.0,
)  # fmt: skip
IDS = torch.arange(6).view(1, 6)


def _copy(group):
    torch.manual_seed(1)
    model = ParallelGPT(CONFIG, group=group)
    twin = copy.deepcopy(model)
    assert twin.group is group
    for (name, parameter), own in zip(twin.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, own), name
        assert shard_ranks(parameter) == shard_ranks(own), name
    loss = twin(IDS, IDS)
    loss.backward()
    assert torch.equal(loss, model(IDS, IDS))


def _everything():
    _copy(None)
    _copy(own_group())


def test_a_copy_is_the_same_model_in_the_same_groups():
    launch(_everything, 4)


def test_a_module_cannot_be_pickled_and_the_message_says_what_to_save():
    for module in (ColumnParallelLinear(4, 4), ParallelGPT(CONFIG)):
        with pytest.raises(TypeError, match=saying(type(module).__name__, "full_state_dict", "save_sharded")):
            torch.save(torch.nn.ModuleList([module]), io.BytesIO())
