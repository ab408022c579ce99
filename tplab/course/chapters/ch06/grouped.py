"""The check of exercise 6.4: fewer heads of K and V than of Q, perhaps fewer than ranks."""

from typing import Any

from torch import Tensor

from tplab.course.chapters.ch06 import plain
from tplab.course.chapters.ch06.attentions import check_attention
from tplab.course.chapters.ch06.cases import DIM, HEADS, HIDDEN, Case, Kind
from tplab.course.chapters.ch06.questions import COMMON_QUESTIONS, check_refusal
from tplab.course.chapters.ch06.references import K_V_AGAIN, MEAN, OWN_QUERIES, WHOLE_GROUP
from tplab.course.checks import GROUPS, Differences, Question, Verdict, exercise, has_kind
from tplab.tensor.sharding import Block, Sharding

CASES = (
    Case(kv_heads=2),
    Case(kv_heads=1, causal=True, leading=(2, 7), transposed=True),
    Case(kv_heads=4, causal=True, bias=False, leading=(1, 6)),
    Case(kv_heads=1, bias=False),
    Case(kv_heads=1, groups=GROUPS),
)

TILED = "what comes out when query head i looks at head i mod m of K and V"
FIRST = "what comes out when all query heads of a rank look at its first head of K and V"
BY_GROUPS = "what comes out when the rows are taken to be sorted by groups, queries, key, value of each"
COPIED = ("dWk", "dWv", "dbk", "dbv")


def parts(y: Tensor, n: int, m: int) -> list[Tensor]:
    return [plain.split(part, DIM) for part in y.split([n * DIM, m * DIM, m * DIM], -1)]


def tiled(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = parts(y, n, m)
    return plain.merge(plain.attend(q, k.repeat(1, n // m, 1, 1), v.repeat(1, n // m, 1, 1), causal))


def first(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = parts(y, n, m)
    return plain.merge(plain.attend(q, k[:, :1].repeat(1, n, 1, 1), v[:, :1].repeat(1, n, 1, 1), causal))


def by_groups(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    groups = y.unflatten(-1, (m, n // m + 2, DIM)).permute(0, 2, 3, 1, 4)  # [b, m, n/m + 2, s, d]
    q, k, v = groups.split([n // m, 1, 1], 2)
    k, v = (part.expand_as(q).flatten(1, 2) for part in (k, v))
    return plain.merge(plain.attend(q.flatten(1, 2), k, v, causal))


def unmasked(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = parts(y, n, m)
    k, v = (part.repeat_interleave(n // m, 1) for part in (k, v))
    return plain.merge(plain.attend(q, k, v, False))


def sharding(case: Case) -> Sharding:
    sizes = (HIDDEN, case.kv_heads * DIM, case.kv_heads * DIM)
    return Sharding(0, blocks=tuple(Block(size, unit=DIM) for size in sizes))


KIND = Kind(
    sizes=lambda case: (HIDDEN, HEADS, case.kv_heads),
    weight="qkv_weight",
    bias="qkv_bias",
    sharding=sharding,
    mistakes={plain.NO_MASK: unmasked, TILED: tiled, FIRST: first, BY_GROUPS: by_groups},
    crash="Write the shape of one rank's tensor next to each line, with n heads of q and m of k and v: [b, s, h], "
    "[b, s, (n + 2m)·d], then [b, n, s, d] and twice [b, m, s, d], then three of [b, n, s, d]. "
    "How many ranks share a head of k, if there are p ranks and m heads of it? That is `copies`, 1 where there is one "
    "head or more for each rank, and no error.",
    whose_group="Which size was asked of the default group of all ranks, or which collective runs there? `self.group` "
    "is the group of the layer, `self.copies_group` that of the copies.",
)


def only(*names: str) -> Any:
    """Of the numbers only these differ, or some of them; traffic may differ too."""
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
    Question(
        has_kind("out", plain.NO_MASK),
        "Here the attention was built with causal=True. Which line knows about `self.causal`?",
    ),
    *COMMON_QUESTIONS,
)


@exercise("6.4", "Grouped-query attention")
def grouped_attention(attention_class: Any) -> Verdict:
    check_attention("6.4", attention_class, KIND, CASES, QUESTIONS)
    check_refusal("6.4", attention_class, 4, {(24, 6, 2): HALF_A_HEAD, (24, 12, 3): UNEVEN_COPIES})
    return Verdict("f once more, for a weight: copies stay equal because each of them gets the sum.")


HALF_A_HEAD = "6 heads of Q can't be divided over 4 ranks, though h = 24 can. Which size has to be divisible by p?"
UNEVEN_COPIES = (
    "3 heads of K and V over 4 ranks: rank 1 has queries 3, 4 and 5, which belong to heads 0, 1 and 1. The 3 heads can "
    "neither be divided, nor copied evenly: raise ValueError."
)
