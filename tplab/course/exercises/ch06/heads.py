"""The check for exercise 6.1, in which learners split tensors into heads, attend, and merge the heads again.

The check runs in a single process, because heads don't depend on each other.
"""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.course.checks import Twin
from tplab.course.exercises.ch06 import plain

VIEWED = "what a mere reshape to [b, n, s, d] gives, without moving the heads in front of the sequence"
EVERY_NTH = "what comes out when head i takes every n-th column, starting at i"
MERGED_BY_VIEW = "what a mere reshape to [b, s, n·d] gives, without moving the sequence back in front of the heads"
MERGED_EVERY_NTH = "what comes out when the columns of the heads are dealt out one by one"

Case = tuple[int, int, int, int, int, bool]
CASES: tuple[Case, ...] = (  # b, n, s, t, d, causal
    (2, 3, 5, 5, 4, False),
    (1, 2, 6, 6, 3, True),
    (3, 4, 2, 7, 2, False),
    (2, 3, 3, 8, 5, True),
    (2, 5, 1, 4, 3, True),
)
LARGE: Case = (2, 2, 3, 5, 4, True)  # as many queries as in an earlier case, but fewer keys
OFFSET = 900.0  # added to all scores of the first head, subtracted from those of the second; exp(900) overflows


@checks.exercise("6.1", "Heads")
def heads(
    split_heads: Callable[..., Any], attend: Callable[..., Any], merge_heads: Callable[..., Any]
) -> checks.Verdict:
    for twin, case in product(checks.twins.ALONE, CASES):
        b, n, s, t, d, causal = case
        generator = checks.fresh_generator()

        def drawn(*shape: int) -> Tensor:
            return checks.twins.given(twin, checks.random_tensor(generator, *shape))  # noqa: B023 (called immediately)

        check_split_and_merge(split_heads, merge_heads, drawn(b, s, n * d), drawn(b, n, s, d), twin)
        q, k, v = (drawn(b, n, length, d).requires_grad_() for length in (s, t, t))
        check_attend(attend, q, k, v, causal, drawn(b, n, s, d), twin)
    b, n, s, t, d, causal = LARGE
    generator = checks.fresh_generator()
    q, k, v = (checks.random_tensor(generator, b, n, length, d) for length in (s, t, t))
    k[..., 0] = math.sqrt(OFFSET * math.sqrt(d))
    q[..., 0] = torch.tensor([1.0, -1.0])[:, None] * k[:, :, :s, 0]
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    check_attend(attend, q, k, v, causal, checks.random_tensor(generator, b, n, s, d), None, "large scores")
    return checks.Verdict("The queries are the last s of t positions, so the same attend will do for a cache.")


def check_split_and_merge(split_heads: Any, merge_heads: Any, wide: Tensor, apart: Tensor, twin: Twin | None) -> None:
    b, n, s, d = apart.shape
    before = checks.Snapshot(y=wide, heads=apart)
    with checks.twins.calling(twin, f"split_heads(a tensor {list(wide.shape)}, {d})", SPLIT_CRASH) as splitting:
        seen = {"split_heads": split_heads(wide, d)}
    with checks.twins.calling(twin, f"merge_heads(a tensor {list(apart.shape)})", MERGE_CRASH) as merging:
        seen["merge_heads"] = merge_heads(apart)
    seen |= splitting.claims(seen) | merging.claims(seen)
    alike = {
        "split_heads": {
            VIEWED: [wide.reshape(b, n, s, d)],
            EVERY_NTH: [wide.unflatten(-1, (d, n)).permute(0, 3, 1, 2)],
        },
        "merge_heads": {
            MERGED_BY_VIEW: [apart.reshape(b, s, n * d)],
            MERGED_EVERY_NTH: [apart.permute(0, 2, 3, 1).flatten(2)],
        },
    }
    checks.verify(
        "6.1",
        1,
        [seen | {"inputs unchanged": before.changed()}],
        [{"split_heads": plain.split(wide, d), "merge_heads": plain.merge(apart)}],
        questions=[*checks.twins.asked_first(twin), *SHAPE_QUESTIONS],
        lookalikes=alike,
        note=" ".join(filter(None, [f"b = {b}, n = {n}, s = {s}, d = {d}", checks.twins.note(twin)])),
        alone=True,
        tol=checks.twins.tolerance(twin, 1e-9),
    )


