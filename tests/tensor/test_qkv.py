"""Fused queries, keys and values: `tensor.qkv`. Which rank has which heads, first values, copies of heads."""

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.tensor.on_ranks import assert_refused, refusals
from tplab import launch
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.qkv import QKVParallelLinear, heads_on_rank

WORLD_SIZES = (1, 2, 4)
HIDDEN, HEADS, DIM = 16, 8, 2


def fits(num_kv_heads, p):
    """Whether p ranks can share 12 heads: as many of Q on each, as many of K and V, and each of these as often."""
    if 12 % p:
        return False
    queries = [range(rank * 12 // p, (rank + 1) * 12 // p) for rank in range(p)]
    held = [{query * num_kv_heads // 12 for query in own} for own in queries]
    often = Counter(head for own in held for head in own)
    return len({len(own) for own in held}) == 1 and len(set(often.values())) == 1


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 6, 12])
def test_a_p_that_does_not_fit_is_refused_with_those_that_do(num_kv_heads):
    for p in range(1, 14):
        if fits(num_kv_heads, p):
            assert heads_on_rank(12, num_kv_heads, p) == (12 // p, max(1, num_kv_heads // p))
            continue
        with pytest.raises(ValueError) as error:
            heads_on_rank(12, num_kv_heads, p)
        name, which = ("num_heads=12", (1, 2, 3, 4, 6, 12))
        if 12 % p == 0:
            name, which = f"num_kv_heads={num_kv_heads}", [q for q in range(1, 13) if fits(num_kv_heads, q)]
        assert str(error.value).startswith(f"{name} can't be divided over {p} ranks")
        assert str(error.value).endswith(f"Use p in {', '.join(map(str, which))}.")


# Which head lives where: every head's rows hold its own number


def _numbered(num_heads, num_kv_heads):
    layer = QKVParallelLinear(3, num_heads, num_kv_heads, DIM)
    names = [*range(num_heads), *range(100, 100 + num_kv_heads), *range(200, 200 + num_kv_heads)]
    bias = torch.tensor(names, dtype=torch.float32).repeat_interleave(DIM)
    load_full_state_dict(layer, {"weight": torch.zeros(len(bias), 3), "bias": bias})
    return [part[0, :, 0, 0].int().tolist() for part in layer(torch.zeros(1, 1, 3))], layer.copies, str(layer)


def test_the_heads_of_k_and_v_live_where_their_queries_live():
    two = [heads for heads, _, _ in launch(_numbered, 2, args=(4, 2))]
    assert two == [[[0, 1], [100], [200]], [[2, 3], [101], [201]]]
    four = launch(_numbered, 4, args=(4, 2))
    assert [heads for heads, _, _ in four] == [
        [[0], [100], [200]], [[1], [100], [200]], [[2], [101], [201]], [[3], [101], [201]],
    ]  # fmt: skip
    assert [copies for _, copies, _ in four] == [2] * 4
    assert "2 copies of each K, V head, rank 3 of 4 holds [1, 1, 1] heads of 2" in four[3][2]
    assert launch(_numbered, 2, args=(0, 2))[1][0] == [[], [101], [201]]


# First values


def _initial(num_kv_heads, options):
    outcomes = []
    for option in options:
        torch.manual_seed(11)
        model = ParallelAttention(HIDDEN, HEADS, num_kv_heads, **option)
        outcomes.append((full_state_dict(model), torch.rand(2)))
    return outcomes


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("num_kv_heads", [HEADS, 2])
def test_the_first_values_are_those_of_plain_linears_with_the_same_seed_for_every_p(num_kv_heads, p):
    torch.manual_seed(11)
    qkv, out = nn.Linear(HIDDEN, (HEADS + 2 * num_kv_heads) * DIM), nn.Linear(HEADS * DIM, HIDDEN)
    afterwards = torch.rand(2)
    torch.manual_seed(11)
    filled = nn.init.xavier_normal_(torch.empty_like(qkv.weight)), nn.init.normal_(torch.empty_like(out.weight))
    options = [{}, {"init_method": nn.init.xavier_normal_, "output_init_method": nn.init.normal_}]
    for (state, rest), (other, _) in launch(_initial, p, args=(num_kv_heads, options)):
        assert list(state) == ["qkv.weight", "qkv.bias", "out.weight", "out.bias"]
        for name, plain in zip(state, (qkv.weight, qkv.bias, out.weight, out.bias), strict=True):
            assert torch.equal(state[name], plain)
        assert torch.equal(rest, afterwards)
        assert torch.equal(other["qkv.weight"], filled[0])
        assert torch.equal(other["out.weight"], filled[1])
        assert not other["qkv.bias"].any()
        assert not other["out.bias"].any()


def test_initialised_per_rank_copies_are_equal_and_all_else_differs():
    width = 64  # of one head: [64, 256] a block, so that the std is known to a percent
    options = {"per_rank_init": True, "head_dim": width, "bias": False, "init_method": nn.init.xavier_normal_}
    ranks = launch(_initial_wide, 4, args=(options,))
    blocks = [shards["qkv.weight"].split([2 * width, width, width]) for shards, _ in ranks]
    for rank, (q, k, v) in enumerate(blocks):
        assert torch.equal(k, blocks[rank // 2 * 2][1])
        assert torch.equal(v, blocks[rank // 2 * 2][2])
        assert not torch.isclose(k, v).all(1).any()
        std = (2 / (256 + 12 * width)) ** 0.5  # of the whole [Wq; Wk; Wv]
        assert abs(torch.cat([q, k, v]).std() / std - 1) < 0.03
        for other in range(rank):
            assert (q == blocks[other][0]).float().mean() < 0.001
    assert (blocks[0][1] == blocks[2][1]).float().mean() < 0.001
    assert all(torch.equal(rest, ranks[0][1]) for _, rest in ranks)


def _initial_wide(options):
    torch.manual_seed(11)
    model = ParallelAttention(256, HEADS, 2, **options)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.rand(2)


def _refused_without_the_whole_matrix():
    def make(attention_type, which):
        options = {"init_method": nn.init.normal_, which: nn.init.orthogonal_, "per_rank_init": True}
        return ParallelAttention(HIDDEN, HEADS, 2, attention_type=attention_type, **options)

    return refusals(
        lambda: make("self", "init_method"),
        lambda: make("self", "output_init_method"),
        lambda: make("cross", "init_method"),
        lambda: make("cross", "output_init_method"),
        lambda: QKVParallelLinear(HIDDEN, 0, 2, DIM, per_rank_init=True, init_method=nn.init.orthogonal_),
    )


def test_per_rank_init_reaches_all_layers():
    refused = ["per_rank_init can't draw a shard with this init_method"] * 5
    assert_refused(launch(_refused_without_the_whole_matrix, 2), *refused)


# Groups of copies, and misuse


def _groups():
    world = dist.group.WORLD
    first, second = QKVParallelLinear(HIDDEN, HEADS, 2, DIM), QKVParallelLinear(HIDDEN, 4, 2, 4)
    everyone = QKVParallelLinear(HIDDEN, HEADS, 1, DIM)
    nobody = QKVParallelLinear(HIDDEN, HEADS, 4, DIM)
    twin = copy.deepcopy(nn.Sequential(first))[0]
    return (
        dist.get_process_group_ranks(first.copies_group),
        first.copies_group is second.copies_group is twin.copies_group,
        everyone.copies_group is world,
        nobody.copies_group,
        twin.weight.tensor_parallel == first.weight.tensor_parallel,
    )


def test_layers_share_one_process_group_for_each_number_of_copies():
    results = launch(_groups, 4)
    assert [result[0] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(result[1:] == (True, True, None, True) for result in results)


def _frozen():
    layer = QKVParallelLinear(HIDDEN, HEADS, 1, DIM)
    layer.weight.requires_grad_(False)
    q, k, v = layer(torch.ones(1, 2, HIDDEN))
    (q.sum() + k.sum() + v.sum()).backward()
    overlap = [
        ParallelAttention(HIDDEN, HEADS, attention_type=kind, async_grad_allreduce=True) for kind in ("self", "cross")
    ]
    assert all(module.async_grad_allreduce for module in (overlap[0].qkv, overlap[1].q, overlap[1].kv))
    return layer.weight.grad, layer.bias.grad


def test_a_frozen_weight_gets_no_gradient_and_the_bias_keeps_its_own():
    for weight, bias in launch(_frozen, 2):
        assert weight is None
        expected = torch.tensor([2.0] * (HEADS // 2 * DIM) + [4.0] * (2 * DIM))  # k and v: of both ranks
        assert torch.equal(bias, expected)
