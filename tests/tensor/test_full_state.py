"""Whole checkpoints to shards and back: `tplab.tensor.full_state`."""

from functools import partial

import pytest
import torch
from torch import nn

from tests.reference import random
from tests.tensor.on_ranks import GROUPS, assert_refused, assert_shards, own_group, refusals
from tplab import launch, record
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.embedding import VocabParallelEmbedding
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
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


def whole_state():
    norms = ("inner.1.weight", "inner.1.bias"), ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")
    shapes = {"inner.0.weight": (16, 4), "inner.0.bias": (16,), "row.weight": (4, 8), "row.bias": (4,)}
    shapes |= {name: (size,) for size, names in zip((16, 4), norms, strict=True) for name in names}
    state = {name: random(shape, name, dtype=torch.float32) for name, shape in shapes.items()}
    return {**state, "tied.weight": state["inner.0.weight"], "norm.num_batches_tracked": torch.tensor(5)}


def _load_and_gather(in_groups=False):
    group = own_group() if in_groups else None
    model, state = Model(group), whole_state()
    before = {name: tensor.clone() for name, tensor in state.items()}
    with record() as loading:
        load_full_state_dict(model, state, group)
    assert all(torch.equal(state[name], before[name]) for name in state)
    with record() as gathering:
        gathered = full_state_dict(model, group)
    shards = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for tensor in gathered.values():
        tensor.zero_()  # must not reach the model
    untouched = all(torch.equal(tensor, shards[name]) for name, tensor in model.state_dict().items())
    assert untouched
    assert not loading
    return full_state_dict(model, group), shards, [c.kind for c in gathering]


def assert_loaded_and_gathered(results):
    cuts = {"inner.0.weight": (0, 2), "inner.0.bias": (0, 2), "row.weight": (1, 1), "tied.weight": (0, 2)}
    assert_shards([gathered for gathered, _, _ in results], whole_state(), {}, tolerance=0)
    assert_shards([shards for _, shards, _ in results], whole_state(), cuts, tolerance=0)
    assert all(calls == (["all_gather"] * 4 if len(results) > 1 else []) for *_, calls in results)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_every_rank_takes_its_shards_of_a_whole_state_and_gathers_it_again(p):
    results = launch(_load_and_gather, p)
    assert len(results) == p
    assert_loaded_and_gathered(results)


def test_each_group_gathers_its_own():
    results = launch(_load_and_gather, 4, args=(True,))
    for members in GROUPS:
        assert_loaded_and_gathered([results[rank] for rank in members])


def test_it_works_without_a_process_group():
    assert_loaded_and_gathered([_load_and_gather()])


MODELS = {
    "shards of all kinds": Model,
    "heads of K and V that ranks share": lambda: ParallelAttention(16, 8, 2),
    "a padded table": lambda: VocabParallelEmbedding(21, 6, multiple=8),
}


def _gather():
    torch.manual_seed(3)
    return {name: full_state_dict(make()) for name, make in MODELS.items()}


def _load(states):
    models = {name: make() for name, make in MODELS.items()}
    for name, model in models.items():
        load_full_state_dict(model, states[name])
    return {name: full_state_dict(model) for name, model in models.items()}


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (1, 4), (2, 1), (4, 1)])
def test_checkpoints_of_one_world_size_load_into_another(before, after):
    states = launch(_gather, before)[before - 1]
    assert states["heads of K and V that ranks share"]["qkv.weight"].shape == (16 + 4 + 4, 16)  # each head once
    assert states["a padded table"]["weight"].shape == (21, 6)  # no padding
    for loaded in launch(_load, after, args=(states,)):
        for name, state in states.items():
            assert_shards([loaded[name]], state, {}, tolerance=0)


def _refusals():
    model, state = Model(), whole_state()
    shard_given = {**state, "row.weight": state["row.weight"][:, :4]}
    missing = {name: tensor for name, tensor in state.items() if name != "row.bias"}
    unexpected = {**state, "column.weight": torch.ones(3)}
    load_full_state_dict(model, unexpected, strict=False)
    messages = refusals(lambda: load_full_state_dict(model, shard_given))
    wrong_names = (partial(load_full_state_dict, model, state) for state in (missing, unexpected))
    return messages + refusals(*wrong_names, kind=RuntimeError)


def test_a_shard_in_place_of_the_whole_and_wrong_names_are_refused():
    assert_refused(
        launch(_refusals, 2),
        "row.weight needs the whole tensor [4, 8], of which each of 2 ranks takes [4, 4]; got [4, 4]",
        'Missing key(s) in state_dict: "row.bias"',
        'Unexpected key(s) in state_dict: "column.weight"',
    )
