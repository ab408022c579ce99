"""The check for exercise 6.4, grouped-query attention, with fewer K and V heads than Q heads, or even than ranks."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from tplab.course.checks import GROUPS, Differences, Question, Verdict, check_cases, exercise, has_kind
from tplab.course.exercises.ch06.attentions import (
    COMMON_QUESTIONS,
    DIM,
    HEADS,
    HIDDEN,
    K_V_AGAIN,
    MEAN,
    OWN_QUERIES,
    WHOLE_GROUP,
    Attention,
    Local,
    attend,
    check_refusal,
    draw,
    expect,
    give,
    merge,
    run,
    split,
)
from tplab.tensor.sharding import Block, Sharding

TILED = "what comes out when query head i looks at head i mod m of K and V"
FIRST = "what comes out when all query heads of a rank look at its first head of K and V"
BY_GROUPS = "what comes out when the rows are taken to be sorted by groups, queries, key, value of each"
COPIED = ("dWk", "dWv", "dbk", "dbv")


def parts(y: Tensor, n: int, m: int) -> list[Tensor]:
    return [split(part) for part in y.split([n * DIM, m * DIM, m * DIM], -1)]


def tiled(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = parts(y, n, m)
    return merge(attend(q, k.repeat(1, n // m, 1, 1), v.repeat(1, n // m, 1, 1), causal))


def first(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = parts(y, n, m)
    return merge(attend(q, k[:, :1].repeat(1, n, 1, 1), v[:, :1].repeat(1, n, 1, 1), causal))


def by_groups(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    groups = y.unflatten(-1, (m, n // m + 2, DIM)).permute(0, 2, 3, 1, 4)  # [b, m, n/m + 2, s, d]
    q, k, v = groups.split([n // m, 1, 1], 2)
    k, v = (part.expand_as(q).flatten(1, 2) for part in (k, v))
    return merge(attend(q.flatten(1, 2), k, v, causal))


@dataclass(frozen=True)
class Grouped(Attention):
    """One way to build and run a GroupedAttention(hidden_size, num_heads, num_kv_heads)."""

    weight: ClassVar[str] = "qkv_weight"
    fused_bias: ClassVar[str] = "qkv_bias"
    mistakes: ClassVar[dict[str, Local]] = {TILED: tiled, FIRST: first, BY_GROUPS: by_groups}

    @property
    def sizes(self) -> tuple[int, ...]:
        return (HIDDEN, HEADS, self.kv_heads)

    @property
    def sharding(self) -> Sharding:
        rows = (HIDDEN, self.kv_heads * DIM, self.kv_heads * DIM)
        return Sharding(0, blocks=tuple(Block(size, unit=DIM) for size in rows))


CASES = (
    Grouped(kv_heads=2),
    Grouped(kv_heads=1, causal=True, leading=(2, 7), transposed=True),
    Grouped(kv_heads=4, causal=True, bias=False, leading=(1, 6)),
    Grouped(kv_heads=1, bias=False),
    Grouped(kv_heads=1, groups=GROUPS),
)


@exercise("6.4", "Grouped-query attention")
def grouped_attention(attention_class: Any) -> Verdict:
    check_cases(
        "6.4", attention_class, CASES, draw=draw, give=give, run=run, expect=expect, questions=QUESTIONS,
        crash=lambda case: case.crash(CRASH), whose_group=WHOSE_GROUP,
    )  # fmt: skip
    check_refusal("6.4", attention_class, 4, {(24, 6, 2): HALF_A_HEAD, (24, 12, 3): UNEVEN_COPIES})
    return Verdict("f once more, for a weight: copies stay equal because each of them gets the sum.")


CRASH = (
    "Write the shape of one rank's tensor next to each line, with n heads of q and m of k and v: [b, s, h], "
    "[b, s, (n + 2m)·d], then [b, n, s, d] and twice [b, m, s, d], then three of [b, n, s, d]. "
    "How many ranks share a head of k, if there are p ranks and m heads of it? That is `copies`, 1 where there is one "
    "head or more for each rank, and no error."
)
WHOSE_GROUP = (
    "Which size was asked of the default group of all ranks, or which collective runs there? `self.group` "
    "is the group of the layer, `self.copies_group` that of the copies."
)
HALF_A_HEAD = "6 heads of Q can't be divided over 4 ranks, though h = 24 can. Which size has to be divisible by p?"
UNEVEN_COPIES = (
    "3 heads of K and V over 4 ranks: rank 1 has queries 3, 4 and 5, which belong to heads 0, 1 and 1. The 3 heads can "
    "neither be divided, nor copied evenly: raise ValueError."
)


def only(*names: str) -> Any:
    """Return a predicate that tests whether some of these results, and no others except the traffic, are wrong."""
    return lambda d: bool(_numbers(d)) and _numbers(d) <= set(names)


def _numbers(d: Differences) -> set[str]:
    return {name for name in d.names if "traffic" not in name}


QUESTIONS = (
    Question(
        lambda d: "parameters" in d.names,
        "How many heads of q has each rank, and how many of k and v? Never less than one: where p is larger than "
        "num_kv_heads, neighbours hold the same one. The fused weight has (n + 2m)·d rows.",
    ),
    Question(
        only("dbk", "dbv", "dbq"),
        "The weight's gradient is right, the bias's is not. Its rows of K and V are copies too, and what a copy of "
        "them gets is a summand as well.",
    ),
    Question(
        lambda d: any(has_kind(name, OWN_QUERIES)(d) for name in COPIED),
        "The output is right. But a copy of a head of K sees only its own rank's queries, so its gradient is one "
        "summand. Who has the others, and which operator adds up a gradient and does nothing forward?",
    ),
    Question(
        lambda d: any(has_kind(name, WHOLE_GROUP)(d) for name in COPIED),
        "You sum over ranks that hold *another* head of K. Only the copies of one head belong together: which group "
        "is that?",
    ),
    Question(
        lambda d: any(has_kind(name, MEAN)(d) for name in COPIED),
        "Each copy's gradient is a summand of the whole, not an estimate of it. Mean or sum?",
    ),
    Question(
        has_kind("dx", K_V_AGAIN),
        "dx counts the part through K and V once for every copy. You sum the gradient of k and v themselves: f then "
        "adds that sum up once more for each copy. What is shared by the copies, the activation or the weight?",
    ),
    Question(
        only("dWq", "dbq"),
        "Every rank has queries of its own: nobody else holds them. Which rows does your sum take, and which belong "
        "to K and V?",
    ),
    Question(
        lambda d: bool({"dWq", "dbq"} & d.names) and "out" not in d.names and "dx" not in d.names,
        "The gradients of q are summed as well. Nobody else holds these heads: which rows of the fused weight are "
        "copies?",
    ),
    Question(
        has_kind("out", TILED),
        "With 4 heads of q and 2 of k, heads 0 and 1 share k0, heads 2 and 3 share k1. Does `repeat` give k0 k1 k0 k1 "
        "or k0 k0 k1 k1? And `repeat_interleave`?",
    ),
    Question(
        has_kind("out", FIRST),
        "A rank may hold several heads of k. Which queries belong to which? Head i of q belongs to i // (n / m).",
    ),
    Question(
        has_kind("out", BY_GROUPS),
        "That is Megatron's order of rows. Here a rank holds its rows of Wq, then those of Wk, then those of Wv.",
    ),
    *COMMON_QUESTIONS,
)
