"""ParallelAttention and its cache: `tplab.tensor.attention`, `qkv` and `kv_cache`, against `tplab.plain.Attention`.

test_sharding.py says which heads a rank holds, so that here each layer may say it itself.
"""

import copy
import itertools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.reference import assert_close, random
from tests.tensor.on_ranks import assert_refuses, assert_trains_like, everywhere, traffic, with_random_weights
from tplab import record
from tplab.collectives.by_hand import rank_and_size
from tplab.plain import Attention
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.kv_cache import KVCache
from tplab.tensor.qkv import QKVParallelLinear, heads_on_rank

HIDDEN, HEADS = 16, 8
BATCH, SEQUENCE, MEMORY = 2, 5, 7
BASE = 100.0  # of rotary positions: small, so that five positions turn all pairs


def inputs(case, step):
    """All that the model is given, and the gradient of its output."""
    b, s, t = case.get("sizes", (BATCH, SEQUENCE, MEMORY))
    cross = case.get("attention_type") == "cross"
    x = random((b, s, HIDDEN), "x", step)
    if case.get("strided"):
        x = random((s, b, 2 * HIDDEN), "x", step)[..., ::2].transpose(0, 1)
    given = {"x": x}
    if cross:
        given["memory"] = random((b, t, HIDDEN), "memory", step)
    keys = t if cross else s
    if case.get("padding"):  # on the right: the first key is never padding, so that each query sees something
        given["key_padding_mask"] = torch.arange(keys) >= torch.arange(keys - b + 1, keys + 1)[:, None]
    dy = random((b, s, HIDDEN), "dy", step)
    return given, dy.transpose(0, 1).contiguous().transpose(0, 1) if case.get("strided") else dy


# name -> options of both, and of the inputs
MODEL_OPTIONS = ("kv_heads", "head_dim", "bias", "causal", "rotary_base", "attention_type")
CASES = {
    "plain": {},
    "causal without bias": {"causal": True, "bias": False},
    "4 kv heads, rotary": {"kv_heads": 4, "head_dim": 6, "causal": True, "rotary_base": BASE},
    "1 kv head, rotary, padding and causal": {
        "kv_heads": 1, "head_dim": 4, "rotary_base": BASE, "padding": True, "causal": True,
    },
    "2 kv heads, rotary": {"kv_heads": 2, "rotary_base": BASE, "causal": True},
    "1 kv head without bias": {"kv_heads": 1, "bias": False},
    "padding and causal": {"causal": True, "padding": True},
    "cross": {"attention_type": "cross"},
    "cross, 2 kv heads, padding": {"attention_type": "cross", "kv_heads": 2, "head_dim": 6, "padding": True},
    "cross, without bias": {"attention_type": "cross", "bias": False},
    "strided inputs": {"strided": True, "kv_heads": 2, "causal": True},
    "no texts": {"sizes": (0, 5, 7), "kv_heads": 1, "causal": True},
    "no tokens": {"sizes": (2, 0, 7), "kv_heads": 1, "causal": True, "rotary_base": BASE},
    "overlap": {"async": True, "kv_heads": 2, "causal": True},
    "bias apart": {"split_bias": True, "causal": True},
}  # fmt: skip


def options_of(case):
    options = {key: case[key] for key in MODEL_OPTIONS if key in case}
    return (options.pop("kv_heads", None), options.pop("head_dim", None)), options


def make_plain(case):
    heads, options = options_of(case)
    return with_random_weights(Attention(HIDDEN, HEADS, *heads, **options, dtype=torch.float64))


def make(case, group=None):
    heads, options = options_of(case)
    options |= {"skip_bias_add": case.get("split_bias", False), "async_grad_allreduce": case.get("async", False)}
    model = ParallelAttention(HIDDEN, HEADS, *heads, **options, group=group, dtype=torch.float64)
    load_full_state_dict(model, make_plain(case).state_dict(), group)
    return model


