"""Generation: `tplab.tensor.kv_cache` and ParallelAttention with it, against attention over the whole text at once."""

from functools import partial

import pytest
import torch

from tests.reference import assert_close, random
from tests.tensor.on_ranks import assert_refused, refusals, traffic
from tests.tensor.test_attention import HEADS, HIDDEN, make, make_plain
from tplab import launch, record
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.kv_cache import KVCache

BATCH, LENGTH, MEMORY = 2, 7, 5
STEPS = (3, 1, 2, 1)  # a prompt, a token, two at once, a token

CASES = {
    "plain": {"causal": True},
    "4 kv heads, rotary": {"kv_heads": 4, "causal": True, "rotary_base": 100.0},
    "2 kv heads, rotary": {"kv_heads": 2, "head_dim": 6, "causal": True, "rotary_base": 100.0},
    "1 kv head": {"kv_heads": 1, "causal": True},
}


def text(padded=False):
    x = random((BATCH, LENGTH, HIDDEN), "text")
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, 1:3] = padded  # within the prompt; every query still sees token 0
    return x, padding


@torch.no_grad()
def _generate(cases):
    outcomes = []
    for case, padded in cases:
        model = make(case)
        x, padding = text(padded)
        cache = model.new_cache(BATCH, LENGTH + 2)
        place, parts, start = cache.keys.untyped_storage().data_ptr(), [], 0
        with record() as section:
            for step in STEPS:
                stop = start + step
                mask = {"key_padding_mask": padding[:, :stop]} if padded else {}
                parts.append(model(x[:, start:stop], cache=cache, **mask))
                start = stop
        assert cache.length == LENGTH
        assert cache.keys.untyped_storage().data_ptr() == place  # written in place: nothing was copied
        outcomes.append((torch.cat(parts, 1), traffic(section)[0], cache.nbytes, tuple(cache.keys.shape)))
    return outcomes


@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_text_in_pieces_gives_what_the_whole_gives_and_each_rank_caches_its_own_heads(p):
    cases = [(case, padded) for case in CASES.values() for padded in (False, True)]
    results = launch(_generate, p, args=(cases,))
    for number, (case, padded) in enumerate(cases):
        x, padding = text(padded)
        expected = make_plain(case)(x, key_padding_mask=padding).detach()
        for out, sent, nbytes, shape in (result[number] for result in results):
            assert_close(out, expected)
            assert sent == [("all_reduce", "sum", BATCH * step * HIDDEN * 8) for step in STEPS if p > 1]
            heads, d = max(1, case.get("kv_heads", HEADS) // p), case.get("head_dim", 2)
            assert shape == (BATCH, heads, LENGTH, d)
            assert nbytes == 2 * BATCH * heads * (LENGTH + 2) * d * 8


@torch.no_grad()
def _decode():
    outcomes = []
    for kv_heads in (HEADS, 2):
        model = make({"attention_type": "cross", "kv_heads": kv_heads})
        x, memory = random((BATCH, LENGTH, HIDDEN), "text"), random((BATCH, MEMORY, HIDDEN), "memory")
        padding = torch.arange(MEMORY) >= torch.tensor([[MEMORY], [3]])
        cache = model.new_cache(BATCH, MEMORY)
        parts = [model(x[:, :1], memory, cache=cache, key_padding_mask=padding)]
        parts += [model(x[:, i : i + 1], cache=cache, key_padding_mask=padding) for i in range(1, LENGTH)]
        outcomes.append((torch.cat(parts, 1), refusals(partial(model, x, memory, cache=cache))))
    return outcomes


@pytest.mark.parametrize("p", [1, 2, 4])
def test_the_memorys_keys_and_values_are_computed_once_and_kept(p):
    x, memory = random((BATCH, LENGTH, HIDDEN), "text"), random((BATCH, MEMORY, HIDDEN), "memory")
    padding = torch.arange(MEMORY) >= torch.tensor([[MEMORY], [3]])
    for outcomes in launch(_decode, p):
        for kv_heads, (out, twice) in zip((HEADS, 2), outcomes, strict=True):
            plain = make_plain({"attention_type": "cross", "kv_heads": kv_heads})
            assert_close(out, plain(x, memory, key_padding_mask=padding).detach())
            assert_refused([twice], "needs its memory once")


def test_a_truncated_cache_goes_on_from_there():
    model = make(CASES["2 kv heads, rotary"])
    x, _ = text()
    with torch.inference_mode():
        expected = model(x)
        cache = model.new_cache(BATCH, LENGTH)
        model(x[:, [0, 1, 5, 6]], cache=cache)  # two tokens right, two wrong
        cache.truncate(2)
        assert_close(model(x[:, 2:], cache=cache).clone(), expected[:, 2:].clone())
        cache.truncate()
        assert_close(model(x, cache=cache).clone(), expected.clone())


def test_keys_and_values_are_kept_apart_in_place_and_no_more_than_there_are_is_returned():
    cache = KVCache(1, 1, 5, 2)
    place = cache.keys.untyped_storage().data_ptr()
    for token in range(3):
        keys, values = cache.append(torch.full((1, 1, 1, 2), token + 1.0), torch.full((1, 1, 1, 2), -token - 1.0))
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3]
    assert values[0, 0, :, 0].tolist() == [-1, -2, -3]
    assert keys.untyped_storage().data_ptr() == place
    assert KVCache(3, 4, 10, 8, dtype=torch.bfloat16).nbytes == 2 * (3 * 4 * 10 * 8) * 2
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
def test_what_does_not_fit_is_refused_and_nothing_is_written(call, message):
    cache = KVCache(2, 4, 5, 6)
    with pytest.raises(ValueError, match=message):
        call(cache, torch.ones(2, 4, 3, 6))


def test_a_cache_in_a_graph_is_refused():
    model = ParallelAttention(HIDDEN, HEADS, causal=True)
    with pytest.raises(RuntimeError, match="use it under torch.no_grad"):
        model(torch.ones(1, 2, HIDDEN), cache=model.new_cache(1, 4))
