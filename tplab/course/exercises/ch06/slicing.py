"""The check for exercise 6.3, about which rows of a fused weight [Wq; Wk; Wv] belong to a rank. It starts no ranks."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks

MIDDLE = "the plain cut of the whole into p equal pieces"
DEALT = "what comes out when the heads are dealt out one by one: rank r takes heads r, r + p, .."
MODULO = "what comes out when rank r takes head r mod num_kv_heads of K and V"
ALL_KV = "what comes out when every rank keeps all heads of K and V"
QUERIES_ONLY = "this rank's queries, without keys and values"
FIRST_KV = "what comes out when every rank takes the first head of K and V"
KEYS_TWICE = "what comes out with the rows of K in place of those of V"
THIRDS = "what comes out when the whole is taken to be three matrices of one size"
SPLIT_KV = "what comes out when a head of K and V is cut inside"

Sizes = tuple[int, int, int, tuple[int, ...]]
CASES: tuple[Sizes, ...] = (  # num_heads, num_kv_heads, head_dim, and the tensor's other dimensions
    (4, 4, 2, (3,)),
    (8, 4, 3, (5,)),
    (8, 2, 4, (3,)),
    (4, 1, 2, (5,)),
    (8, 2, 2, ()),  # a bias
)


def rows(heads: list[int], first: int, d: int) -> list[int]:
    return [first + head * d + i for head in heads for i in range(d)]


def pick(weight: Tensor, a: int, kv: int, d: int, queries: list[int], keys: list[int], values: list[int]) -> Tensor:
    """Return the rows of the weight that belong to these heads, one head after another."""
    return weight[rows(queries, 0, d) + rows(keys, a * d, d) + rows(values, (a + kv) * d, d)]


@checks.exercise("6.3", "QKV slicing")
def qkv_slicing(shard_qkv: Callable[..., Any]) -> checks.Verdict:
    for twin, p in product(checks.twins.ALONE, (1, 2, 4)):
        for a, kv, d, after in CASES:
            weight = checks.twins.given(twin, checks.random_tensor(checks.fresh_generator(), (a + 2 * kv) * d, *after))
            before, seen = checks.Snapshot(weight=weight), []
            for rank in range(p):
                call = f"shard_qkv(a tensor {list(weight.shape)}, num_heads={a}, num_kv_heads={kv}, rank={rank}, "
                with checks.twins.calling(twin, call + f"world_size={p})", CRASH) as watch:
                    mine = {"rows": shard_qkv(weight, a, kv, rank, p)}
                seen.append(mine | watch.claims(mine))
            right = [pick(weight, a, kv, d, *heads(a, kv, rank, p)) for rank in range(p)]
            changed = before.changed()
            checks.verify(
                "6.3",
                p,
                [mine | {"inputs unchanged": changed} for mine in seen],
                [{"rows": mine} for mine in right],
                questions=[*checks.twins.asked_first(twin), *QUESTIONS],
                lookalikes={"rows": lookalikes(weight, a, kv, d, p)},
                note=f"{a} heads, {kv} of K and V, d = {d}, a tensor {list(weight.shape)}"
                + (f" {checks.twins.note(twin)}" if twin else ""),
            )
    for a, kv, p, ask in REFUSALS:
        checks.must_refuse(
            "6.3",
            lambda a=a, kv=kv, p=p: shard_qkv(torch.zeros((a + 2 * kv) * 4, 3), a, kv, 0, p),  # type: ignore[misc]
            ask,
            what=f"shard_qkv(a tensor [{(a + 2 * kv) * 4}, 3], num_heads={a}, num_kv_heads={kv}, rank=0, "
            f"world_size={p})",
        )
    return checks.Verdict("Three matrices, each cut by whole heads; with fewer heads of K and V than ranks, copied.")


def heads(a: int, kv: int, rank: int, p: int) -> tuple[list[int], list[int], list[int]]:
    queries = list(range(rank * a // p, (rank + 1) * a // p))
    groups = sorted({query * kv // a for query in queries})
    return queries, groups, groups


def lookalikes(weight: Tensor, a: int, kv: int, d: int, p: int) -> dict[str, list[Tensor]]:
    def every_rank(choose: Callable[[int], tuple[list[int], list[int], list[int]]]) -> list[Tensor]:
        return [pick(weight, a, kv, d, *choose(rank)) for rank in range(p)]

    def right(rank: int) -> tuple[list[int], list[int], list[int]]:
        return heads(a, kv, rank, p)

    m, alike = max(1, kv // p), {}
    if p > 1:
        if weight.shape[0] % p == 0:
            alike[MIDDLE] = list(weight.chunk(p))
        if len(weight) % (3 * p) == 0 and kv < a:
            alike[THIRDS] = [torch.cat([part.chunk(p)[rank] for part in weight.chunk(3)]) for rank in range(p)]
        dealt = [list(range(rank, kv, p)) or [rank % kv] for rank in range(p)]
        alike[DEALT] = every_rank(lambda rank: (list(range(rank, a, p)), dealt[rank], dealt[rank]))
        modulo = [[rank % kv] if kv < p else right(rank)[1] for rank in range(p)]
        alike[MODULO] = every_rank(lambda rank: (right(rank)[0], modulo[rank], modulo[rank]))
        alike[ALL_KV] = every_rank(lambda rank: (right(rank)[0], list(range(kv)), list(range(kv))))
        alike[FIRST_KV] = every_rank(lambda rank: (right(rank)[0], list(range(m)), list(range(m))))
        if kv < p and (kv * d) % p == 0:
            thirds = weight.split([a * d, kv * d, kv * d])
            alike[SPLIT_KV] = [torch.cat([part.chunk(p)[rank] for part in thirds]) for rank in range(p)]
    alike[QUERIES_ONLY] = every_rank(lambda rank: (right(rank)[0], [], []))
    keys = [pick(weight, a, kv, d, right(rank)[0], right(rank)[1], []) for rank in range(p)]
    alike[KEYS_TWICE] = [torch.cat([part, part[a * d // p :]]) for part in keys]
    return alike


REFUSALS = (
    (6, 2, 4, "6 heads can't be shared out among 4 ranks: each takes whole heads, and as many as any other."),
    (2, 1, 4, "There are fewer heads of Q than ranks here. Only heads of K and V may be copied."),
    (6, 3, 2, "3 heads of K and V can neither be divided over 2 ranks nor copied to them evenly. Raise ValueError."),
)

CRASH = (
    "By hand for this call: how many rows has a head, and how many heads does the tensor hold in all, those of K and V "
    "included? In which rows does Wk begin, and in which Wv? (If the error is your own refusal: p has to divide "
    "num_kv_heads, *or* be a multiple of it. With fewer heads than ranks, neighbours hold copies.)"
)

QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        checks.has_kind("rows", MIDDLE),
        "Rank 0 got queries and the beginning of the keys, the last rank values only. The three matrices lie on top of "
        "each other: what has to be cut into p pieces, the pile or each of the three?",
    ),
    checks.Question(
        checks.has_kind("rows", THIRDS),
        "Here Wk and Wv have fewer rows than Wq: they hold fewer heads. In which row does Wk begin?",
    ),
    checks.Question(
        checks.has_kind("rows", DEALT),
        "A rank takes neighbouring heads: `RowParallelLinear` cuts Wo so, and head i of Q needs the head of K that it "
        "belongs to. Which heads does rank 1 of 2 take?",
    ),
    checks.Question(
        checks.has_kind("rows", MODULO),
        "Head i of Q belongs to head i // (num_heads / num_kv_heads) of K. With 8 heads of Q, 2 of K and p = 4, rank 1 "
        "has q2 and q3: which head of K do they need?",
    ),
    checks.Question(
        checks.has_kind("rows", FIRST_KV),
        "Every rank has the same head of K and V here. Which one do this rank's queries belong to?",
    ),
    checks.Question(
        checks.has_kind("rows", ALL_KV),
        "Every rank keeps all of K and V. Which of these heads do this rank's queries look at?",
    ),
    checks.Question(
        checks.has_kind("rows", SPLIT_KV),
        "A head of K is cut inside: each rank would have a part of every score. With fewer heads than ranks, "
        "neighbours hold the *same* whole head.",
    ),
    checks.Question(
        checks.has_kind("rows", QUERIES_ONLY), "That is this rank's part of Wq. Where are its keys and values?"
    ),
    checks.Question(checks.has_kind("rows", KEYS_TWICE), "Wv begins where Wk ends. Which row is that?"),
    checks.Question(
        checks.has_kind("rows", "other rank"),
        "The rows are those of another rank. How does the first row depend on the rank?",
    ),
    checks.Question(
        checks.has_kind("rows", "shape", "part", "whole"),
        "A rank's part has (n + 2m)·d rows: n = num_heads / p heads of Q, m of K and as many of V. What is d here, if "
        "the tensor has (num_heads + 2·num_kv_heads)·d rows?",
    ),
    checks.Question(
        lambda d: not d.malformed,
        "Write the row numbers down for 4 heads, 2 of K and V, d = 2 and p = 2: Wq is rows 0 to 7, Wk 8 to 11, Wv 12 "
        "to 15. Which does rank 1 need, and which does yours take?",
    ),
)
