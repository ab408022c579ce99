"""Generation: `tplab.tensor.kv_cache` and ParallelAttention with it, against attention over the whole text at once."""

import pytest
import torch

from tests.reference import assert_close, random
from tests.tensor.on_ranks import everywhere, traffic
from tests.tensor.test_attention import HEADS, HIDDEN, make, make_plain
from tplab import record
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.kv_cache import KVCache

BATCH, LENGTH, MEMORY = 2, 7, 5
STEPS = (3, 1, 2, 1)  # a prompt, a token, two at once, a token

CASES = [
    {"causal": True},
    {"kv_heads": 4, "causal": True, "rotary_base": 100.0},
    {"kv_heads": 2, "head_dim": 6, "causal": True, "rotary_base": 100.0},
    {"kv_heads": 1, "causal": True},
]


def text():
    return random((BATCH, LENGTH, HIDDEN), "text")


def _generate(case, padded, group):
    model, x = make(case, group), text()
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, 1:3] = padded  # within the prompt; every query still sees token 0
    cache = model.new_cache(BATCH, LENGTH + 2)
    place, parts, start = cache.keys.untyped_storage().data_ptr(), [], 0
    with record() as section:
        for step in STEPS:
            stop = start + step
            mask = {"key_padding_mask": padding[:, :stop]} if padded else {}
            parts.append(model(x[:, start:stop], cache=cache, **mask))
            start = stop
    assert_close(torch.cat(parts, 1), make_plain(case)(x, key_padding_mask=padding))
    p = rank_and_size(group)[1]
    assert traffic(section)[0] == [("all_reduce", "sum", BATCH * step * HIDDEN * 8) for step in STEPS if p > 1]
    heads, d = max(1, case.get("kv_heads", HEADS) // p), case.get("head_dim", 2)
    assert cache.keys.shape == (BATCH, heads, LENGTH, d)
    assert cache.keys.untyped_storage().data_ptr() == place  # written in place: nothing was copied
    assert cache.nbytes == 2 * BATCH * heads * (LENGTH + 2) * d * 8


def _decode(case, group):
    x, memory = text(), random((BATCH, MEMORY, HIDDEN), "memory")
    padding = torch.arange(MEMORY) >= torch.tensor([[MEMORY], [3]])
    model = make(case, group)
    cache = model.new_cache(BATCH, MEMORY)
    parts = [model(x[:, :1], memory, cache=cache, key_padding_mask=padding)]
    parts += [model(x[:, i : i + 1], cache=cache, key_padding_mask=padding) for i in range(1, LENGTH)]
    assert_close(torch.cat(parts, 1), make_plain(case)(x, memory, key_padding_mask=padding))
    with pytest.raises(ValueError, match="needs its memory once"):
        model(x, memory, cache=cache)


@torch.no_grad()
def _all(group):
    for case in CASES:
        _generate(case, False, group)
        _generate(case, True, group)
    for kv_heads in (HEADS, 2):
        _decode({"attention_type": "cross", "kv_heads": kv_heads}, group)


def test_a_text_in_pieces_gives_what_the_whole_gives_and_each_rank_caches_its_own_heads():
    """In cross-attention, the memory's keys and values are computed once and kept."""
    everywhere(_all)


def test_a_truncated_cache_goes_on_from_there():
    model, x = make(CASES[2]), text()
    with torch.inference_mode():
        expected = model(x)
        cache = model.new_cache(BATCH, LENGTH)
        model(x[:, [0, 1, 5, 6]], cache=cache)  # two tokens right, two wrong
        cache.truncate(2)
        assert_close(model(x[:, 2:], cache=cache).clone(), expected[:, 2:].clone())
        cache.truncate()
        assert_close(model(x, cache=cache).clone(), expected.clone())


def test_keys_and_values_are_kept_apart_in_the_dtype_that_was_asked_for():
    cache = KVCache(1, 1, 5, 2)
    for token in range(3):
        keys, values = cache.append(torch.full((1, 1, 1, 2), token + 1.0), torch.full((1, 1, 1, 2), -token - 1.0))
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3]
    assert values[0, 0, :, 0].tolist() == [-1, -2, -3]
    model = ParallelAttention(HIDDEN, HEADS, dtype=torch.bfloat16)
    assert model.new_cache(1, 4).keys.dtype == torch.bfloat16
    assert model.new_cache(1, 4, torch.float32).keys.dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, t: (c.append(t, t), c.append(t, t)), r"3 tokens are cached, and 3 more don't fit into max_length=5"),
        (lambda c, t: c.append(t[:1], t[:1]), r"takes keys and values \[2, 4, 3, 6\], got \[1, 4, 3, 6\]"),
        (lambda c, t: c.append(t, t[:, :, :2]), r"\[2, 4, 3, 6\] and \[2, 4, 2, 6\]"),
        (lambda c, t: c.truncate(1), "can't keep 1 of 0 cached tokens"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(KVCache(2, 4, 5, 6), torch.ones(2, 4, 3, 6))


def test_a_cache_in_a_graph_is_refused():
    model = ParallelAttention(HIDDEN, HEADS, causal=True)
    with pytest.raises(RuntimeError, match="use it under torch.no_grad"):
        model(torch.ones(1, 2, HIDDEN), cache=model.new_cache(1, 4))
