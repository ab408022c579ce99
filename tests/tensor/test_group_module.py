"""Copies and pickles of modules that have process groups: `tplab.tensor.group_module`."""

import copy
import io
import re

import pytest
import torch
import torch.distributed as dist

from tests.tensor.on_ranks import assert_refused, own_group, refusals
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


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    return file.getvalue()


def loaded(content):
    return torch.load(io.BytesIO(content), weights_only=False)


def _save_and_load(group):
    torch.manual_seed(1)
    model = ParallelGPT(CONFIG, group=group)
    content = saved(model)
    for twin in (loaded(content), copy.deepcopy(model), copy.copy(model)):
        assert twin.group is group
        for (name, parameter), own in zip(twin.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(parameter, own), name
            assert shard_ranks(parameter) == shard_ranks(own), name
        for _ in range(2):  # the first forward may create the group of the ranks that share K and V heads
            loss = twin(IDS, IDS)
            loss.backward()
        assert torch.equal(loss, model(IDS, IDS))
    return content


def _load_what_rank_0_saved(group):
    content = [saved(ColumnParallelLinear(4, 4, group=group))]
    dist.broadcast_object_list(content, src=0)
    return refusals(lambda: loaded(content[0]), kind=RuntimeError)


def _everything():
    group = own_group()
    return _save_and_load(None), _save_and_load(group), _load_what_rank_0_saved(group)


def test_a_saved_model_is_the_same_after_loading_it_on_the_same_ranks_and_only_there():
    ran = launch(_everything, 4)
    for rank, (of_all, in_group, _) in enumerate(ran):
        group = [0, 2] if rank % 2 == 0 else [1, 3]
        places = f"as rank {rank} of 4", f"on rank {rank} with a group of ranks {group}"
        for content, place in zip((of_all, in_group), places, strict=True):
            with pytest.raises(RuntimeError, match=re.escape("was pickled " + place)) as error:
                loaded(content)
            assert "save_sharded" in str(error.value)
    first, *others = (refused for _, _, refused in ran)
    assert first == ["no error"]
    assert_refused(others, "was pickled on rank 0 with a group of ranks [0, 2]")
