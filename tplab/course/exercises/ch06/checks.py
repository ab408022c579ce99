"""The checks of exercises 6.1, attention with the least traffic, and 6.3, who may attend to whom."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.course.checks import twins
from tplab.course.checks.cases import Case, Place, random_tensor
from tplab.course.checks.default_device import DefaultDevice
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.observation import Claim, Observed, Seen, Snapshot, observe, portable
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.exercises.ch06 import plain
from tplab.runtime import device

# 6.1: attention with the least traffic. A token has h elements. If each of the four matrices is split by columns or by
# rows, a design needs these operators for each matrix, and no matrix does with fewer:
#
#     Wq, Wk, Wv by columns   f before them, which is one f for all of them together
#     Wq, Wk, Wv by rows      a scatter of x, g, and an operator that takes the rank's heads out of the sum
#     Wo by rows              g
#     Wo by columns           a gather and f before it, a gather after it
#
# So one f and one g, with h elements per token each, is the cheapest.

DIM = {"column": 1, "row": 0}
CHEAPEST = ["column", "column", "column", "row"]
FOUR_WORDS = 'attention_splits returns four words, each of them "column" or "row"'
WEIGHTS = ("Wq", "Wk", "Wv", "Wo")


@dataclass(frozen=True)
class Sizes(Case):
    heads: int = 4
    head_dim: int = 3
    batch: int = 2
    length: int = 5

    def describe(self, name: str) -> str:
        return f"{self.heads} heads with d = {self.head_dim}, {self.batch} texts of {self.length} tokens"


class Matmuls(NamedTuple):
    x: Tensor  # [b, s, h]
    weights: tuple[Tensor, ...]  # four of [h, h]
    dy: Tensor  # [b, s, h], the upstream gradient
    head_dim: int

    def backward(self) -> list[Tensor]:
        """Return the output and the gradients of x and of the four weights."""
        leaves = [tensor.clone().requires_grad_() for tensor in (self.x, *self.weights)]
        x, wq, wk, wv, wo = leaves
        q, k, v = (plain.heads(x @ weight, self.head_dim) for weight in (wq, wk, wv))
        out = plain.attention(q, k, v, plain.allowed(x.shape[1], x.shape[1])) @ wo
        return [out.detach(), *torch.autograd.grad(out, leaves, self.dy)]


def draw_matmuls(case: Sizes, generator: torch.Generator, size: int) -> Matmuls:
    random, hidden = partial(random_tensor, generator), case.heads * case.head_dim
    weights = tuple(random(hidden, hidden) / math.sqrt(hidden) for _ in WEIGHTS)
    tokens = case.batch, case.length, hidden
    return Matmuls(random(*tokens), weights, random(*tokens), case.head_dim)


def give_shards(case: Sizes, full: Matmuls, place: Place) -> dict[str, Any]:
    """Return x, dy, and this rank's shards of each weight for each way to split it."""
    shards = [{split: place.part(weight, dim).contiguous() for split, dim in DIM.items()} for weight in full.weights]
    return {"x": full.x, "weights": shards, "dy": full.dy}


def run_design(answers: tuple[Any, Any], case: Sizes, given: dict[str, Any], group: Any) -> Observed:
    attention_splits, sharded_attention = answers
    with called_as("attention_splits()"):
        said = attention_splits()
    words = list(said) if isinstance(said, (tuple, list)) else []
    if len(words) != len(WEIGHTS) or any(word not in list(DIM) for word in words):
        return {FOUR_WORDS: Claim(f"it returned {said!r}")}
    shards = [shards[word].to(device()) for shards, word in zip(given["weights"], words, strict=True)]
    inputs = {"x": given["x"].to(device()), **dict(zip(WEIGHTS, shards, strict=True))}
    run = partial(_with_head_dim, sharded_attention, case.head_dim)
    seen = observe(run, given["dy"].to(device()), inputs=inputs)
    return {FOUR_WORDS: Claim(""), "splits": words} | {traffic_of(words, name): value for name, value in seen.items()}


def _with_head_dim(sharded_attention: Callable[..., Any], head_dim: int, *tensors: Tensor) -> Any:
    return sharded_attention(*tensors, head_dim)


def traffic_of(words: Sequence[str], name: str) -> str:
    """Return an observation's name, to which other splits than the cheapest are added if it's about traffic.

    A question about traffic depends on the splits.
    """
    if "traffic" not in name or words == CHEAPEST:
        return name
    split = ", ".join(f"{weight} by {word}s" for weight, word in zip(WEIGHTS, words, strict=True))
    return f"{name} with {split}"


def right_design(case: Sizes, full: Matmuls, place: Place) -> Observed:
    words = place.observed[place.index].get("splits")
    if words is None:
        return {}
    out, dx, *gradients = full.backward()
    sent = place.traffic(("all_reduce", out.numel()))
    parts = zip(WEIGHTS, gradients, words, strict=True)
    return {
        "out": out,
        "dx": dx,
        **{f"d{name}": place.part(gradient, DIM[word]) for name, gradient, word in parts},
        traffic_of(words, "forward traffic"): sent,
        traffic_of(words, "backward traffic"): sent,
    }


def own_terms(case: Sizes, full: Matmuls, size: int) -> dict[str, list[Tensor]]:
    """Return what each rank adds to the output and to dx, if the splits are the cheapest ones."""
    shards = zip(
        *(weight.chunk(size, DIM[word]) for weight, word in zip(full.weights, CHEAPEST, strict=True)), strict=True
    )
    ranks = [full._replace(weights=mine).backward() for mine in shards]
    return {"partial sum": [rank[0] for rank in ranks], "contribution to dx": [rank[1] for rank in ranks]}