def expected_traffic(case, group):
    rank, p = rank_and_size(group)
    if p == 1:
        return [[], []]
    b, s, t = case.get("sizes", (BATCH, SEQUENCE, MEMORY))
    cross, kv_heads, d = case.get("attention_type") == "cross", case.get("kv_heads", HEADS), case.get("head_dim", 2)
    members = tuple(dist.get_process_group_ranks(group))
    backward = [b * s * HIDDEN] + [b * t * HIDDEN] * cross
    calls = [("all_reduce", 8 * n, "sum", members) for n in backward]
    if p > kv_heads:  # gradients of one head of K and one of V, over the ranks that hold it
        count = p // kv_heads
        copies = members[rank // count * count :][:count]
        sizes = [2 * d * HIDDEN] + [2 * d] * case.get("bias", True)
        calls += [("all_reduce", 8 * n, "sum", copies) for n in sizes]
    return [[("all_reduce", 8 * b * s * HIDDEN, "sum", members)], sorted(calls)]


def assert_equals_plain(name, group):
    """Return the first step's traffic."""

    def read(*sections):
        return [sorted((c.kind, c.bytes, c.op, c.group) for c in section) for section in sections]

    case = CASES[name]
    return assert_trains_like(
        make_plain(case), make(case, group), [inputs(case, step) for step in (0, 1)], group,
        split_bias=case.get("split_bias", False), read=read, lr=0.05, momentum=0.9,
    )  # fmt: skip


# Generation

LENGTH = 7
PARTS = (3, 1, 2, 1)  # a prompt, a token, two at once, a token
GENERATING = (
    {"causal": True},
    {"kv_heads": 4, "causal": True, "rotary_base": BASE},
    {"kv_heads": 2, "head_dim": 6, "causal": True, "rotary_base": BASE},
    {"kv_heads": 1, "causal": True},
)


@torch.no_grad()
def _generate(case, padded, group):
    """A text in pieces gives what the full text gives, and each rank caches its own heads."""
    model, x = make(case, group), random((BATCH, LENGTH, HIDDEN), "text")
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, 1:3] = padded  # within the prompt; every query still sees token 0
    cache = model.new_cache(BATCH, LENGTH + 2)
    place, parts, start = cache.keys.untyped_storage().data_ptr(), [], 0
    with record() as section:
        for step in PARTS:
            stop = start + step
            mask = {"key_padding_mask": padding[:, :stop]} if padded else {}
            parts.append(model(x[:, start:stop], cache=cache, **mask))
            start = stop
    assert_close(torch.cat(parts, 1), make_plain(case)(x, key_padding_mask=padding))
    p = rank_and_size(group)[1]
    assert traffic(section)[0] == [("all_reduce", "sum", BATCH * step * HIDDEN * 8) for step in PARTS if p > 1]
    heads, d = max(1, case.get("kv_heads", HEADS) // p), case.get("head_dim", 2)
    assert cache.keys.shape == (BATCH, heads, LENGTH, d)
    assert cache.keys.untyped_storage().data_ptr() == place  # written in place: nothing was copied
    assert cache.nbytes == 2 * BATCH * heads * (LENGTH + 2) * d * 8


def test_keys_and_values_are_kept_apart_in_the_dtype_of_the_weights():
    cache = KVCache(1, 1, 5, 2)
    for token in range(3):
        keys, values = cache.append(torch.full((1, 1, 1, 2), token + 1.0), torch.full((1, 1, 1, 2), -token - 1.0))
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3]
    assert values[0, 0, :, 0].tolist() == [-1, -2, -3]
    assert ParallelAttention(HIDDEN, HEADS, dtype=torch.bfloat16).new_cache(1, 4).keys.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, t: (c.append(t, t), c.append(t, t)), r"3 tokens are cached, and 3 more don't fit into max_length=5"),
        (lambda c, t: c.append(t[:1], t[:1]), r"takes keys and values \[2, 4, 3, 6\], got \[1, 4, 3, 6\]"),
        (lambda c, t: c.append(t, t[:, :, :2]), r"\[2, 4, 3, 6\] and \[2, 4, 2, 6\]"),
    ],
)
def test_what_does_not_fit_into_a_cache_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(KVCache(2, 4, 5, 6), torch.ones(2, 4, 3, 6))


def test_a_cache_in_a_graph_is_refused():
    model = ParallelAttention(HIDDEN, HEADS, causal=True)
    with pytest.raises(RuntimeError, match="use it under torch.no_grad"):
        model(torch.ones(1, 2, HIDDEN), cache=model.new_cache(1, 4))


# What is refused


def layer(**options):
    return ParallelAttention(16, 8, **options)


def self_attention(*args, **options):
    return ParallelAttention(16, 8)(*args, **options)


def cross(*args):
    return ParallelAttention(16, 8, attention_type="cross")(*args)


X = torch.ones(2, 3, 16)


