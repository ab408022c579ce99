"""The check of exercise 6.5: a cache for keys and values, and attention that uses it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tplab.course.chapters.ch06 import generation
from tplab.course.chapters.ch06.cache_questions import (
    BUILD_CRASH,
    CACHE_QUESTIONS,
    FULL,
    IN_PLACE,
    ONE_MEMORY,
    OVERFLOW,
    STEP_CRASH,
    STEP_QUESTIONS,
    UNTOUCHED,
    VIEWS,
)
from tplab.course.checks import (
    WORLD_SIZES,
    Claim,
    NotRun,
    Observed,
    Snapshot,
    Traffic,
    Verdict,
    by_name,
    called_as,
    exercise,
    fresh_generator,
    portable,
    random_tensor,
    run_ranks,
    traffic,
    verify,
)
from tplab.runtime import device, record
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.linear import RowParallelLinear
from tplab.tensor.qkv import QKVParallelLinear

HEADS, DIM, BASE = 8, 4, 100.0
HIDDEN = HEADS * DIM
BATCH, MAX_LENGTH = 2, 7
PIECES = (3, 1, 2)
KV_HEADS = {1: 2, 2: 4, 4: 2}  # for p ranks: grouped, two on each rank, copies


class Parts(nn.Module):
    """The two layers of an attention, and its sizes on this rank; what happens between them is the exercise."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device(), "dtype": torch.float64}
        self.num_heads, self.num_kv_heads, self.head_dim, self.rotary_base = HEADS, kv_heads, DIM, BASE
        self.qkv = QKVParallelLinear(HIDDEN, HEADS, kv_heads, DIM, **options)
        self.out = RowParallelLinear(HIDDEN, HIDDEN, **options)
        self.heads, self.kv_heads = self.qkv.heads[:2]


def names_of(kv_heads: int) -> str:
    return f"attention with {HEADS} heads, {kv_heads} of K and V"


@torch.no_grad()
def look_at_cache(cache_class: Any, kv_heads: int, keys: Tensor, values: Tensor, wanted: str) -> Observed:
    """On a rank: what one cache is, and what its `append` does, twice and once too often."""
    attention = Parts(kv_heads)
    with called_as(f"KVCache(an {names_of(kv_heads)}, {BATCH}, {MAX_LENGTH})"):
        cache = cache_class(attention, BATCH, MAX_LENGTH)
    seen: Observed = {"memory": memory(cache), "length at first": portable(getattr(cache, "length", None))}
    if seen["memory"] != wanted:
        return seen | dict.fromkeys(("keys so far", "values so far", "length"), NotRun("the cache has another memory"))
    homes = [cache.keys.data_ptr(), cache.values.data_ptr()]
    mine = [t[:, : attention.kv_heads].to(device()) for t in (keys, values)]  # [b, m, s, d]
    snapshot, claims, returned = Snapshot(keys=mine[0], values=mine[1]), {IN_PLACE: "", VIEWS: ""}, None
    for start, stop in ((0, 3), (3, 5)):
        k, v = (t[:, :, start:stop] for t in mine)
        with called_as(f"cache.append(keys {list(k.shape)}, values {list(v.shape)})"):
            returned = cache.append(k, v)
            returned = tuple(returned) if isinstance(returned, list) else returned  # a list of two says as much
        if [cache.keys.data_ptr(), cache.values.data_ptr()] != homes:
            claims[IN_PLACE] = f"after {stop} tokens `cache.keys` or `cache.values` is another tensor"
        if not_views(returned, homes):
            claims[VIEWS] = f"after {stop} tokens append returns tensors with memory of their own"
    pair = portable(returned)
    both = isinstance(pair, tuple) and len(pair) == 2
    seen |= {"keys so far": pair[0] if both else pair, "values so far": pair[1] if both else pair}
    seen |= {"length": portable(cache.length), **{name: Claim(text) for name, text in claims.items()}}
    return seen | overflow(cache, mine) | {"inputs unchanged": snapshot.changed()}


def overflow(cache: Any, mine: Sequence[Tensor]) -> Observed:
    """Three tokens more than there is room for: a ValueError, and nothing written."""
    before = (cache.keys.clone(), cache.values.clone(), cache.length)
    try:
        cache.append(*(t[:, :, :3] for t in mine))
    except ValueError:
        kept = torch.equal(cache.keys, before[0]) and torch.equal(cache.values, before[1]) and cache.length == before[2]
        said = {OVERFLOW: Claim(""), UNTOUCHED: Claim("" if kept else "the cache or its length changed")}
        return said | ({FULL: filled(cache, mine)} if kept else {})
    except Exception as error:
        return {OVERFLOW: Claim(f"{type(error).__name__} was raised instead: {error}")}
    return {OVERFLOW: Claim(f"5 tokens are there, 3 more were taken, with room for {MAX_LENGTH}")}


def filled(cache: Any, mine: Sequence[Tensor]) -> Claim:
    """Two tokens more, as many as there is room for."""
    try:
        cache.append(*(t[:, :, :2] for t in mine))
    except Exception as error:
        name = type(error).__name__
        return Claim(f"5 tokens are there, 2 more come, with room for {MAX_LENGTH}, and {name} was raised: {error}")
    return Claim("" if cache.length == MAX_LENGTH else f"with {MAX_LENGTH} tokens the length is {cache.length}")