exercise(
    "6.1", "Split attention with the least traffic", takes=["attention_splits", "sharded_attention"],
    trials=[
        OnRanks(
            cases=(Sizes(), Sizes(8, 2, 1, 6), Sizes(4, 4, 3, 2)), draw=draw_matmuls, give=give_shards,
            run=run_design, right=right_design, terms=own_terms,
            world_sizes=(2, 4, 1),  # two ranks come first, as they reveal the most about a mistake
        )
    ],
    passed="Your attention sends one message in the forward pass and one in the backward pass, and each message is the "
    "size of x. That's exactly what your MLP sends.",
)  # fmt: skip

# 6.3: who may attend to whom

LEFT, RIGHT = ((0, 0, 0, 0, 0), (1, 1, 0, 0, 0)), ((0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 1, 1))  # 1: padding
MASKS = (  # s, t, causal, padding
    (4, 4, False, None), (2, 5, True, None), (4, 4, True, None), (1, 6, True, None), (3, 7, False, None),
    (4, 4, False, RIGHT), (5, 5, True, LEFT), (2, 5, True, LEFT), (3, 4, False, RIGHT),
)  # fmt: skip


def masks(generator: torch.Generator) -> Iterator[Call]:
    for s, t, causal, padded in MASKS:
        padding = None if padded is None else torch.tensor(padded, dtype=torch.bool)
        some = "no padding" if padding is None else f"padding {list(padding.shape)}"
        yield Call((s, t, causal, padding), f"s = {s}, t = {t}, causal={causal}, {some}")


def run_mask(attention_mask: Callable[..., Any], call: Call) -> Seen:
    s, t, causal, padding = call.given
    before = Snapshot(padding=padding)
    with called_as(f"attention_mask with {call.note}"), DefaultDevice() as watch:
        options: dict[str, Any] = {"causal": causal} if causal else {}  # otherwise, the default says so
        options |= {} if padding is None else {"padding": padding}
        mask = attention_mask(s, t, **options, device=device())
    return one({"mask": portable(mask), "inputs unchanged": before.changed()} | watch.claims({"mask": mask}))


def right_mask(call: Call) -> Seen:
    s, t, causal, padding = call.given
    return one({"mask": plain.allowed(s, t, causal, padding)})


FAR_APART = 900.0  # the size of the scores in the last call


class Scores(NamedTuple):
    q: Tensor  # [b, n, s, d]
    k: Tensor  # [b, n, t, d]
    mask: Tensor  # [b or 1, 1, s, t]
    dw: Tensor  # [b, n, s, t], the upstream gradient

    def backward(self) -> Observed:
        q, k = (tensor.detach().double().requires_grad_() for tensor in (self.q, self.k))
        right = plain.weights(q, k, self.mask)
        dq, dk = torch.autograd.grad(right, (q, k), self.dw.double())
        return {"weights": right.detach(), "dq": dq, "dk": dk}


def scores(generator: torch.Generator) -> Iterator[Call]:
    kinds = {
        "every key allowed": (2, 3, 4, 5, 4, plain.allowed(4, 5)),
        "a causal mask": (2, 2, 5, 5, 3, plain.allowed(5, 5, True)),
        "one query, and a mask for each text": (2, 2, 1, 5, 3, plain.allowed(1, 5, True, torch.tensor(LEFT).bool())),
        "a query without any key": (2, 3, 5, 5, 4, plain.allowed(5, 5, True, torch.tensor(LEFT).bool())),
    }
    for note, (b, n, s, t, d, mask) in kinds.items():
        shapes = (b, n, s, d), (b, n, t, d), (b, n, s, t)
        q, k, dw = (random_tensor(generator, *shape) for shape in shapes)
        for twin in twins.ALONE:
            yield Call(twins.rounded(twin, Scores(q, k, mask, dw)), note + "," * bool(twin), twin=twin)
    q, k, dw = (random_tensor(generator, 1, 2, 4, size) for size in (3, 3, 4))
    k[..., 0] = math.sqrt(FAR_APART * math.sqrt(3))
    q[..., 0] = torch.tensor([1.0, -1.0])[:, None] * k[:, :, :, 0]
    yield Call(Scores(q, k, plain.allowed(4, 4, True), dw), f"scores around {FAR_APART:.0f} and -{FAR_APART:.0f}")


def run_weights(attention_weights: Callable[..., Any], call: Call) -> Seen:
    given = twins.given(call.twin, call.given)
    q, k = (tensor.detach().requires_grad_() for tensor in (given.q, given.k))
    before = Snapshot(q=q, k=k, mask=given.mask)
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, mask {list(given.mask.shape)}"
    with called_as(f"attention_weights({shapes}) with {call.note}"), DefaultDevice() as watch:
        weights = attention_weights(q, k, given.mask)
        seen: Observed = {"weights": portable(weights), "dq": None, "dk": None}
        if isinstance(weights, Tensor) and weights.shape == given.dw.shape and weights.requires_grad:
            dq, dk = torch.autograd.grad(weights, (q, k), given.dw.to(weights.dtype), allow_unused=True)
            seen |= {"dq": dq, "dk": dk}
    return one(seen | {"inputs unchanged": before.changed()} | watch.claims({"weights": weights}))


def right_weights(call: Call) -> Seen:
    return one(twins.expected(call.twin, call.given.backward()))


exercise(
    "6.3", "Who may attend to whom", takes=["attention_mask", "attention_weights"],
    trials=[
        Alone(of="attention_mask", part="attention_mask", calls=masks, run=run_mask, right=right_mask),
        Alone(of="attention_weights", part="attention_weights", calls=scores, run=run_weights, right=right_weights),
    ],
    passed="Your mask works for a full text as well as for the newest tokens of a text. A query without any key gets "
    "zeros, and no NaN reaches a gradient.",
)  # fmt: skip
