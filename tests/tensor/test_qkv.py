"""Fused queries, keys and values: `tensor.qkv`. Which p fit, first values, and copies of heads.

test_sharding.py says which rank has which heads, and test_attention.py compares outputs and gradients.
"""

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tplab import launch
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.full_state import full_state_dict
from tplab.tensor.qkv import QKVParallelLinear, heads_on_rank

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


# On four ranks


def _first_values_are_those_of_plain_linears():
    for num_kv_heads in (HEADS, 2):
        torch.manual_seed(11)
        qkv, out = nn.Linear(HIDDEN, (HEADS + 2 * num_kv_heads) * DIM), nn.Linear(HEADS * DIM, HIDDEN)
        afterwards = torch.rand(2)
        torch.manual_seed(11)
        state = full_state_dict(ParallelAttention(HIDDEN, HEADS, num_kv_heads))
        assert list(state) == ["qkv.weight", "qkv.bias", "out.weight", "out.bias"]
        assert all(map(torch.equal, state.values(), (qkv.weight, qkv.bias, out.weight, out.bias)))
        assert torch.equal(torch.rand(2), afterwards)


def _layers_share_one_process_group_for_each_number_of_copies():
    first, second = QKVParallelLinear(HIDDEN, HEADS, 2, DIM), QKVParallelLinear(HIDDEN, 4, 2, 4)
    twin = copy.deepcopy(nn.Sequential(first))[0]
    assert dist.get_process_group_ranks(first.copies_group) == ([0, 1] if dist.get_rank() < 2 else [2, 3])
    assert first.copies_group is second.copies_group is twin.copies_group
    assert QKVParallelLinear(HIDDEN, HEADS, 1, DIM).copies_group is dist.group.WORLD
    assert QKVParallelLinear(HIDDEN, HEADS, 4, DIM).copies_group is None


def _a_frozen_weight_gets_no_gradient_and_the_bias_keeps_its_own():
    layer = QKVParallelLinear(HIDDEN, HEADS, 1, DIM)
    layer.weight.requires_grad_(False)
    q, k, v = layer(torch.ones(1, 2, HIDDEN))
    (q.sum() + k.sum() + v.sum()).backward()
    assert layer.weight.grad is None
    expected = [2.0] * (HEADS // 4 * DIM) + [8.0] * (2 * DIM)  # k and v: of all ranks
    assert layer.bias.grad.tolist() == expected


def _on_four_ranks():
    _first_values_are_those_of_plain_linears()
    _layers_share_one_process_group_for_each_number_of_copies()
    _a_frozen_weight_gets_no_gradient_and_the_bias_keeps_its_own()


def test_first_values_are_those_of_plain_linears_and_layers_share_the_groups_of_copied_heads():
    launch(_on_four_ranks, 4)
