"""The check of exercise 6.2, ParallelAttention: whole heads on every rank."""

from typing import Any

from torch import Tensor

from tplab.course.chapters.ch06 import plain
from tplab.course.chapters.ch06.attentions import check_attention
from tplab.course.chapters.ch06.cases import DIM, HEADS, HIDDEN, Case, Kind
from tplab.course.chapters.ch06.questions import COMMON_QUESTIONS, check_refusal
from tplab.course.checks import GROUPS, Question, Verdict, exercise, has_kind
from tplab.tensor.sharding import Sharding

CASES = (
    Case(),
    Case(causal=True, leading=(2, 7), transposed=True),
    Case(causal=True, bias=False, leading=(1, 6)),
    Case(groups=GROUPS),
)

INTERLEAVED = "what comes out when every head's q, k and v are taken to stand next to each other"
SWAPPED = "what comes out when q and k change places"
KEYS_AS_VALUES = "what comes out when k and v change places"
CUT_INSIDE = "what comes out when every head is cut inside, so that each rank has a softmax of partial scores"
ONE_HEAD = "what comes out with one wide head per rank"
HEADS_MIXED = "what comes out when the columns are reshaped to heads without moving the heads in front of the sequence"
NOT_MERGED = "what comes out when the heads are reshaped to columns without moving the sequence back in front"
EVERY_NTH = "what comes out when head i takes every n-th column, starting at i"


def thirds(y: Tensor, head_dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (plain.split(part, head_dim) for part in y.chunk(3, -1))
    return q, k, v


def interleaved(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = y.unflatten(-1, (n, 3, DIM)).permute(3, 0, 2, 1, 4)
    return plain.merge(plain.attend(q, k, v, causal))


def cut_inside(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = thirds(y, n * DIM // HEADS)
    return plain.merge(plain.attend(q, k, v, causal))


def one_head(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = thirds(y, n * DIM)
    return plain.merge(plain.attend(q, k, v, causal))


def every_nth(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = (part.unflatten(-1, (DIM, n)).permute(0, 3, 1, 2) for part in y.chunk(3, -1))
    return plain.attend(q, k, v, causal).permute(0, 2, 3, 1).flatten(2)


def heads_mixed(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    b, s, _ = y.shape
    q, k, v = (part.reshape(b, n, s, DIM) for part in y.chunk(3, -1))
    return plain.merge(plain.attend(q, k, v, causal))


def not_merged(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    b, s, width = y.shape
    q, k, v = thirds(y)
    return plain.attend(q, k, v, causal).reshape(b, s, width // 3)


def swapped(*order: int) -> Any:
    def local(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
        q, k, v = (thirds(y)[i] for i in order)
        return plain.merge(plain.attend(q, k, v, causal))

    return local


def with_attend(mistake: plain.Attend) -> Any:
    def local(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
        q, k, v = thirds(y)
        return plain.merge(mistake(q, k, v, causal))

    return local


KIND = Kind(
    sizes=lambda case: (HIDDEN, HEADS),
    weight="qkv.weight",
    bias="qkv.bias",
    sharding=lambda case: Sharding(0, 3),
    mistakes={
        plain.NO_MASK: with_attend(plain.MISTAKES[plain.NO_MASK]),
        plain.BY_H: with_attend(plain.MISTAKES[plain.BY_H]),
        plain.OVER_QUERIES: with_attend(plain.MISTAKES[plain.OVER_QUERIES]),
        CUT_INSIDE: cut_inside,
        ONE_HEAD: one_head,
        INTERLEAVED: interleaved,
        EVERY_NTH: every_nth,
        HEADS_MIXED: heads_mixed,
        NOT_MERGED: not_merged,
        SWAPPED: swapped(1, 0, 2),
        KEYS_AS_VALUES: swapped(0, 2, 1),
    },
    crash="Write the shape of one rank's tensor next to each line: [b, s, h], [b, s, 3h/p], three of [b, s, h/p], "
    "three of [b, a/p, s, d], [b, a/p, s, d], [b, s, h/p], [b, s, h]. Which sizes are a rank's own? "
    "(If the error is about dtypes: `device` and `dtype` are for both layers.)",
    whose_group="The attention is built from two layers. Which of them was not given `group`, or which size was asked "
    "of the default group of all ranks?",
)

QUESTIONS = (
    Question(
        lambda d: "parameters" in d.names,
        "`self.qkv` goes from h to 3h and is cut by columns, `self.out` goes from h to h and is cut by rows; both are "
        "parallel layers, with a bias only if `bias`. Which parameter has another name or shape?",
    ),
    Question(
        lambda d: "dim=1" in d.text("sharding of qkv.weight").partition("right")[0],
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
        has_kind("out", plain.NO_MASK),
        "Here the attention was built with causal=True. Which line knows about `self.causal`?",
    ),
    *COMMON_QUESTIONS,
)


@exercise("6.2", "ParallelAttention")
def parallel_attention(attention_class: Any) -> Verdict:
    check_attention("6.2", attention_class, KIND, CASES, QUESTIONS)
    check_refusal("6.2", attention_class, 4, {(24, 6): HALF_A_HEAD})
    return Verdict("One all-reduce of b·s·h numbers forward and one backward, and no head knows of another rank.")


HALF_A_HEAD = (
    "6 heads can't be divided over 4 ranks. The width h = 24 can, so the layers don't mind: every rank would hold one "
    "and a half heads. Which size has to be divisible by p?"
)
