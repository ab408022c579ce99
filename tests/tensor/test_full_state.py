"""Whole checkpoints to shards and back: `tplab.tensor.full_state`."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.reference import random
from tests.tensor.on_ranks import GROUPS, assert_refused, assert_shards, on_ranks, own_group, refusals, results_of
from tplab import launch, record
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


def whole_state():
    norms = ("inner.1.weight", "inner.1.bias"), ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")
    shapes = {"inner.0.weight": (16, 4), "inner.0.bias": (16,), "row.weight": (4, 8), "row.bias": (4,)}
    shapes |= {name: (size,) for size, names in zip((16, 4), norms, strict=True) for name in names}
    state = {name: random(shape, name, dtype=torch.float32) for name, shape in shapes.items()}
    return {**state, "tied.weight": state["inner.0.weight"], "norm.num_batches_tracked": torch.tensor(5)}


def _load_and_gather(group):
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


@on_ranks
def test_every_rank_takes_its_shards_of_a_whole_state_and_gathers_it_again(p, in_groups):
    for results in results_of(_load_and_gather, p, in_groups):
        assert_loaded_and_gathered(results)


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


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1)])
def test_checkpoints_of_one_world_size_load_into_another(before, after):
    states = launch(_gather, before)[before - 1]
    assert states["heads of K and V that ranks share"]["qkv.weight"].shape == (16 + 4 + 4, 16)  # each head once
    assert states["a padded table"]["weight"].shape == (21, 6)  # no padding
    for loaded in launch(_load, after, args=(states,)):
        for name, state in states.items():
            assert_shards([loaded[name]], state, {}, tolerance=0)


def _over_wrong_groups():
    group, layer = own_group(), ColumnParallelLinear(4, 8)
    in_group, full = ColumnParallelLinear(4, 8, group=group), {"weight": torch.ones(8, 4), "bias": torch.ones(8)}
    alone = nn.Sequential(
        ColumnParallelLinear(4, 8, group=dist.new_group([dist.get_rank()], use_local_synchronization=True))
    )
    with record() as sent:
        messages = refusals(
            lambda: full_state_dict(layer, group),
            lambda: full_state_dict(in_group),
            lambda: load_full_state_dict(in_group, full),
            lambda: full_state_dict(alone),
            lambda: init_parameter(in_group.weight, nn.init.normal_),
        )
    return messages, list(sent)


def test_the_wrong_group_is_refused_before_anything_is_sent():
    for rank, (messages, sent) in enumerate(launch(_over_wrong_groups, 4)):
        own = list(GROUPS[rank % 2])
        in_group = f"weight [4, 4] has its shards on ranks {own}, but group=None means ranks [0, 1, 2, 3]. Pass the"
        assert_refused(
            [messages],
            f"weight [2, 4] has its shards on ranks [0, 1, 2, 3], but the given group means ranks {own}. Pass the",
            in_group,
            in_group,
            f"0.weight [8, 4] has its shards on ranks [{rank}], but group=None means ranks [0, 1, 2, 3]",
            "the parameter [4, 4] has its shards on ranks",
        )
        assert not sent


def _fully_sharded():
    """Two groups of two ranks for tensor parallelism; FSDP2 splits each shard again, over the other two pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("tp")
    models = {}
    for name, make in FULLY_SHARDED.items():
        models[name] = model = make(group)
        load_full_state_dict(model, fully_sharded_state(name), group)
        fully_shard(model, mesh=mesh["dp"])
    gathered = {name: full_state_dict(model, group) for name, model in models.items()}
    for name, model in models.items():
        load_full_state_dict(model, {n: 2 * tensor for n, tensor in fully_sharded_state(name).items()}, group)
    twice = {name: full_state_dict(model, group) for name, model in models.items()}
    fully_shard(other := ColumnParallelLinear(8, 8, group=group), mesh=init_device_mesh("cpu", (4,)))
    return gathered, twice, refusals(lambda: full_state_dict(other, group))


FULLY_SHARDED = {
    "fused": lambda group: nn.Sequential(ColumnParallelLinear(4, 16, stride=2, group=group), nn.LayerNorm(16)),
    "row": lambda group: RowParallelLinear(8, 6, group=group),
    "padded": lambda group: VocabParallelEmbedding(21, 6, multiple=3, group=group),
}


def fully_sharded_state(name):
    shapes = {"fused": {"0.weight": (16, 4), "0.bias": (16,), "1.weight": (16,), "1.bias": (16,)}}
    shapes |= {"row": {"weight": (6, 8), "bias": (6,)}, "padded": {"weight": (21, 6)}}
    return {n: random(shape, name, n, dtype=torch.float32) for n, shape in shapes[name].items()}


def test_shards_that_fsdp_splits_again_are_gathered_and_loaded_like_others():
    for gathered, twice, messages in launch(_fully_sharded, 4):
        for name in FULLY_SHARDED:
            for n, tensor in fully_sharded_state(name).items():
                assert type(gathered[name][n]) is torch.Tensor
                assert torch.equal(gathered[name][n], tensor)
                assert torch.equal(twice[name][n], 2 * tensor)
        assert "weight is a DTensor on ranks [0, 1, 2, 3], and its tensor-parallel shards are on ranks" in messages[0]


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