def check_attend(
    attend: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, dy: Tensor, twin: Twin | None, note: str = ""
) -> None:
    (s, t), leaves = (q.shape[2], k.shape[2]), {"q": q, "k": k, "v": v}
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    right = plain.attend(exact["q"], exact["k"], exact["v"], causal)
    expected = checks.twins.expected(twin, {"attend": right.detach()} | gradients(right, exact, dy))
    before = checks.Snapshot(**leaves)
    shapes = ", ".join(f"{name} {list(leaf.shape)}" for name, leaf in leaves.items())
    with checks.twins.calling(twin, f"attend({shapes}, causal={causal})", ATTEND_CRASH) as watch:
        out = attend(q, k, v, causal=causal)
        seen = {"attend": checks.portable(out)} | gradients(out, leaves, dy)
    seen |= watch.claims({"attend": out})
    with torch.no_grad():
        alike = {label: [mistake(q, k, v, causal)] for label, mistake in plain.MISTAKES.items()}
    if not causal:
        alike.pop(plain.NO_MASK)
        alike["what comes out with a causal mask"] = [plain.attend(q.detach(), k.detach(), v.detach(), True)]
    checks.verify(
        "6.1",
        1,
        [seen | {"inputs unchanged": before.changed()}],
        [expected],
        questions=[*[LARGE_QUESTION] * bool(note), *checks.twins.asked_first(twin), *ATTEND_QUESTIONS],
        lookalikes={"attend": alike},
        note=", ".join(filter(None, [f"attend with {s} queries, {t} keys, causal={causal}", note]))
        + f" {checks.twins.note(twin)}" * bool(twin),
        alone=True,
        tol=checks.twins.tolerance(twin, 1e-9),
    )


def gradients(out: Any, leaves: dict[str, Tensor], dy: Tensor) -> dict[str, Any]:
    """Return dq, dk and dv for the upstream gradient dy, or None for each if autograd can't compute them."""
    if not isinstance(out, Tensor) or out.shape != dy.shape or not out.requires_grad:
        return dict.fromkeys(("dq", "dk", "dv"))
    found = torch.autograd.grad(out, list(leaves.values()), dy.to(out.dtype), allow_unused=True)
    return {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}


SPLIT_CRASH = (
    "How many heads are there, if every one has head_dim of the last dimension's columns? Write the shape next to each "
    "line: [b, s, n·d], [b, s, n, d], [b, n, s, d]."
)
MERGE_CRASH = "It undoes split_heads, step by step in the opposite order: [b, n, s, d], [b, s, n, d], [b, s, n·d]."
ATTEND_CRASH = (
    "Write the shape next to each line: q [b, n, s, d] times k transposed [b, n, d, t] is [b, n, s, t]; times "
    "v [b, n, t, d] it is [b, n, s, d]. There may be fewer queries than keys, and the next call may have other sizes."
)

LARGE_QUESTION = checks.Question(
    lambda d: True,
    "Your code is correct for small scores. Here, all scores of the first head are around 900, and all scores of the "
    "second head are around -900. Is a hidden score still far below the others, as it would be with -torch.inf? And "
    "does your softmax compute exp(900), which is infinite? (`torch.softmax` subtracts the maximum first.)",
)

