"""The check of exercise 6.6, a cache for keys and values, and the attention that uses the cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tplab.course.checks.cases import Case, Place, random_tensor
from tplab.course.checks.observation import Claim, NotRun, Observed, Snapshot, portable
from tplab.course.checks.recorded_traffic import traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.course.exercises.ch06 import plain
from tplab.runtime import device, record
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.linear import RowParallelLinear
from tplab.tensor.qkv import QKVParallelLinear

HEADS, DIM, BASE = 8, 4, 100.0
HIDDEN = HEADS * DIM
BATCH, MAX_LENGTH = 2, 7
PIECES = (3, 1, 2)
TOKENS = ("tokens 0 to 2", "token 3", "tokens 4 to 5")  # the tokens in each piece
KV_HEADS = {1: 2, 2: 4, 4: 2}  # by p: grouped heads, two heads per rank, copies of heads
SMALL = 1 / 3  # the size of weights, so that the softmax doesn't pick a single key

IN_PLACE = "append writes into the memory that the cache was created with"
NOT_COPIED = "append doesn't copy the tokens that are already cached"
VIEWS = "append returns views of the cache's memory"
OVERFLOW = "append raises ValueError if there isn't enough room"
UNTOUCHED = "an append without enough room writes nothing"
FULL = "the cache can be filled completely"
ONE_MEMORY = "keys and values share the same memory"


class Parts(nn.Module):
    """The two linear layers of an attention layer, and its sizes on this rank. Learners write the steps in between."""

    def __init__(self, kv_heads: int, dtype: torch.dtype, base: float = BASE) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device(), "dtype": dtype}
        self.num_heads, self.num_kv_heads, self.head_dim, self.rotary_base = HEADS, kv_heads, DIM, base
        self.qkv = QKVParallelLinear(HIDDEN, HEADS, kv_heads, DIM, **options)
        self.out = RowParallelLinear(HIDDEN, HIDDEN, **options)
        self.heads, self.kv_heads = self.qkv.heads[:2]


@dataclass(frozen=True)
class Cache(Case):
    """A case for the cache alone: its memory, and `append`, called twice and then with more tokens than fit."""

    kv_heads: int

    @property
    def attention(self) -> str:
        return f"attention with {HEADS} query heads and {self.kv_heads} key heads"

    @property
    def between(self) -> bool:
        """Whether a second cache is used between the calls to the first one."""
        return self.twin is Twin.BETWEEN

    def describe(self, name: str) -> str:
        return f"a cache for {self.attention}"


@dataclass(frozen=True)
class Text(Cache):
    """A case in which attention uses a cache to process a text that arrives in pieces."""

    @property
    def base(self) -> float:
        """The base of the rotary positions. It differs from BASE if a second attention layer is used as well."""
        return BASE / 2 if self.between else BASE

    def describe(self, name: str) -> str:
        return f"{self.attention}, a text of {sum(PIECES)} tokens in {len(PIECES)} pieces"


def draw_tokens(case: Cache, generator: torch.Generator, size: int) -> list[Tensor]:
    """Return the keys and values of five tokens, [b, m, 5, d] each, for the heads on a rank."""
    return [random_tensor(generator, BATCH, max(1, case.kv_heads // size), 5, DIM) for _ in "kv"]


def room(case: Cache, tokens: Sequence[Tensor]) -> str:
    """Return what `memory` should return for a cache that stores these keys and values."""
    dtype = str(case.dtype).removeprefix("torch.")
    shape = f"[{BATCH}, {tokens[0].shape[1]}, {MAX_LENGTH}, {DIM}] {dtype}"
    return f"keys {shape}, values {shape}"


@torch.no_grad()
def run_append(cache_class: Any, case: Cache, tokens: Sequence[Tensor], group: Any) -> Observed:
    with called_as(f"KVCache(attention, {BATCH}, {MAX_LENGTH})"):
        cache = cache_class(Parts(case.kv_heads, case.dtype), BATCH, MAX_LENGTH)
    seen: Observed = {"memory": memory(cache), "length at first": portable(getattr(cache, "length", None))}
    if seen["memory"] != room(case, tokens):
        return seen | dict.fromkeys(("keys so far", "values so far", "length"), NotRun("the cache's memory differs"))
    other = cache_class(Parts(case.kv_heads, case.dtype), BATCH, MAX_LENGTH) if case.between else None
    homes = [cache.keys.data_ptr(), cache.values.data_ptr()]
    mine = [t.to(device()) for t in tokens]
    snapshot = Snapshot(keys=mine[0], values=mine[1])
    claims, returned = dict.fromkeys((IN_PLACE, NOT_COPIED, VIEWS), ""), None
    for start, stop in ((0, 3), (3, 5)):
        k, v = (t[:, :, start:stop] for t in mine)
        with called_as(f"cache.append(keys {list(k.shape)}, values {list(v.shape)})"):
            if other:
                other.append(-k, 2 * v)
            with NewMemory() as new:
                returned = cache.append(k, v)
            returned = tuple(returned) if isinstance(returned, list) else returned  # a list is fine, too
        if [cache.keys.data_ptr(), cache.values.data_ptr()] != homes:
            claims[IN_PLACE] = f"after {stop} tokens, `cache.keys` or `cache.values` is a different tensor"
        if not_views(returned, homes):
            claims[VIEWS] = f"after {stop} tokens, append returns tensors with their own memory"
    if new.largest >= mine[0].numel():
        claims[NOT_COPIED] = f"to add 2 tokens to 3, append allocates a new tensor of {new.largest} elements"
    pair = portable(returned)
    both = isinstance(pair, tuple) and len(pair) == 2
    seen |= {"keys so far": pair[0] if both else pair, "values so far": pair[1] if both else pair}
    seen |= {"length": portable(cache.length), **{name: Claim(text) for name, text in claims.items()}}
    return seen | overflow(cache, mine) | {"inputs unchanged": snapshot.changed()}


class NewMemory(TorchDispatchMode):
    """Dispatch mode that records the size of the largest tensor for which an operator allocates new memory."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(v) if isinstance(t, Tensor)] for v in ((args, kwargs), out))
        old = {t.untyped_storage().data_ptr() for t in given}
        self.largest = max([self.largest, *(t.numel() for t in made if t.untyped_storage().data_ptr() not in old)])
        return out


