"""Which part of a tensor is whose: `tplab.tensor.sharding`, against torch.chunk."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.reference import cut, random
from tests.tensor.on_ranks import GROUPS, assert_refuses, own_group
from tplab import launch
from tplab.tensor.sharding import (
    Block,
    ShardedModule,
    Sharding,
    divide,
    shard,
    shard_range,
    shard_ranks,
    unshard,
)


def test_shards_are_the_parts_of_each_block_and_unshard_undoes_them():
    whole = random((24, 48, 72), "whole")
    for dim, stride, p in itertools.product([0, 1, 2, -1, -3], [1, 2, 3], [1, 2, 4]):
        sharding, shards = Sharding(dim, stride), [shard(whole, dim, rank, p, stride=stride) for rank in range(p)]
        for rank, part in enumerate(shards):
            assert torch.equal(part, cut(whole, dim, rank, p, stride))
            assert torch.equal(sharding.shard(whole, rank, p), part)
            assert sharding.whole_shape(part.shape, p) == [24, 48, 72]
        assert torch.equal(unshard(shards, dim, stride=stride), whole)
        assert torch.equal(sharding.unshard(shards), whole)


def test_tensors_of_any_layout_are_cut_by_what_they_hold():
    base = random((8, 12), "layout")
    wholes = base.T, base[:, ::3], base[:1].expand(4, 12), base[0].expand(8, 12)
    for whole, rank, stride in itertools.product(wholes, range(2), (1, 2)):
        assert torch.equal(shard(whole, 1, rank, 2, stride=stride), cut(whole, 1, rank, 2, stride))


def test_a_shard_is_contiguous_and_shares_no_memory_with_the_whole():
    whole = random((8, 8), "memory")
    before = whole.clone()
    for dim, p in itertools.product((0, 1), (1, 4)):
        part = shard(whole, dim, 0, p)
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.nbytes  # a view would keep all of the whole alive
        part.zero_()
        assert torch.equal(whole, before)


class Half(ShardedModule):
    """A module with a shard, a replicated parameter and an absent one."""

    def __init__(self, group=None):
        super().__init__(group)
        self.register_shard("weight", nn.Parameter(torch.ones(2, 6)), Sharding(1, 3))
        self.scale = nn.Parameter(torch.ones(2))
        self.register_parameter("bias", None)


def _assign(module):
    module.load_state_dict({"weight": torch.zeros(2, 6), "scale": torch.zeros(2)}, assign=True)
    return module


def _tie(module):
    module.weight = nn.Parameter(torch.zeros(2, 6))
    return module


CHANGES = {
    "nothing": lambda module: module,
    "deepcopy": copy.deepcopy,
    "deepcopy of a container": lambda module: copy.deepcopy(nn.ModuleList([module]))[0],
    "double": lambda module: module.double(),
    "to_empty": lambda module: module.to("meta").to_empty(device="cpu"),
    "assign": _assign,
    "tie": _tie,
}


def _ranks_in_groups():
    group, own = own_group(), GROUPS[dist.get_rank() % 2]
    for name, change in CHANGES.items():
        module = change(Half(group))
        assert module.weight.tensor_parallel == Sharding(dim=1, stride=3), name
        assert shard_ranks(module.weight) == tuple(own), name
        assert not hasattr(module.scale, "tensor_parallel"), name
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    own_layer = nn.Linear(2, 2)
    own_layer.weight.tensor_parallel = Sharding(0)
    others = [shard_ranks(other.weight) for other in (Half(), Half(alone), own_layer, nn.Linear(2, 2))]
    assert others == [(0, 1, 2, 3), (dist.get_rank(),), None, None]  # unknown without a group, none if replicated


def test_a_sharded_parameter_says_so_and_knows_the_ranks_that_have_its_shards_whatever_is_done_to_its_module():
    launch(_ranks_in_groups, 4)


# Blocks of different sizes, in units that stay whole

# 4 heads of Q, 2 of K and of V, 3 rows each; which of them every rank holds, written down by hand
QKV = Sharding(0, blocks=(Block(12, 3), Block(6, 3), Block(6, 3)))
HELD = {
    1: ["q0 q1 q2 q3 k0 k1 v0 v1"],
    2: ["q0 q1 k0 v0", "q2 q3 k1 v1"],
    4: ["q0 k0 v0", "q1 k0 v0", "q2 k1 v1", "q3 k1 v1"],
}


@pytest.mark.parametrize("p", HELD)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_each_block_is_cut_into_whole_units_and_shared_where_there_are_fewer_than_ranks(dim, p):
    heads = {name: random((3, 5), name).movedim(0, dim) for name in HELD[1][0].split()}
    whole = torch.cat(list(heads.values()), dim)
    before = whole.clone()
    sharding = Sharding(dim, blocks=QKV.blocks)
    shards = [sharding.shard(whole, rank, p) for rank in range(p)]
    for part, held in zip(shards, HELD[p], strict=True):
        assert torch.equal(part, torch.cat([heads[name] for name in held.split()], dim))
        assert part.is_contiguous()
        assert sharding.whole_shape(part.shape, p) == list(whole.shape)
    assert torch.equal(sharding.unshard(shards), whole)
    shards[0].zero_()
    assert torch.equal(whole, before)


@pytest.mark.parametrize(("p", "unit", "rows"), [(1, 1, 7), (2, 1, 8), (4, 1, 8), (1, 3, 9), (2, 3, 12), (4, 3, 12)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_zeros_fill_a_padded_block_up_and_are_in_the_shards_only(dim, p, unit, rows):
    whole = random((5, 5), "padded", dim).index_select(dim, torch.tensor([0, 1, 2, 3, 4, 0, 1]))  # 7 along dim
    sharding = Sharding(dim, blocks=(Block(7, unit, padded=True),))
    shards = [sharding.shard(whole, rank, p) for rank in range(p)]
    zeros = whole.new_zeros(rows - 7, 5)
    expected = torch.cat([whole, zeros if dim == 0 else zeros.T], dim)
    assert all(torch.equal(part, want) for part, want in zip(shards, expected.chunk(p, dim), strict=True))
    assert torch.equal(sharding.unshard(shards), whole)
    assert sharding.whole_shape(shards[0].shape, p) == list(whole.shape)
    assert sharding.blocks[0].copies(p) == 1


def test_what_cannot_be_cut_is_refused_with_the_numbers_and_what_would_work():
    heads = ("num_heads=12", "8 ranks", "heads", "1, 2, 3, 4, 6, 12")
    assert_refuses(
        (lambda: divide(12, 8, name="num_heads", unit="heads"), *heads),
        (lambda: shard_range(12, -1, 4), "rank=-1", "4 ranks", " 0 ", " 3"),
        (lambda: shard(torch.ones(12, 4), 0, 0, 4, stride=2), "size=6", "4 ranks"),
        (lambda: shard(torch.ones(9, 4), 0, 0, 1, stride=2), " 9 ", "stride=2"),
        (lambda: unshard([torch.ones(2, 4), torch.ones(3, 4)], 0), "[(2, 4), (3, 4)]"),
        (lambda: Block(24, 4).copies(4), "6 units of 4", "4 ranks"),
        (lambda: QKV.shard(torch.ones(12, 2), 0, 2), "[12, 6, 6]", " 24 ", " 12"),
    )
