"""Whole checkpoints to shards and back: `tplab.tensor.full_state`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.reference import cut, random
from tests.tensor.on_ranks import GROUPS, assert_refuses, everywhere, own_group
from tplab import record
from tplab.collectives.by_hand import rank_and_size
from tplab.plain import Attention
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.embedding import VocabParallelEmbedding
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.initialization import init_parameter
from tplab.tensor.linear import ColumnParallelLinear, RowParallelLinear


class Model(nn.Module):
    """Shards of both dims and of stride 2, replicated parameters, buffers, and a tied weight."""

    def __init__(self, group=None):
        super().__init__()
        self.inner = nn.Sequential(ColumnParallelLinear(4, 16, stride=2, group=group), nn.LayerNorm(16))
        self.row = RowParallelLinear(8, 4, group=group)
        self.tied = ColumnParallelLinear(4, 16, False, stride=2, group=group)
        self.tied.weight = self.inner[0].weight
        self.norm = nn.BatchNorm1d(4)  # has buffers, an integer among them


class Plain(nn.Module):
    """The same in plain torch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16))
        self.row, self.tied = nn.Linear(8, 4), nn.Linear(4, 16, False)
        self.tied.weight = self.inner[0].weight
        self.norm = nn.BatchNorm1d(4)


CUTS = {"inner.0.weight": (0, 2), "inner.0.bias": (0, 2), "row.weight": (1, 1), "tied.weight": (0, 2)}
TWINS = [  # ranks share heads of K and V, of which the whole has one each; the whole table has no padding
    (Plain, Model),
    (lambda: Attention(16, 8, 2), lambda group: ParallelAttention(16, 8, 2, group=group)),
    (lambda: nn.Embedding(21, 6), lambda group: VocabParallelEmbedding(21, 6, multiple=8, group=group)),
]


def random_state(module):
    state = {name: random(tuple(t.shape), name).to(t.dtype) for name, t in module.state_dict().items()}
    return state | ({"tied.weight": state["inner.0.weight"]} if "tied.weight" in state else {})


def assert_same(state, expected):
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def _load_and_gather(group):
    rank, p = rank_and_size(group)
    for make_plain, make in TWINS:
        model, state = make(group), random_state(make_plain())
        before = {name: tensor.clone() for name, tensor in state.items()}
        with record() as loading:
            load_full_state_dict(model, state, group)
        assert_same(state, before)
        assert not loading
        if make is Model:
            shards = {name: cut(state[name], dim, rank, p, stride) for name, (dim, stride) in CUTS.items()}
            assert_same(model.state_dict(), state | shards)
        with record() as gathering:
            gathered = full_state_dict(model, group)
        assert_same(gathered, state)
        sharded = sum(hasattr(t, "tensor_parallel") for t in model.state_dict(keep_vars=True).values())
        assert [c.kind for c in gathering] == ["all_gather"] * (sharded if p > 1 else 0)
        for tensor in gathered.values():
            tensor.zero_()  # must not reach the model
        assert_same(full_state_dict(model, group), state)


def _refuse():
    """The wrong group, before anything is sent, and a shard in place of the whole tensor."""
    group, layer, own = own_group(), ColumnParallelLinear(4, 8), list(GROUPS[dist.get_rank() % 2])
    in_group, full = ColumnParallelLinear(4, 8, group=group), {"weight": torch.ones(8, 4), "bias": torch.ones(8)}
    ours, everyone = f"ranks {own}", "ranks [0, 1, 2, 3]"
    model, state = Model(), random_state(Plain())
    shard_given = {**state, "row.weight": state["row.weight"][:, :4]}
    with record() as sent:
        assert_refuses(
            (lambda: full_state_dict(layer, group), "weight [2, 4]", everyone, ours),
            (lambda: full_state_dict(in_group), "weight [4, 4]", ours, "group=None", everyone),
            (lambda: load_full_state_dict(in_group, full), ours, "group=None", everyone),
            (lambda: init_parameter(in_group.weight, nn.init.normal_), "[4, 4]", ours, everyone),
            (lambda: load_full_state_dict(model, shard_given), "row.weight", "[4, 8]", "4 ranks", "[4, 2]", "[4, 4]"),
        )
    assert not sent
    with pytest.raises(RuntimeError, match="Missing key"):
        load_full_state_dict(model, {name: tensor for name, tensor in state.items() if name != "row.bias"})


def _everything(group):
    _load_and_gather(group)
    if group is None and rank_and_size()[1] == 4:
        _refuse()


def test_every_rank_takes_its_shards_of_a_plain_state_and_gathers_it_again_whatever_p():
    everywhere(_everything)
