"""ParallelAttention and its cache: `tplab.tensor.attention`, `qkv` and `kv_cache`, against `tplab.plain.Attention`.

test_sharding.py says which heads a rank holds, so that here each layer may say it itself. test_linear.py and
tests/gpt/test_model.py have the first values.
"""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import saying
from tests.reference import assert_close, random
from tests.tensor.on_ranks import assert_refuses, assert_trains_like, everywhere, traffic, with_random_weights
from tplab import record
from tplab.collectives.by_hand import rank_and_size
from tplab.plain import Attention
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.qkv import QKVParallelLinear

HIDDEN, HEADS = 16, 8
BATCH, SEQUENCE, MEMORY = 2, 5, 7
BASE = 100.0  # of rotary positions: small, so that five positions turn all pairs


def inputs(case, step):
    """All that the model is given, and the gradient of its output."""
    given, keys = {"x": random((BATCH, SEQUENCE, HIDDEN), "x", step)}, SEQUENCE
    if case.get("attention_type") == "cross":
        given["memory"], keys = random((BATCH, MEMORY, HIDDEN), "memory", step), MEMORY
    if case.get("padding"):  # on the right: the first key is never padding, so that each query sees something
        given["key_padding_mask"] = torch.arange(keys) >= torch.arange(keys - BATCH + 1, keys + 1)[:, None]
    return given, random((BATCH, SEQUENCE, HIDDEN), "dy", step)


# name -> options of both, and of the inputs
MODEL_OPTIONS = ("kv_heads", "head_dim", "bias", "causal", "rotary_base", "attention_type")
CASES = {
    "plain": {},
    "causal without bias": {"causal": True, "bias": False},
    "4 kv heads, rotary": {"kv_heads": 4, "head_dim": 6, "causal": True, "rotary_base": BASE},
    "1 kv head, rotary, padding and causal": {
        "kv_heads": 1, "head_dim": 4, "rotary_base": BASE, "padding": True, "causal": True,
    },
    "1 kv head without bias": {"kv_heads": 1, "bias": False},
    "cross, 2 kv heads, padding": {"attention_type": "cross", "kv_heads": 2, "head_dim": 6, "padding": True},
    "cross, without bias": {"attention_type": "cross", "bias": False},
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
    cross, kv_heads, d = case.get("attention_type") == "cross", case.get("kv_heads", HEADS), case.get("head_dim", 2)
    members = tuple(dist.get_process_group_ranks(group))
    of_x, of_memory = (BATCH * tokens * HIDDEN for tokens in (SEQUENCE, MEMORY))
    backward = [of_x] + [of_memory] * cross
    calls = [("all_reduce", 8 * n, "sum", members) for n in backward]
    if p > kv_heads:  # gradients of one head of K and one of V, over the ranks that hold it
        count = p // kv_heads
        copies = members[rank // count * count :][:count]
        sizes = [2 * d * HIDDEN] + [2 * d] * case.get("bias", True)
        calls += [("all_reduce", 8 * n, "sum", copies) for n in sizes]
    return [[("all_reduce", 8 * of_x, "sum", members)], sorted(calls)]


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
    assert cache._keys.nbytes == cache._values.nbytes == BATCH * heads * (LENGTH + 2) * d * 8


def test_tokens_beyond_the_length_of_a_cache_and_a_cache_in_a_graph_are_refused():
    model = ParallelAttention(HIDDEN, HEADS, causal=True)
    cache, x = model.new_cache(1, 4), torch.ones(1, 3, HIDDEN)
    with pytest.raises(RuntimeError, match=saying("torch.no_grad()")):
        model(x, cache=cache)
    with torch.no_grad():
        model(x, cache=cache)
        with pytest.raises(ValueError, match=saying("3 tokens", " 3 ", "max_length=4")):
            model(x, cache=cache)


# On four ranks


def _refuse():
    """What can't be is refused with the numbers and what would work."""
    x, reader = torch.ones(2, 3, HIDDEN), ParallelAttention(HIDDEN, HEADS, attention_type="cross")
    assert_refuses(
        (lambda: ParallelAttention(24, 12, 6), "num_kv_heads=6", "4 ranks", "1, 2, 3, 6, 12"),
        (lambda: ParallelAttention(24, 6), "num_heads=6", "4 ranks", "1, 2, 3, 6"),
        (lambda: ParallelAttention(HIDDEN, HEADS, 3), "num_heads=8", "num_kv_heads=3"),
        (lambda: ParallelAttention(20, HEADS), "hidden_size=20", "num_heads=8"),
        (lambda: ParallelAttention(HIDDEN, HEADS)(x, x), "memory", "attention_type='cross'"),
        (lambda: reader(x), "cross-attention", "memory", "cache"),
        (lambda: reader(x, x, key_padding_mask=torch.ones(2, 3)), "key_padding_mask", "bool [2, 3]", "float32 [2, 3]"),
    )


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


def _everything(group):
    for name, case in CASES.items():
        assert assert_equals_plain(name, group) == expected_traffic(case, group), name
    for case, padded in itertools.product(GENERATING, (False, True)):
        _generate(case, padded, group)
    if group is None and rank_and_size()[1] == 4:
        _refuse()
        _first_values_are_those_of_plain_linears()
        _layers_share_one_process_group_for_each_number_of_copies()


def test_outputs_gradients_steps_traffic_and_texts_are_those_of_plain_attention():
    """tests/gpu/test_on_the_cpu.py has other dtypes."""
    everywhere(_everything)