def overflow(cache: Any, mine: Sequence[Tensor]) -> Observed:
    """Append one token more than the cache has room for, which must raise ValueError and leave the cache unchanged."""
    before, length = Snapshot(keys=cache.keys, values=cache.values), cache.length
    try:
        cache.append(*(t[:, :, :3] for t in mine))
    except ValueError:
        kept = not before.changed() and cache.length == length
        said = {OVERFLOW: Claim(""), UNTOUCHED: Claim("" if kept else "the cache or its length changed")}
        return said | ({FULL: filled(cache, mine)} if kept else {})
    except Exception as error:
        return {OVERFLOW: Claim(f"it raised {type(error).__name__}: {error}")}
    return {OVERFLOW: Claim(f"it added 3 tokens to 5 tokens, although there's only room for {MAX_LENGTH}")}


def filled(cache: Any, mine: Sequence[Tensor]) -> Claim:
    """Append two more tokens, which fill the cache exactly, and return a claim that says whether this worked."""
    try:
        cache.append(*(t[:, :, :2] for t in mine))
    except Exception as error:
        return Claim(f"5 tokens are cached and 2 more would fill the cache, but append raised {type(error).__name__}")
    return Claim("" if cache.length == MAX_LENGTH else f"with {MAX_LENGTH} tokens, the length is {cache.length}")


def memory(cache: Any) -> str:
    """Describe the cache's two tensors by shape and dtype."""
    tensors = {name: getattr(cache, name, None) for name in ("keys", "values")}
    keys, values = tensors.values()
    if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.data_ptr() == values.data_ptr() != 0:
        return ONE_MEMORY
    return ", ".join(
        f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" if isinstance(t, Tensor) else f"no {name}"
        for name, t in tensors.items()
    )


def not_views(returned: Any, homes: Sequence[int]) -> bool:
    """Return whether the two tensors from `append` start at different addresses than the cache's own tensors."""
    if not isinstance(returned, tuple) or len(returned) != 2 or not all(isinstance(t, Tensor) for t in returned):
        return False  # the comparison with the right keys and values reports this mistake
    return [t.data_ptr() for t in returned] != homes