SHAPE_QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        checks.has_kind("split_heads", VIEWED),
        "A head is d neighbouring numbers of *one* token. Which numbers stand next to each other in memory, and does "
        "your reshape keep a token's numbers together? Cut the last dimension first, then exchange two dimensions.",
    ),
    checks.Question(
        checks.has_kind("split_heads", EVERY_NTH),
        "Head 0 is columns 0 to d - 1, head 1 is columns d to 2d - 1. In which order do the two sizes stand when you "
        "cut the last dimension?",
    ),
    checks.Question(
        checks.has_kind("split_heads", "shape", "transposed"),
        "The result is [b, n, s, d], and head_dim is d, the width of one head, not the number of heads. Which "
        "dimension of yours is which?",
    ),
    checks.Question(
        checks.has_kind("merge_heads", MERGED_BY_VIEW, "shape", "transposed"),
        "merge_heads undoes split_heads: the numbers of one token must stand next to each other again. Which two "
        "dimensions change places before the last two become one?",
    ),
    checks.Question(
        checks.has_kind("merge_heads", MERGED_EVERY_NTH),
        "After merging, head 0 is columns 0 to d - 1 again. Which two dimensions did you flatten, and in which order?",
    ),
)

ATTEND_QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        checks.has_kind("attend", plain.BY_H),
        "A score is a product of two vectors of d numbers, of one head. Which width grows it, and so which one belongs "
        "under the square root?",
    ),
    checks.Question(
        checks.has_kind("attend", plain.NO_SCALE, plain.BY_D, plain.BY_T, "multiple"),
        "softmax(q kᵀ / √d): by what are your scores divided? d is the last dimension of q.",
    ),
    checks.Question(
        checks.has_kind("attend", plain.OVER_QUERIES, plain.OVER_HEADS),
        "For each query the weights of all keys add up to 1. Which dimension of the scores [b, n, s, t] counts keys?",
    ),
    checks.Question(
        checks.has_kind("attend", plain.NO_MASK),
        "Here causal is True: which keys may the first of these queries look at?",
    ),
    checks.Question(
        checks.has_kind("attend", "what comes out with a causal mask"),
        "Here causal is False: every query looks at every key.",
    ),
    checks.Question(
        checks.has_kind("attend", plain.TOP_LEFT),
        "The queries are the *last* s of t positions: the first query here stands at position t - s, behind all the "
        "keys before it. At which corner of [s, t] does the triangle end? (`is_causal=True` of torch puts it at the "
        "other one.)",
    ),
    checks.Question(
        checks.has_kind("attend", plain.THE_PAST),
        "A token sees itself and what stands before it. Which side of the diagonal is hidden?",
    ),
    checks.Question(
        checks.has_kind("attend", plain.ONE_MORE),
        "Each query sees one key of the future. Write the mask down for s = t = 3: in which column does the first row "
        "begin to hide?",
    ),
    checks.Question(
        checks.has_kind("attend", plain.FILLED_WITH_ZERO),
        "A score of 0 is not nothing: its exponential is 1. Which score has an exponential of 0?",
    ),
    checks.Question(
        checks.has_kind("attend", plain.AFTER_SOFTMAX),
        "The weights of the keys that a query sees must add up to 1. What do they add up to when some are removed "
        "after the softmax?",
    ),
    checks.Question(
        checks.has_kind("attend", "nan"),
        "A softmax over nothing but -inf is NaN: some query sees no key at all. May a token look at itself?",
    ),
    checks.Question(
        checks.has_kind("attend", "rounded"),
        "The steps are right. The inputs are float64 here: which of your lines goes through float32?",
    ),
    checks.Question(
        lambda d: "attend" not in d.names,
        "The output is right, a gradient is not. Which part of attend is cut off from autograd?",
    ),
    checks.Question(
        checks.has_kind("attend", "shape", "transposed"),
        "The result has the shape of q, [b, n, s, d]. Which product gave another one?",
    ),
    checks.Question(
        lambda d: not d.malformed,
        "softmax(q kᵀ / √d) v, for each head alone. Take one query and one head, compute it by hand, and compare "
        "step by step.",
    ),
)
