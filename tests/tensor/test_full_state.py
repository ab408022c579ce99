"""Whole checkpoints to shards and back: `tplab.tensor.full_state`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.reference import cut, random
from tplab import launch, record
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
    shapes = {
        "inner.0.weight": (16, 4),
        "inner.0.bias": (16,),
        "inner.1.weight": (16,),
        "inner.1.bias": (16,),
        "row.weight": (4, 8),
        "row.bias": (4,),
        "norm.weight": (4,),
        "norm.bias": (4,),
        "norm.running_mean": (4,),
        "norm.running_var": (4,),
    }
    state = {name: random(shape, name, dtype=torch.float32) for name, shape in shapes.items()}
    return {**state, "tied.weight": state["inner.0.weight"], "norm.num_batches_tracked": torch.tensor(5)}


def _load_and_gather(groups=None):
    group = None
    if groups is not None:
        group = [dist.new_group(members) for members in groups][dist.get_rank() % 2]
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
    calls = [c.kind for c in gathering]
    return full_state_dict(model, group), shards, len(loading), calls, untouched


def assert_loaded_and_gathered(results):
    state, p = whole_state(), len(results)
    cuts = {"inner.0.weight": (0, 2), "inner.0.bias": (0, 2), "row.weight": (1, 1), "tied.weight": (0, 2)}
    for rank, (gathered, shards, loading, gathering, untouched) in enumerate(results):
        assert set(gathered) == set(shards) == set(state)
        for name, whole in state.items():
            assert torch.equal(gathered[name], whole), name
            dim, stride = cuts.get(name, (0, 1))
            expected = cut(whole, dim, rank, p, stride) if name in cuts else whole
            assert torch.equal(shards[name], expected), name
        assert loading == 0
        assert gathering == (["all_gather"] * 4 if p > 1 else [])
        assert untouched


@pytest.mark.parametrize("p", [1, 2, 4])
def test_every_rank_takes_its_shards_of_a_whole_state_and_gathers_it_again(p):
    results = launch(_load_and_gather, p)
    assert len(results) == p
    assert_loaded_and_gathered(results)


def test_each_group_gathers_its_own():
    results = launch(_load_and_gather, 4, args=([[0, 2], [1, 3]],))
    assert_loaded_and_gathered([results[0], results[2]])
    assert_loaded_and_gathered([results[1], results[3]])


def test_it_works_without_a_process_group():
    assert_loaded_and_gathered([_load_and_gather()])


def _gather():
    torch.manual_seed(3)
    return full_state_dict(Model())


def _load(state):
    model = Model()
    load_full_state_dict(model, state)
    return full_state_dict(model)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (1, 4), (2, 1)])
def test_a_checkpoint_of_one_world_size_loads_into_another(before, after):
    state = launch(_gather, before)[0]
    for loaded in launch(_load, after, args=(state,)):
        assert all(torch.equal(loaded[name], state[name]) for name in state)


def _refusals():
    model, state = Model(), whole_state()
    shard_given = {**state, "row.weight": state["row.weight"][:, :4]}
    missing = {name: tensor for name, tensor in state.items() if name != "row.bias"}
    unexpected = {**state, "column.weight": torch.ones(3)}
    messages = []
    for wrong in (shard_given, missing, unexpected):
        try:
            load_full_state_dict(model, wrong)
            messages.append("no error")
        except (ValueError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    load_full_state_dict(model, unexpected, strict=False)
    return messages


def test_a_shard_in_place_of_the_whole_and_wrong_names_are_refused():
    for shard_given, missing, unexpected in launch(_refusals, 2):
        assert "ValueError: row.weight needs the whole tensor [4, 8]" in shard_given
        assert "each of 2 ranks takes [4, 4]; got [4, 4]" in shard_given
        assert 'Missing key(s) in state_dict: "row.bias"' in missing
        assert 'Unexpected key(s) in state_dict: "column.weight"' in unexpected