def memory(cache: Any) -> str:
    tensors = {name: getattr(cache, name, None) for name in ("keys", "values")}
    keys, values = tensors.values()
    if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.data_ptr() == values.data_ptr() != 0:
        return ONE_MEMORY
    return ", ".join(
        f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" if isinstance(t, Tensor) else f"no {name}"
        for name, t in tensors.items()
    )


def not_views(returned: Any, homes: Sequence[int]) -> bool:
    if not isinstance(returned, tuple) or len(returned) != 2 or not all(isinstance(t, Tensor) for t in returned):
        return False  # said elsewhere
    return [t.data_ptr() for t in returned] != homes


@torch.no_grad()
def generate(cache_class: Any, attend_next: Any, kv_heads: int, full: dict[str, Tensor], x: Tensor) -> Observed:
    """On a rank: the outputs for a text that comes in pieces."""
    attention = Parts(kv_heads)
    load_full_state_dict(attention, {name: value.to(device()) for name, value in full.items()})
    cache, x = cache_class(attention, BATCH, MAX_LENGTH), x.to(device())
    snapshot = Snapshot(x=x, **dict(attention.named_parameters()))
    seen: Observed = {}
    start = 0
    for length in PIECES:
        piece, tokens = x[:, start : start + length], tokens_text(start, length)
        with record() as section, called_as(f"attend_next(an {names_of(kv_heads)}, x {list(piece.shape)}, cache)"):
            seen[f"out of {tokens}"] = portable(attend_next(attention, piece, cache))
        seen[f"traffic of {tokens}"] = traffic(section)
        start += length
    return seen | {"length": portable(cache.length), "inputs unchanged": snapshot.changed()}


def tokens_text(start: int, length: int) -> str:
    return f"token {start}" if length == 1 else f"tokens {start} to {start + length - 1}"


@exercise("6.5", "KV cache")
def kv_cache(cache_class: Any, attend_next: Any) -> Verdict:
    for p in WORLD_SIZES:
        check_cache(cache_class, KV_HEADS[p], p)
        check_generation(cache_class, attend_next, KV_HEADS[p], p)
    return Verdict("Each rank keeps the keys and values of its own heads, and still sends only one sum of b·s·h.")


def check_cache(cache_class: Any, kv_heads: int, p: int) -> None:
    generator = fresh_generator()
    m = max(1, kv_heads // p)
    keys, values = (random_tensor(generator, BATCH, m, 5, DIM) for _ in "kv")
    note = f"a cache for an {names_of(kv_heads)}"
    room = f"[{BATCH}, {m}, {MAX_LENGTH}, {DIM}] float64"
    wanted = f"keys {room}, values {room}"
    seen = run_ranks(look_at_cache, p, cache_class, kv_heads, keys, values, wanted, question=BUILD_CRASH, note=note)
    expected = {
        "memory": wanted,
        "length at first": 0,
        "keys so far": keys,
        "values so far": values,
        "length": 5,
    }
    alike = {
        "keys so far": {NEWEST: [keys[:, :, 3:]] * p, ALL_ROOM: [padded(keys)] * p},
        "values so far": {NEWEST: [values[:, :, 3:]] * p, ALL_ROOM: [padded(values)] * p},
    }
    verify("6.5", p, list(seen), [expected] * p, questions=CACHE_QUESTIONS, lookalikes=alike, note=note)


NEWEST = "the tokens of the last append alone"
ALL_ROOM = "all the room of the cache, with what is empty still"


def padded(tensor: Tensor) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, 0, MAX_LENGTH - tensor.shape[2]))


def check_generation(cache_class: Any, attend_next: Any, kv_heads: int, p: int) -> None:
    generator = fresh_generator()
    rows = {"q": HIDDEN, "k": kv_heads * DIM, "v": kv_heads * DIM, "o": HIDDEN}
    full = {f"W{part}": random_tensor(generator, size, HIDDEN) / 3 for part, size in rows.items()}
    full |= {f"b{part}": random_tensor(generator, size) for part, size in rows.items()}
    x = random_tensor(generator, BATCH, sum(PIECES), HIDDEN)
    given = {"out.weight": full["Wo"], "out.bias": full["bo"]}
    given |= {f"qkv.{kind}": torch.cat([full[f"{letter}{part}"] for part in "qkv"]) for kind, letter in KINDS}
    note = f"an {names_of(kv_heads)}, a text of {sum(PIECES)} tokens in {len(PIECES)} pieces"
    program = (generate, p, cache_class, attend_next, kv_heads, given, x)
    seen = run_ranks(*program, question=STEP_CRASH, note=note)
    texts = [tokens_text(sum(PIECES[:i]), length) for i, length in enumerate(PIECES)]
    right = generation.in_pieces(x, full, PIECES, DIM, BASE)
    expected: dict[str, Any] = {f"out of {text}": out for text, out in zip(texts, right, strict=True)}
    for text, length in zip(texts, PIECES, strict=True):
        expected[f"traffic of {text}"] = Traffic.expected(p, ("all_reduce", BATCH * length * HIDDEN))
    alike: dict[str, dict[str, Tensor]] = {f"out of {text}": {} for text in texts}
    for label, mistake in generation.MISTAKES.items():
        for text, out in zip(
            texts, generation.in_pieces(x, full, PIECES, DIM, **{"base": BASE, **mistake}), strict=True
        ):
            alike[f"out of {text}"][label] = out
    verify(
        "6.5",
        p,
        list(seen),
        [expected | {"length": sum(PIECES)}] * p,
        questions=STEP_QUESTIONS,
        lookalikes=by_name([alike] * p),
        note=note,
    )


KINDS = (("weight", "W"), ("bias", "b"))
