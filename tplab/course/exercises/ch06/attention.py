"""The check for exercise 6.2, ParallelAttention, in which every rank holds complete heads."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    Question,
    Verdict,
    ask_about_group,
    check_cases,
    exercise,
    has_kind,
    make_group,
    run_ranks,
)
from tplab.course.exercises.ch06.attentions import (
    COMMON_QUESTIONS,
    DIM,
    HEADS,
    HIDDEN,
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
from tplab.runtime import device
from tplab.tensor.sharding import Sharding

BY_H = "what comes out when the scores are divided by the square root of the width of all heads"
OVER_QUERIES = "what comes out when the softmax runs over the queries"
INTERLEAVED = "what comes out when every head's q, k and v are taken to stand next to each other"
SWAPPED = "what comes out when q and k change places"
KEYS_AS_VALUES = "what comes out when k and v change places"
CUT_INSIDE = "what comes out when every head is cut inside, so that each rank has a softmax of partial scores"
ONE_HEAD = "what comes out with one wide head per rank"
HEADS_MIXED = "what comes out when the columns are reshaped to heads without moving the heads in front of the sequence"
NOT_MERGED = "what comes out when the heads are reshaped to columns without moving the sequence back in front"
EVERY_NTH = "what comes out when head i takes every n-th column, starting at i"


def thirds(y: Tensor, head_dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (split(part, head_dim) for part in y.chunk(3, -1))
    return q, k, v


def by_h(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    return merge(attend(*thirds(y), causal=causal, scale=(n * DIM) ** -0.5))


def over_queries(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = thirds(y)
    scores = q @ k.transpose(2, 3) / DIM**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return merge(scores.softmax(2) @ v)


def interleaved(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = y.unflatten(-1, (n, 3, DIM)).permute(3, 0, 2, 1, 4)
    return merge(attend(q, k, v, causal))


def cut_inside(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = thirds(y, n * DIM // HEADS)
    return merge(attend(q, k, v, causal))


def one_head(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = thirds(y, n * DIM)
    return merge(attend(q, k, v, causal))


def every_nth(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = (part.unflatten(-1, (DIM, n)).permute(0, 3, 1, 2) for part in y.chunk(3, -1))
    return attend(q, k, v, causal).permute(0, 2, 3, 1).flatten(2)


def heads_mixed(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    b, s, _ = y.shape
    q, k, v = (part.reshape(b, n, s, DIM) for part in y.chunk(3, -1))
    return merge(attend(q, k, v, causal))


def not_merged(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    b, s, width = y.shape
    q, k, v = thirds(y)
    return attend(q, k, v, causal).reshape(b, s, width // 3)


def swapped(*order: int) -> Local:
    def local(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
        q, k, v = (thirds(y)[i] for i in order)
        return merge(attend(q, k, v, causal))

    return local


@dataclass(frozen=True)
class Fused(Attention):
    """One way to build and run a ParallelAttention(hidden_size, num_heads)."""

    weight: ClassVar[str] = "qkv.weight"
    fused_bias: ClassVar[str] = "qkv.bias"
    mistakes: ClassVar[dict[str, Local]] = {
        BY_H: by_h,
        OVER_QUERIES: over_queries,
        CUT_INSIDE: cut_inside,
        ONE_HEAD: one_head,
        INTERLEAVED: interleaved,
        EVERY_NTH: every_nth,
        HEADS_MIXED: heads_mixed,
        NOT_MERGED: not_merged,
        SWAPPED: swapped(1, 0, 2),
        KEYS_AS_VALUES: swapped(0, 2, 1),
    }

    @property
    def sizes(self) -> tuple[int, ...]:
        return (HIDDEN, HEADS)

    @property
    def sharding(self) -> Sharding:
        return Sharding(0, 3)


CASES = (
    Fused(),
    Fused(causal=True, leading=(2, 7), transposed=True),
    Fused(causal=True, bias=False, leading=(1, 6)),
    Fused(groups=GROUPS),
)


def build_in_pairs(attention_class: Any) -> None:
    """Build an attention layer with six heads, which each group of two ranks can share evenly. Runs on every rank."""
    attention_class(24, 6, group=make_group(GROUPS), device=device())


WHOSE_SIZE = (
    "Two ranks share 6 heads evenly, four don't. Which line takes the number of all ranks instead of those in `group`?"
)


@exercise("6.2", "ParallelAttention")
def parallel_attention(attention_class: Any) -> Verdict:
    check_cases(
        "6.2", attention_class, CASES, draw=draw, give=give, run=run, expect=expect, questions=QUESTIONS,
        crash=lambda case: case.crash(CRASH), whose_group=WHOSE_GROUP,
    )  # fmt: skip
    check_refusal("6.2", attention_class, 4, {(24, 6): HALF_A_HEAD})
    run_ranks(build_in_pairs, 4, attention_class, question=ask_about_group(WHOSE_SIZE), note=f"6 heads {IN_GROUPS}")
    return Verdict("One all-reduce of b·s·h numbers forward and one backward, and no head knows of another rank.")


CRASH = (
    "Write the shape of one rank's tensor next to each line: [b, s, h], [b, s, 3h/p], three of [b, s, h/p], "
    "three of [b, a/p, s, d], [b, a/p, s, d], [b, s, h/p], [b, s, h]. Which sizes are a rank's own? "
    "(If the error is about dtypes: `device` and `dtype` are for both layers.)"
)
WHOSE_GROUP = (
    "The attention is built from two layers. Which of them was not given `group`, or which size was asked "
    "of the default group of all ranks?"
)
HALF_A_HEAD = (
    "6 heads can't be divided over 4 ranks. The width h = 24 can, so the layers don't mind: every rank would hold one "
    "and a half heads. Which size has to be divisible by p?"
)

QUESTIONS = (
    Question(
        lambda d: "parameters" in d.names,
        "`self.qkv` goes from h to 3h and is cut by columns, `self.out` goes from h to h and is cut by rows; both are "
        "parallel layers, with a bias only if `bias`. Which parameter has another name or shape?",
    ),
    Question(
        lambda d: "dim=1" in d.text("sharding of qkv.weight").partition("expected")[0],
        "`self.qkv` is cut along its inputs here. Which of the two layers leaves its output split, heads apart, and "
        "which one takes a split input and adds up?",
    ),
    Question(
        lambda d: "sharding of qkv.weight" in d.names,
        "Rank 0 must hold its heads' rows of Wq, of Wk and of Wv. How many matrices are fused in `qkv`, and which "
        "argument of ColumnParallelLinear says so? Without it a rank gets queries that have no keys.",
    ),
    Question(
        has_kind("out", CUT_INSIDE),
        "Every rank has a piece of every head here, and takes a softmax of a part of each score. How wide is a head on "
        "a rank: d, or d/p? And how many heads has a rank?",
    ),
    Question(
        has_kind("out", ONE_HEAD),
        "Here every rank has one head as wide as all its columns. Which number does split_heads want?",
    ),
    Question(
        has_kind("out", INTERLEAVED),
        "The shard is this rank's rows of Wq, then those of Wk, then those of Wv. Which columns of the product are q?",
    ),
    Question(
        has_kind("out", SWAPPED, KEYS_AS_VALUES),
        "The weight is [Wq; Wk; Wv]: in which order do the three come out of the fused product, and in which order "
        "does attend take them?",
    ),
    Question(
        has_kind("out", EVERY_NTH, HEADS_MIXED, NOT_MERGED),
        "The heads are cut in another way than in exercise 6.1. Which of its functions does that for you?",
    ),
    Question(
        has_kind("out", BY_H),
        "By what are the scores divided? A score is the product of two vectors of d numbers, however many heads and "
        "ranks there are.",
    ),
    Question(
        has_kind("out", OVER_QUERIES),
        "For each query the weights of all keys add up to 1. Which dimension of the scores counts keys?",
    ),
    *COMMON_QUESTIONS,
)
