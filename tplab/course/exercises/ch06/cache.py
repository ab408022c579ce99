"""The check for exercise 6.5, a cache for keys and values, and the attention that uses the cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tplab.course import checks
from tplab.course.exercises.ch06 import plain
from tplab.runtime import device, record
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.linear import RowParallelLinear
from tplab.tensor.qkv import QKVParallelLinear

HEADS, DIM, BASE = 8, 4, 100.0
HIDDEN = HEADS * DIM
BATCH, MAX_LENGTH = 2, 7
PIECES = (3, 1, 2)
KV_HEADS = {1: 2, 2: 4, 4: 2}  # keyed by p: grouped heads, two heads per rank, replicated heads

IN_PLACE = "append writes into the memory that the cache was made with"
NOT_COPIED = "append doesn't copy the tokens that are there"
VIEWS = "what append returns are views of that memory"
OVERFLOW = "more tokens than there is room for are refused with a ValueError"
UNTOUCHED = "a refused append writes nothing"
FULL = "the last places can be filled"
ONE_MEMORY = "keys and values in one and the same memory"
NEWEST = "the tokens of the last append alone"
ALL_ROOM = "all the room of the cache, with what is empty still"


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
class Cache(checks.Case):
    """A case for the cache alone: its memory, and `append`, called twice and then with more tokens than fit."""

    kv_heads: int

    @property
    def attention(self) -> str:
        return f"attention with {HEADS} heads, {self.kv_heads} of K and V"

    def describe(self, name: str) -> str:
        return f"a cache for an {self.attention}"


@dataclass(frozen=True)
class Text(Cache):
    """A case in which attention uses a cache to process a text that arrives in pieces."""

    @property
    def base(self) -> float:
        """The base of the rotary positions. It differs from BASE if a second attention layer is used as well."""
        return BASE / 2 if between(self) else BASE

    def describe(self, name: str) -> str:
        return f"an {self.attention}, a text of {sum(PIECES)} tokens in {len(PIECES)} pieces"


def draw_tokens(case: Cache, generator: torch.Generator, size: int) -> list[Tensor]:
    """Draw the keys and values of five tokens, each [b, m, 5, d], for the heads on a rank."""
    return [checks.random_tensor(generator, BATCH, max(1, case.kv_heads // size), 5, DIM) for _ in "kv"]


def room(case: Cache, tokens: Sequence[Tensor]) -> str:
    """Return the description that `memory` should return for a cache that stores these keys and values."""
    dtype = str(case.dtype).removeprefix("torch.")
    shape = f"[{BATCH}, {tokens[0].shape[1]}, {MAX_LENGTH}, {DIM}] {dtype}"
    return f"keys {shape}, values {shape}"


def between(case: Cache) -> bool:
    """Return whether this case also uses a second cache between the calls to the first one."""
    return case.twin is checks.Twin.BETWEEN


@torch.no_grad()
def append(cache_class: Any, case: Cache, tokens: Sequence[Tensor], group: Any) -> checks.Observed:
    with checks.called_as(f"KVCache(an {case.attention}, {BATCH}, {MAX_LENGTH})"):
        cache = cache_class(Parts(case.kv_heads, case.dtype), BATCH, MAX_LENGTH)
    seen: checks.Observed = {
        "memory": memory(cache),
        "length at first": checks.portable(getattr(cache, "length", None)),
    }
    if seen["memory"] != room(case, tokens):
        return seen | dict.fromkeys(
            ("keys so far", "values so far", "length"), checks.NotRun("the cache has another memory")
        )
    other = cache_class(Parts(case.kv_heads, case.dtype), BATCH, MAX_LENGTH) if between(case) else None
    homes = [cache.keys.data_ptr(), cache.values.data_ptr()]
    mine = [t.to(device()) for t in tokens]
    snapshot = checks.Snapshot(keys=mine[0], values=mine[1])
    claims, returned = dict.fromkeys((IN_PLACE, NOT_COPIED, VIEWS), ""), None
    for start, stop in ((0, 3), (3, 5)):
        k, v = (t[:, :, start:stop] for t in mine)
        with checks.called_as(f"cache.append(keys {list(k.shape)}, values {list(v.shape)})"):
            if other:
                other.append(-k, 2 * v)
            with NewMemory() as new:
                returned = cache.append(k, v)
            returned = tuple(returned) if isinstance(returned, list) else returned  # a list is fine, too
        if [cache.keys.data_ptr(), cache.values.data_ptr()] != homes:
            claims[IN_PLACE] = f"after {stop} tokens `cache.keys` or `cache.values` is another tensor"
        if not_views(returned, homes):
            claims[VIEWS] = f"after {stop} tokens append returns tensors with memory of their own"
    if new.largest >= mine[0].numel():
        claims[NOT_COPIED] = f"2 tokens are added to 3, and append makes a new tensor of {new.largest} elements"
    pair = checks.portable(returned)
    both = isinstance(pair, tuple) and len(pair) == 2
    seen |= {"keys so far": pair[0] if both else pair, "values so far": pair[1] if both else pair}
    seen |= {"length": checks.portable(cache.length), **{name: checks.Claim(text) for name, text in claims.items()}}
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


def overflow(cache: Any, mine: Sequence[Tensor]) -> checks.Observed:
    """Append one token more than the cache has room for, which must raise ValueError and leave the cache unchanged."""
    before, length = checks.Snapshot(keys=cache.keys, values=cache.values), cache.length
    try:
        cache.append(*(t[:, :, :3] for t in mine))
    except ValueError:
        kept = not before.changed() and cache.length == length
        said = {OVERFLOW: checks.Claim(""), UNTOUCHED: checks.Claim("" if kept else "the cache or its length changed")}
        return said | ({FULL: filled(cache, mine)} if kept else {})
    except Exception as error:
        return {OVERFLOW: checks.Claim(f"{type(error).__name__} was raised instead: {error}")}
    return {OVERFLOW: checks.Claim(f"5 tokens are there, 3 more were taken, with room for {MAX_LENGTH}")}


def filled(cache: Any, mine: Sequence[Tensor]) -> checks.Claim:
    """Append two more tokens, which fill the cache exactly, and return a claim that says whether this worked."""
    try:
        cache.append(*(t[:, :, :2] for t in mine))
    except Exception as error:
        name = type(error).__name__
        return checks.Claim(
            f"5 tokens are there, 2 more come, with room for {MAX_LENGTH}, and {name} was raised: {error}"
        )
    return checks.Claim("" if cache.length == MAX_LENGTH else f"with {MAX_LENGTH} tokens the length is {cache.length}")


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


def expect_tokens(case: Cache, tokens: Sequence[Tensor], place: checks.Place) -> checks.Expected:
    keys, values = tokens
    right = {"memory": room(case, tokens), "length at first": 0, "length": 5}
    right |= {"keys so far": keys, "values so far": values}
    mistakes = {
        f"{name} so far": {NEWEST: t[:, :, 3:], ALL_ROOM: nn.functional.pad(t, (0, 0, 0, MAX_LENGTH - 5))}
        for name, t in (("keys", keys), ("values", values))
    }
    return checks.Expected(right, mistakes)


def draw_text(case: Text, generator: torch.Generator, size: int) -> dict[str, Tensor]:
    """Draw the input x [b, s, h] and the unsharded weights, which are keyed by short names from Wq to bo."""
    rows = {"q": HIDDEN, "k": case.kv_heads * DIM, "v": case.kv_heads * DIM, "o": HIDDEN}
    full = {f"W{part}": checks.random_tensor(generator, count, HIDDEN) / 3 for part, count in rows.items()}
    full |= {f"b{part}": checks.random_tensor(generator, count) for part, count in rows.items()}
    return full | {"x": checks.random_tensor(generator, BATCH, sum(PIECES), HIDDEN)}


@torch.no_grad()
def generate(answer: tuple[Any, Any], case: Text, problem: dict[str, Tensor], group: Any) -> checks.Observed:
    cache_class, attend_next = answer
    attention = Parts(case.kv_heads, case.dtype, case.base)
    on_rank = {name: tensor.to(device()) for name, tensor in problem.items()}
    fused = {f"qkv.{name}": torch.cat([on_rank[letter + part] for part in "qkv"]) for name, letter in KINDS}
    full = fused | {f"out.{name}": on_rank[f"{letter}o"] for name, letter in KINDS}
    load_full_state_dict(attention, full)
    cache, x = cache_class(attention, BATCH, MAX_LENGTH), on_rank["x"]
    if between(case):  # a second cache for this layer, and a larger one for a layer with a different base
        second = cache_class(attention, BATCH, MAX_LENGTH)
        other_attention = Parts(case.kv_heads, case.dtype)
        load_full_state_dict(other_attention, full)
        other = cache_class(other_attention, BATCH, 2 * MAX_LENGTH)
    snapshot = checks.Snapshot(x=x, **dict(attention.named_parameters()))
    seen: checks.Observed = {}
    for tokens, piece in zip(TOKENS, x.split(PIECES, 1), strict=True):
        if between(case):
            attend_next(other_attention, -piece, other)
        with record() as section, checks.called_as(f"attend_next(an {case.attention}, x {list(piece.shape)}, cache)"):
            seen[f"out of {tokens}"] = checks.portable(attend_next(attention, piece, cache))
        if between(case):
            attend_next(attention, -piece, second)
        seen[f"traffic of {tokens}"] = checks.traffic(section)
    return seen | {"length": checks.portable(cache.length), "inputs unchanged": snapshot.changed()}


KINDS = (("weight", "W"), ("bias", "b"))
TOKENS = ("tokens 0 to 2", "token 3", "tokens 4 to 5")  # the tokens in each piece


def expect_text(case: Text, problem: dict[str, Tensor], place: checks.Place) -> checks.Expected:
    def outs(**options: Any) -> dict[str, Tensor]:
        found = plain.in_pieces(problem["x"], problem, PIECES, DIM, **{"base": case.base, **options})
        return {f"out of {tokens}": out for tokens, out in zip(TOKENS, found, strict=True)}

    right: checks.Observed = dict(outs())
    for tokens, length in zip(TOKENS, PIECES, strict=True):
        right[f"traffic of {tokens}"] = place.traffic(("all_reduce", BATCH * length * HIDDEN))
    wrong = {label: outs(**options) for label, options in plain.IN_PIECES.items()}
    return checks.Expected(
        right | {"length": sum(PIECES)},
        {f"out of {tokens}": {label: wrong[label][f"out of {tokens}"] for label in wrong} for tokens in TOKENS},
    )


@checks.exercise("6.5", "KV cache")
def kv_cache(cache_class: Any, attend_next: Any) -> checks.Verdict:
    for p in checks.WORLD_SIZES:  # on p ranks, check the cache alone first, and then the attention that uses it
        checks.check_cases(
            "6.5", cache_class, [Cache(KV_HEADS[p])], draw=draw_tokens, run=append, expect=expect_tokens,
            questions=CACHE_QUESTIONS, crash=BUILD_CRASH, world_sizes=(p,),
        )  # fmt: skip
        checks.check_cases(
            "6.5", (cache_class, attend_next), [Text(KV_HEADS[p])], draw=draw_text, run=generate, expect=expect_text,
            questions=STEP_QUESTIONS, crash=STEP_CRASH, world_sizes=(p,),
        )  # fmt: skip
    return checks.Verdict(
        "Each rank keeps the keys and values of its own heads, and still sends only one sum of b·s·h."
    )


BUILD_CRASH = (
    "The cache has `keys` and `values` [b, m, max_length, d] and a number `length`. m and d are `attention.kv_heads` "
    "and `attention.head_dim`; append gets [b, m, s, d]. Write the shape of the slice that you write next to the line."
)
STEP_CRASH = (
    "Write the shape next to each line: x [b, s, h]; q [b, n, s, d], k and v [b, m, s, d]; from the cache k and v "
    "[b, m, t, d], t tokens in all; for attend as many heads of k and v as of q."
)


def on_any_out(*kinds: str) -> Callable[[checks.Differences], bool]:
    """Return a predicate that tests whether any output differs in one of these ways."""

    def fits(d: checks.Differences) -> bool:
        return any(checks.has_kind(name, *kinds)(d) for name in d.names if name.startswith("out"))

    return fits


CACHE_QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        lambda d: ONE_MEMORY in d.text("memory"),
        "`keys` and `values` are two names for one tensor: `[tensor] * 2` makes no second one. What becomes of the "
        "keys when the values are written?",
    ),
    checks.Question(
        lambda d: "memory" in d.names,
        "Each rank keeps the heads of K and V that it holds, `attention.kv_heads` of them, in the dtype of the "
        "attention's weights, for max_length tokens. Which of these sizes is another, and what would it cost?",
    ),
    checks.Question(
        lambda d: "length at first" in d.names,
        "How many tokens are in a cache that has just been made?",
    ),
    checks.Question(
        lambda d: IN_PLACE in d.names or (NOT_COPIED in d.names and VIEWS not in d.names),
        "The room was there from the start. Which line makes new tensors instead of writing into it? A cache that is "
        "concatenated anew for every token is copied, whole, for every token.",
    ),
    checks.Question(
        lambda d: "length" in d.names,
        "How many tokens are there after an append of 3 and one of 2?",
    ),
    checks.Question(
        lambda d: bool({"keys so far", "values so far"} & d.names),
        "append returns all keys and values so far, [b, m, length, d]: the old ones in front, then the new ones, none "
        "of the empty room. Which slice did you write, which do you return, and had `length` grown in between?",
    ),
    checks.Question(
        lambda d: VIEWS in d.names,
        "A slice of a tensor is a view: it costs nothing. Which call copies all keys so far at every step?",
    ),
    checks.Question(
        lambda d: OVERFLOW in d.names,
        "5 tokens are there, 3 more come, and there is room for 7. A slice that ends after the end is simply shorter: "
        "who notices? Compare before you write, and name the numbers.",
    ),
    checks.Question(
        lambda d: UNTOUCHED in d.names,
        "The ValueError comes too late: something was written or counted before it. What comes first?",
    ),
    checks.Question(
        lambda d: FULL in d.names,
        "5 tokens are there, 2 more come, and there is room for 7: they fit, and the cache is full. How many are too "
        "many: as many as `max_length`, or more?",
    ),
)

STEP_QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        on_any_out(plain.FROM_ZERO),
        "The first piece is right, and then the positions begin at 0 again. Who knows how many tokens came before?",
    ),
    checks.Question(
        on_any_out(plain.TOO_LATE),
        "The positions begin where the cache ends *after* this step. When do you ask for `cache.length`?",
    ),
    checks.Question(
        on_any_out(plain.FROM_ONE),
        "Your positions begin at 1. Scores depend on differences of positions only, so the numbers are off by no more "
        "than a rounding error here. But a prompt is turned from position 0 on everywhere else. Which position has a "
        "token that comes when `cache.length` is 0?",
    ),
    checks.Question(
        on_any_out(plain.UNTURNED, plain.NO_TURNS),
        "Queries and keys are turned to their positions, and a key is turned once, before it is kept. Which call of "
        "`rotate` is missing?",
    ),
    checks.Question(
        on_any_out(plain.OTHER_BASE),
        "The angles are those of another base. Which argument of `rotary_angles` says how fast they grow, and which "
        "base has this attention?",
    ),
    checks.Question(
        on_any_out(plain.ALL_TURNED), "Rotary positions are for scores. Which of q, k and v are in the scores?"
    ),
    checks.Question(
        on_any_out(plain.FORGETFUL),
        "The queries see the keys of this piece only. What does `append` return, and what do you hand to attend?",
    ),
    checks.Question(
        on_any_out(plain.TILED),
        "Head i of q belongs to head i // (n / m) of k. Does `repeat` give k0 k1 k0 k1 or k0 k0 k1 k1?",
    ),
    checks.Question(
        on_any_out(plain.TOP_LEFT),
        "The mask has its triangle at the top left: it is made from the new tokens' number alone, as if they were the "
        "first ones. Your attend of exercise 6.1 knows better.",
    ),
    checks.Question(
        on_any_out(plain.NO_MASK),
        "Several tokens come in one piece here: may the first of them look at the second? Generation is causal.",
    ),
    checks.Question(
        lambda d: bool(d.names) and all(name.startswith("traffic") for name in d.names),
        "The numbers are right. Keys and values never leave their rank: which line sends more than the one sum of "
        "b·s·h that `out` brings with it?",
    ),
    checks.Question(
        lambda d: "length" in d.names,
        "Each piece is appended once. How many tokens does your cache hold after a text of 6?",
    ),
    checks.Question(
        lambda d: any(name.startswith("out") for name in d.names) and not d.malformed,
        "In order: q, k, v of the new tokens; turn q and k to their positions; append k and v; as many heads of k and "
        "v as of q; attend, causal; merge; `attention.out`. Where does your order differ? Begin with the first piece, "
        "with p = 1.",
    ),
)
