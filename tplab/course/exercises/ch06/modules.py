"""The checks of exercises 6.2, ParallelAttention, 6.4, cross-attention, and 6.5, multi-query attention."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tplab.course.checks.cases import GROUPS, Place, random_tensor
from tplab.course.checks.forms.layers import Built, Calls, Layer, Problem, Weight
from tplab.course.checks.observation import Observed
from tplab.course.checks.recorded_traffic import Traffic
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.exercises.ch06 import plain
from tplab.tensor.sharding import Sharding

HEAD_DIM = 4
SMALL = 1 / 3  # the size of weights, so that the softmax doesn't pick a single key
FIRST, LAST = Sharding(0), Sharding(1)


def project(x: Tensor, weight: Tensor, bias: Tensor | None, blocks: int) -> list[Tensor]:
    """Return the heads [b, n, s, d] of each of the matrices that are stacked in a weight."""
    return [plain.heads(part, HEAD_DIM) for part in linear(x, weight, bias).chunk(blocks, -1)]


def output_layer(hidden: int) -> dict[str, Weight]:
    return {"out.weight": Weight("Wo", (hidden, hidden), LAST, SMALL), "out.bias": Weight("bo", (hidden,))}


def partial_sums(
    columns: Callable[[Built, Problem], Tensor], case: Built, problem: Problem, size: int
) -> dict[str, list[Tensor]]:
    """Return each rank's term of the output, plus the final bias if there is one.

    columns: (case, problem) -> the outputs of all heads, [b, s, n d]
    """
    bias = problem.weights.get("out.bias")
    pairs = zip(columns(case, problem).chunk(size, -1), problem.weights["out.weight"].chunk(size, 1), strict=True)
    return {"partial sum" + " plus the bias" * (bias is not None): [linear(y, w, bias) for y, w in pairs]}


# 6.2: self-attention


def self_attention(case: Built, x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    """Return the outputs of all heads, [b, s, n d]."""
    q, k, v = project(x, w["Wqkv"], w.get("bqkv"), 3)
    return plain.attention(q, k, v, plain.allowed(x.shape[1], x.shape[1], bool(case.options.get("causal"))))


def fused(heads: int) -> Layer:
    hidden = heads * HEAD_DIM
    rows = Sharding(0, stride=3)
    return Layer(
        of="ParallelAttention", sizes=(hidden, heads), width=hidden, any_size=1,
        weights={
            "qkv.weight": Weight("Wqkv", (3 * hidden, hidden), rows, SMALL),
            "qkv.bias": Weight("bqkv", (3 * hidden,), rows), **output_layer(hidden),
        },
        formula=lambda case, x, w: linear(self_attention(case, x, w), w["Wo"], w.get("bo")),
        forward_traffic=lambda case, x, out: [("all_reduce", out.numel())],
        backward_traffic=lambda case, x, out: [("all_reduce", x.numel())],
        terms=partial(partial_sums, lambda case, problem: self_attention(case, problem.x, by_letter(problem))),
    )  # fmt: skip


def by_letter(problem: Problem) -> dict[str, Tensor]:
    names = {"qkv": "qkv", "kv": "kv", "q": "q", "out": "o"}
    letters = {"weight": "W", "bias": "b"}
    split = {name: name.split(".") for name in problem.weights}
    return {letters[kind] + names[part]: problem.weights[name] for name, (part, kind) in split.items()} | problem.more


SELF = (
    Built(leading=(3, 5)),
    Built(leading=(2, 7), options={"causal": True}),
    Built(leading=(1, 6), options={"causal": True}, bias=False),
    Built(leading=(3, 5), groups=GROUPS),
)

exercise(
    "6.2", "ParallelAttention", takes=["ParallelAttention"],
    trials=[
        *fused(8).trials(SELF, refused=(12, 3)),
        # groups of two ranks share six heads evenly, and all four ranks don't
        *fused(6).trials([Built(leading=(3, 5), groups=GROUPS)]),
    ],
    passed="Your attention runs one all-reduce in the forward pass and one in the backward pass, and every rank "
    "computes its own heads without any help.",
)  # fmt: skip

# 6.4: cross-attention

KEYS = 7  # the number of tokens in the memory
PADDING = torch.tensor([[0] * 7, [0, 0, 0, 0, 1, 1, 1], [1] * 7]).bool()  # the last text has no key at all


@dataclass(frozen=True)
class Cross(Built):
    """A way to build and run cross-attention. `padded` says whether the memory of three texts has padding."""

    leading: tuple[int, ...] = (3, 5)
    padded: bool = False

    def describe(self, name: str) -> str:
        return super().describe(name) + f", with{'' if self.padded else 'out'} padding"


def memory(case: Cross, generator: torch.Generator, width: int) -> dict[str, Tensor]:
    given = {"memory": random_tensor(generator, case.leading[0], KEYS, width)}
    return given | ({"memory_padding": PADDING} if case.padded else {})


def cross_attention(case: Built, x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    """Return the outputs of all heads, [b, s, n d]."""
    (q,) = project(x, w["Wq"], w.get("bq"), 1)
    k, v = project(w["memory"], w["Wkv"], w.get("bkv"), 2)
    return plain.attention(q, k, v, plain.allowed(q.shape[2], k.shape[2], padding=w.get("memory_padding")))


def two_inputs(heads: int) -> Layer:
    hidden = heads * HEAD_DIM
    rows = Sharding(0, stride=2)
    return Layer(
        of="ParallelCrossAttention", sizes=(hidden, heads), width=hidden, any_size=1, more=memory,
        weights={
            "q.weight": Weight("Wq", (hidden, hidden), FIRST, SMALL), "q.bias": Weight("bq", (hidden,), FIRST),
            "kv.weight": Weight("Wkv", (2 * hidden, hidden), rows, SMALL),
            "kv.bias": Weight("bkv", (2 * hidden,), rows), **output_layer(hidden),
        },
        formula=lambda case, x, w: linear(cross_attention(case, x, w), w["Wo"], w.get("bo")),
        forward_traffic=lambda case, x, out: [("all_reduce", out.numel())],
        backward_traffic=lambda case, x, out: [("all_reduce", x.numel()), ("all_reduce", x[:, :1].numel() * KEYS)],
        terms=partial(partial_sums, lambda case, problem: cross_attention(case, problem.x, by_letter(problem))),
    )  # fmt: skip


def by_size(trial: OnRanks, *ways: Callable[[Built, Problem], Calls]) -> OnRanks:
    """Return a trial that accepts backward traffic if it sends as many elements as one of these ways.

    An answer may send them in one message or in several.
    """

    def right(case: Built, problem: Problem, place: Place) -> Observed:
        expected, seen = trial.right(case, problem, place), place.observed[place.index].get("backward traffic")
        fits = isinstance(seen, Traffic) and any(sent(seen) == sent(place.traffic(*way(case, problem))) for way in ways)
        return expected | ({"backward traffic": as_expected(case, seen)} if fits else {})

    return replace(trial, right=right)


def sent(traffic: Traffic) -> Counter[tuple[Any, ...]]:
    """Return how many elements were sent, by the kind of collective and its group, and by whether anything waited."""
    found: Counter[tuple[Any, ...]] = Counter()
    for call in traffic:
        found[call.kind, call.group, call.waited] += call.numel
    return found


def as_expected(case: Built, seen: Any) -> Traffic:
    """Return calls in float64, which the driver turns into calls in the dtype of the case."""
    name = str(case.dtype).removeprefix("torch.")
    return Traffic(call._replace(dtype="float64") if call.dtype == name else call for call in seen)


CROSS = (
    Cross(),
    Cross(padded=True),
    Cross(bias=False, padded=True),
    Cross(padded=True, groups=GROUPS),
)
compared, refused = two_inputs(8).trials(CROSS, refused=(12, 3))

exercise(
    "6.4", "Cross-attention", takes=["ParallelCrossAttention"],
    trials=[
        by_size(compared, lambda case, problem: [("all_reduce", problem.x.numel() + problem.more["memory"].numel())]),
        refused,
    ],
    passed="Both inputs get their full gradients, and keys and values share a matmul and a message.",
)  # fmt: skip

# 6.5: multi-query attention


def multi_query(case: Built, x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    """Return the outputs of all heads, [b, s, n d]."""
    (q,) = project(x, w["Wq"], None, 1)
    k, v = project(x, w["Wkv"], None, 2)
    return plain.attention(q, k, v, plain.allowed(x.shape[1], x.shape[1], causal=True))


HIDDEN = 8 * HEAD_DIM
SHARED = Layer(
    of="MultiQueryAttention", sizes=(HIDDEN, 8), width=HIDDEN, any_size=1,
    weights={
        "q.weight": Weight("Wq", (HIDDEN, HIDDEN), FIRST, SMALL),
        "kv.weight": Weight("Wkv", (2 * HEAD_DIM, HIDDEN), None, SMALL),
        "out.weight": Weight("Wo", (HIDDEN, HIDDEN), LAST, SMALL),
    },
    formula=lambda case, x, w: linear(multi_query(case, x, w), w["Wo"]),
    forward_traffic=lambda case, x, out: [("all_reduce", out.numel())],
    backward_traffic=lambda case, x, out: [("all_reduce", x.numel()), ("all_reduce", 2 * HEAD_DIM * HIDDEN)],
    terms=partial(partial_sums, lambda case, problem: multi_query(case, problem.x, by_letter(problem))),
)  # fmt: skip
MULTI_QUERY = (
    Built(leading=(3, 5)),
    Built(leading=(2, 7)),
    Built(leading=(1, 6)),
    Built(leading=(3, 5), groups=GROUPS),
)


def f_on_the_weight(case: Built, problem: Problem) -> Calls:
    return [("all_reduce", problem.x.numel() + problem.weights["kv.weight"].numel())]


def f_on_keys_and_values(case: Built, problem: Problem) -> Calls:
    tokens = problem.x.numel() // HIDDEN
    return [("all_reduce", problem.x.numel() + tokens * 2 * HEAD_DIM)]


(compared_shared,) = SHARED.trials(MULTI_QUERY)

exercise(
    "6.5", "Fix multi-query attention", takes=["MultiQueryAttention"],
    trials=[by_size(compared_shared, f_on_the_weight, f_on_keys_and_values)],
    passed="Every gradient is complete, on every rank. There's another right answer, which adds up the contributions "
    "at a different place. Can you find it, too?",
)  # fmt: skip