def _refuse():
    """What can't be is refused with the numbers and what would work."""
    kv_heads = "num_kv_heads=6 can't be divided over 4 ranks, nor copied to them evenly. Use p in 1, 2, 3, 6, 12."
    heads = "num_heads=6 can't be divided over 4 ranks: each rank takes whole heads, and as many as any other. Use p in"
    positions = "cross-attention has no causal mask and no rotary positions"
    assert_refuses(
        (lambda: ParallelAttention(24, 12, 6), kv_heads),
        (lambda: ParallelAttention(24, 6), heads),
        (lambda: ParallelAttention(16, 8, 3), "num_heads=8 can't share num_kv_heads=3 evenly"),
        (lambda: ParallelAttention(16, 8, 0), "num_heads=8 can't share num_kv_heads=0 evenly"),
        (lambda: ParallelAttention(16, 0), "num_heads=0 can't share num_kv_heads=0 evenly"),
        (lambda: ParallelAttention(20, 8), "hidden_size=20 can't be divided into num_heads=8 heads of one size"),
        (lambda: layer(attention_type="flash"), "attention_type='flash' is not 'self' or 'cross'"),
        (lambda: layer(attention_type="cross", causal=True), positions),
        (lambda: layer(attention_type="cross", rotary_base=1e4), positions),
        (lambda: layer(dropout=1.0), "dropout=1.0 should be in [0, 1)"),
        (lambda: ParallelAttention(24, 8, rotary_base=1e4)(torch.ones(1, 2, 24)), "head_dim=3 is odd"),
        (lambda: self_attention(X[0]), "x [3, 16] should be [b, s, 16]"),
        (lambda: self_attention(X[..., :8]), "x [2, 3, 8] should be [b, s, 16]"),
        (lambda: self_attention(X, X), "self-attention has no memory"),
        (lambda: cross(X), "cross-attention needs its memory in every call, and has no cache"),
        (lambda: cross(X, X[..., :8]), "memory [2, 3, 8] should be [b, s, 16]"),
        (lambda: self_attention(X, key_padding_mask=torch.ones(2, 3)), "should be bool [2, 3], True for padding, got"),
        (lambda: self_attention(X, key_padding_mask=torch.ones(3, 2).bool()), "got torch.bool [3, 2]"),
    )


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


# Fused queries, keys and values, on four ranks


def _first_values_are_those_of_plain_linears():
    for num_kv_heads in (HEADS, 2):
        torch.manual_seed(11)
        qkv, out = nn.Linear(HIDDEN, (HEADS + 2 * num_kv_heads) * 2), nn.Linear(HEADS * 2, HIDDEN)
        afterwards = torch.rand(2)
        torch.manual_seed(11)
        state = full_state_dict(ParallelAttention(HIDDEN, HEADS, num_kv_heads))
        assert list(state) == ["qkv.weight", "qkv.bias", "out.weight", "out.bias"]
        assert all(map(torch.equal, state.values(), (qkv.weight, qkv.bias, out.weight, out.bias)))
        assert torch.equal(torch.rand(2), afterwards)


def _layers_share_one_process_group_for_each_number_of_copies():
    first, second = QKVParallelLinear(HIDDEN, HEADS, 2, 2), QKVParallelLinear(HIDDEN, 4, 2, 4)
    twin = copy.deepcopy(nn.Sequential(first))[0]
    assert dist.get_process_group_ranks(first.copies_group) == ([0, 1] if dist.get_rank() < 2 else [2, 3])
    assert first.copies_group is second.copies_group is twin.copies_group
    assert QKVParallelLinear(HIDDEN, HEADS, 1, 2).copies_group is dist.group.WORLD
    assert QKVParallelLinear(HIDDEN, HEADS, 4, 2).copies_group is None


def _a_frozen_weight_gets_no_gradient_and_the_bias_keeps_its_own():
    layer = QKVParallelLinear(HIDDEN, HEADS, 1, 2)
    layer.weight.requires_grad_(False)
    q, k, v = layer(torch.ones(1, 2, HIDDEN))
    (q.sum() + k.sum() + v.sum()).backward()
    assert layer.weight.grad is None
    expected = [2.0] * (HEADS // 4 * 2) + [8.0] * (2 * 2)  # k and v: of all ranks
    assert layer.bias.grad.tolist() == expected


def _everything(group):
    for name, case in CASES.items():
        assert assert_equals_plain(name, group) == expected_traffic(case, group), name
    for case, padded in itertools.product(GENERATING, (False, True)):
        _generate(case, padded, group)
    if group is None and rank_and_size()[1] == 4:
        _refuse()
        _first_values_are_those_of_plain_linears()
        _layers_share_one_process_group_for_each_number_of_copies()
        _a_frozen_weight_gets_no_gradient_and_the_bias_keeps_its_own()


def test_outputs_gradients_steps_traffic_and_texts_are_those_of_plain_attention():
    """tests/gpu/test_on_the_cpu.py has other dtypes."""
    everywhere(_everything)