def right_append(case: Cache, tokens: Sequence[Tensor], place: Place) -> Observed:
    right = {"memory": room(case, tokens), "length at first": 0, "length": 5}
    return right | {"keys so far": tokens[0], "values so far": tokens[1]}


def draw_text(case: Text, generator: torch.Generator, size: int) -> dict[str, Tensor]:
    """Return the input x [b, s, h] and the unsharded weights, from Wq to bo."""
    rows = {"q": HIDDEN, "k": case.kv_heads * DIM, "v": case.kv_heads * DIM, "o": HIDDEN}
    full = {f"W{part}": random_tensor(generator, count, HIDDEN) * SMALL for part, count in rows.items()}
    full |= {f"b{part}": random_tensor(generator, count) for part, count in rows.items()}
    return full | {"x": random_tensor(generator, BATCH, sum(PIECES), HIDDEN)}


@torch.no_grad()
def run_text(answer: tuple[Any, Any], case: Text, problem: dict[str, Tensor], group: Any) -> Observed:
    cache_class, attend_next = answer
    attention = Parts(case.kv_heads, case.dtype, case.base)
    on_rank = {name: tensor.to(device()) for name, tensor in problem.items()}
    kinds = {"weight": "W", "bias": "b"}
    full = {f"qkv.{kind}": torch.cat([on_rank[letter + part] for part in "qkv"]) for kind, letter in kinds.items()}
    full |= {f"out.{kind}": on_rank[f"{letter}o"] for kind, letter in kinds.items()}
    load_full_state_dict(attention, full)
    cache, x = cache_class(attention, BATCH, MAX_LENGTH), on_rank["x"]
    if case.between:  # a second cache for this layer, and a larger one for a layer with a different base
        second = cache_class(attention, BATCH, MAX_LENGTH)
        other_attention = Parts(case.kv_heads, case.dtype)
        load_full_state_dict(other_attention, full)
        other = cache_class(other_attention, BATCH, 2 * MAX_LENGTH)
    snapshot = Snapshot(x=x, **dict(attention.named_parameters()))
    seen: Observed = {}
    for tokens, piece in zip(TOKENS, x.split(PIECES, 1), strict=True):
        if case.between:
            attend_next(other_attention, -piece, other)
        with record() as section, called_as(f"attend_next(attention, x {list(piece.shape)}, cache)"):
            seen[f"out of {tokens}"] = portable(attend_next(attention, piece, cache))
        if case.between:
            attend_next(attention, -piece, second)
        seen[f"traffic of {tokens}"] = traffic(section)
    return seen | {"length": portable(cache.length), "inputs unchanged": snapshot.changed()}


def right_text(case: Text, problem: Mapping[str, Tensor], place: Place) -> Observed:
    right: Observed = {"length": sum(PIECES)}
    stop = 0
    for tokens, length in zip(TOKENS, PIECES, strict=True):
        stop += length
        right[f"out of {tokens}"] = last_tokens(problem, length, stop, case.base)
        right[f"traffic of {tokens}"] = place.traffic(("all_reduce", BATCH * length * HIDDEN))
    return right


def last_tokens(problem: Mapping[str, Tensor], s: int, t: int, base: float) -> Tensor:
    """Return the output [b, s, h] of the last s of the first t tokens, computed from all of them."""
    x, positions = problem["x"][:, :t], torch.arange(t)
    q, k, v = (plain.heads(linear(x, problem[f"W{part}"], problem[f"b{part}"]), DIM) for part in "qkv")
    q, k = plain.turn(q, positions, base), plain.turn(k, positions, base)
    y = plain.attention(q[:, :, t - s :], k, v, plain.allowed(s, t, causal=True))
    return linear(y, problem["Wo"], problem["bo"])


exercise(
    "6.6", "KV cache (optional)", takes=["KVCache", "attend_next"],
    trials=[
        OnRanks(
            of="KVCache", part="KVCache", cases=lambda p: [Cache(KV_HEADS[p])], draw=draw_tokens, run=run_append,
            right=right_append,
        ),
        OnRanks(
            part="attend_next", cases=lambda p: [Text(KV_HEADS[p])], draw=draw_text, run=run_text, right=right_text
        ),
    ],
    passed="Each rank caches the keys and values of its own heads, and a step still sends only the one sum of the "
    "output layer.",
)  # fmt: skip
