"""The checks of exercises 9.4, a block that forgot its streams, and 9.5, a second run with the same dropout.

The right values come from the same formulas in a single process, in float64, with the masks of all ranks. These masks
are drawn on the ranks, with plain PyTorch, because a GPU draws other numbers than a CPU.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course.checks import twins
from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.observation import Claim, Observed, Snapshot, observe
from tplab.course.checks.recorded_traffic import traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.runtime import device, record
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.operators import copy_to_region, reduce_from_region
from tplab.tensor.rng import REPLICATED_OFFSET, SHARDED_OFFSET, RNGTracker, dropout, seed_all

CURRENT, REPLICATED, SHARDED = "current", "replicated", "sharded"
Drawn = tuple[str, tuple[int, ...]]  # (stream, shape)


def draw_masks(draws: Sequence[Drawn], seed: int, index: int, rate: float) -> list[Tensor]:
    """Draw all masks in order, from streams that are seeded the way `seed_all(seed)` seeds them on rank `index`."""
    seeds = {CURRENT: seed, REPLICATED: seed + REPLICATED_OFFSET, SHARDED: seed + SHARDED_OFFSET + index}
    masks: list[Tensor] = [torch.empty(0)] * len(draws)
    for stream in dict.fromkeys(name for name, _ in draws):
        torch.manual_seed(seeds[stream])
        for number, (name, shape) in enumerate(draws):
            if name == stream:
                ones = torch.ones(shape, dtype=torch.float64, device=device())
                masks[number] = F.dropout(ones, rate).cpu()
    return masks


# 9.4: a block with dropout in four places

HIDDEN, HEADS, TEXTS, LENGTH, RATE = 16, 4, 2, 3, 0.4
HEAD_DIM, INNER = HIDDEN // HEADS, 4 * HIDDEN
SHAPES = {  # by the names in the module: shape of the full tensor, the dimension that's split, and its blocks
    "qkv.weight": ((3 * HIDDEN, HIDDEN), 0, 3), "qkv.bias": ((3 * HIDDEN,), 0, 3),
    "out.weight": ((HIDDEN, HIDDEN), 1, 1), "out.bias": ((HIDDEN,), None, 1),
    "up.weight": ((INNER, HIDDEN), 0, 1), "up.bias": ((INNER,), 0, 1),
    "down.weight": ((HIDDEN, INNER), 1, 1), "down.bias": ((HIDDEN,), None, 1),
}  # fmt: skip
MASKS = {"heads": SHARDED, "after attention": REPLICATED, "inside": SHARDED, "after the MLP": REPLICATED}
FIRST, SECOND = "mask {} of the first pass", "mask {} of the second pass"
OUT, AGAIN, EVAL = "out", "out of a second pass, under torch.no_grad", "out in eval mode"
AFTERWARDS = "numbers drawn afterwards"
AFTER_ERROR = "numbers drawn after an exception in the block"
IN_PRECISION = "all four linear layers run in the context that precision() returns"
LEFT = "each context that precision() returned was entered once and left"


class Passes(Case):
    """A training pass, a pass in eval mode, another training pass under no_grad, and a pass that raises an error."""

    def describe(self, name: str) -> str:
        return ""


class Full(NamedTuple):
    weights: dict[str, Tensor]
    x: Tensor  # [b, s, h]
    second: Tensor  # [b, s, h], the input of the second pass
    dy: Tensor  # [b, s, h]
    seed: int


class Precision:
    """Returns contexts as the learner's block gets them, and keeps track of which of them are active."""

    def __init__(self) -> None:
        self.returned = self.entered = self.active = 0
        self.outside: set[str] = set()  # layers that ran outside of all contexts

    def __call__(self) -> Any:
        self.returned += 1
        return self.context()

    @contextmanager
    def context(self) -> Iterator[None]:
        self.entered += 1
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    def watch(self, block: Any) -> None:
        for name in ("qkv", "out", "up", "down"):
            getattr(block, name).register_forward_pre_hook(lambda module, inputs, name=name: self.note(name))

    def note(self, name: str) -> None:
        self.outside |= set() if self.active else {name}

    def claims(self) -> Observed:
        words = f"{self.returned} contexts were returned, {self.entered} were entered, {self.active} are still active"
        fine = self.returned == self.entered and not self.active
        outside = ", ".join(sorted(self.outside))
        return {IN_PRECISION: Claim(f"not {outside}" if outside else ""), LEFT: Claim("" if fine else words)}


def draw_block(case: Passes, generator: torch.Generator, size: int) -> Full:
    weights = {name: random_tensor(generator, *shape) / math.sqrt(HIDDEN) for name, (shape, _, _) in SHAPES.items()}
    x, second, dy = (random_tensor(generator, TEXTS, LENGTH, HIDDEN) for _ in range(3))
    return Full(weights, x, second, dy, int(torch.randint(10**6, (), generator=generator)))


def run_block(block_class: Any, case: Passes, given: Full, group: Any) -> Observed:
    tracker, precision = seed_all(given.seed, group), Precision()
    with called_as(f"MixedPrecisionBlock({HIDDEN}, {HEADS}, {RATE}, tracker, precision=..., group=group)"):
        block = block_class(
            HIDDEN, HEADS, RATE, tracker, precision=precision, group=group, device=device(), dtype=case.dtype
        )
    load_full_state_dict(block, {name: value.to(device()) for name, value in given.weights.items()}, group)
    precision.watch(block)
    torch.manual_seed(given.seed)
    x, second = given.x.to(device()), given.second.to(device())
    parameters = {name: dict(block.named_parameters())[name] for name in SHAPES}
    seen = observe(block, given.dy.to(device()), inputs={"x": x}, parameters=parameters)
    before = Snapshot(x=x, **{"x of the second pass": second})
    seen[EVAL] = block.eval()(x)  # with gradients enabled, because only self.training may turn dropout off
    block.train()
    with torch.no_grad():
        seen[AGAIN] = block(second)
    seen["inputs unchanged"] = seen.get("inputs unchanged") or before.changed()
    seen[AFTERWARDS] = torch.rand(4, device=device())
    block.rate = 2.0
    try:
        block(x)
    except ValueError:
        seen[AFTER_ERROR] = torch.rand(4, device=device())
    index, size = dist.get_rank(group), dist.get_world_size(group)
    tokens = TEXTS, LENGTH
    shapes = {
        "heads": (TEXTS, HEADS // size, LENGTH, LENGTH), "after attention": (*tokens, HIDDEN),
        "inside": (*tokens, INNER // size), "after the MLP": (*tokens, HIDDEN),
    }  # fmt: skip
    masks = iter(draw_masks([(stream, shapes[name]) for name, stream in MASKS.items()] * 2, given.seed, index, RATE))
    seen |= {each.format(name): next(masks) for each in (FIRST, SECOND) for name in MASKS}
    torch.manual_seed(given.seed)
    plain = torch.rand(4, device=device()), torch.rand(4, device=device())
    return seen | precision.claims() | {"plain numbers": torch.stack(plain)}


def block_formula(w: Mapping[str, Tensor], x: Tensor, masks: Mapping[str, Any]) -> Tensor:
    qkv = F.linear(x, w["qkv.weight"], w["qkv.bias"]).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for part in qkv)  # [b, n, s, d]
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(future, -torch.inf).softmax(-1) * masks["heads"]
    y = F.linear((weights @ v).transpose(1, 2).flatten(2), w["out.weight"], w["out.bias"])
    x = x + y * masks["after attention"]
    inner = F.gelu(F.linear(x, w["up.weight"], w["up.bias"])) * masks["inside"]
    return x + F.linear(inner, w["down.weight"], w["down.bias"]) * masks["after the MLP"]


def right_block(case: Passes, full: Full, place: Place) -> Observed:
    def masks(which: str) -> dict[str, Tensor]:
        """Return the masks of a pass, with those of all ranks side by side if each rank has its own part."""
        of_ranks = {name: [seen[which.format(name)] for seen in place.observed] for name in MASKS}
        side_by_side = {"heads": 1, "inside": -1}
        return {
            name: torch.cat(ranks, side_by_side[name]) if name in side_by_side else ranks[place.index]
            for name, ranks in of_ranks.items()
        }

    leaves = {name: value.clone().requires_grad_() for name, value in {"x": full.x, **full.weights}.items()}
    out = block_formula(leaves, leaves["x"], masks(FIRST))
    gradients = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), full.dy), strict=True))
    sent = place.traffic(*[("all_reduce", full.x.numel())] * 2)
    numbers = place.observed[place.index]["plain numbers"]
    expected: Observed = {
        OUT: out.detach(), "forward traffic": sent, "backward traffic": sent, "dx": gradients["x"],
        AGAIN: block_formula(full.weights, full.second, masks(SECOND)),
        EVAL: block_formula(full.weights, full.x, dict.fromkeys(MASKS, 1.0)),
        AFTERWARDS: numbers[0], AFTER_ERROR: numbers[1],
    }  # fmt: skip
    for name, (_, dim, blocks) in SHAPES.items():
        expected[f"d{name}"] = gradients[name] if dim is None else place.part(gradients[name], dim, blocks)
    return expected


exercise(
    "9.4", "Fix the block that forgot its streams", takes=["MixedPrecisionBlock"],
    trials=[
        OnRanks(
            cases=(Passes(), Passes(groups=GROUPS)), draw=draw_block, run=run_block, right=right_block,
            world_sizes=(2, 4, 1), values_on_cpu=True, without=twins.DRAWS_ONCE,  # every call draws random numbers
        )
    ],
    passed="In your block, each rank drops elements of its own where it has a part of its own, and all ranks drop the "
    "same elements everywhere else.",
)  # fmt: skip

# 9.5: a function that drops elements in three places, with torch's current state and with both streams of a tracker
#
#     a = dropout_sharded(w * f(x)),   y = dropout_current(dropout_replicated(g(a))),   out = factor * y²

SIZE = 300
TWICE, FREED = "the function runs once forward and once backward", "nothing but the inputs is kept until backward"
NEXT = "masks drawn afterwards"


@dataclass(frozen=True)
class Calls(Case):
    """Calls of `checkpoint` before a single backward pass, with an x that may or may not need a gradient."""

    title: str
    calls: int = 1
    x_needs_grad: bool = True
    factor: float | None = None  # a second argument of the function

    def describe(self, name: str) -> str:
        return self.title

    def names(self, kind: str) -> list[str]:
        return [kind] if self.calls == 1 else [f"{kind}{call + 1}" for call in range(self.calls)]


class Given(NamedTuple):
    xs: list[Tensor]  # the input [n] of each call
    weights: list[Tensor]  # a weight [n] for each rank
    dy: Tensor  # [n], the gradient of every output
    seed: int


class Body:
    """The function that runs twice. It counts its runs and keeps track of the tensors that it creates."""

    def __init__(self, weight: Tensor, tracker: RNGTracker) -> None:
        self.weight, self.tracker = weight, tracker
        self.made: list[weakref.ref[Tensor]] = []

    def __call__(self, x: Tensor, factor: float = 1.0) -> Tensor:
        a = dropout(self.weight * copy_to_region(x), RATE, sharded=True, rng=self.tracker)
        self.made.append(weakref.ref(a))
        y = dropout(reduce_from_region(a), RATE, sharded=False, rng=self.tracker)
        return factor * F.dropout(y, RATE) ** 2


def draw_calls(case: Calls, generator: torch.Generator, size: int) -> Given:
    dy, *tensors = (random_tensor(generator, SIZE) for _ in range(1 + case.calls + size))
    return Given(tensors[: case.calls], tensors[case.calls :], dy, int(torch.randint(10**6, (), generator=generator)))


def run_calls(checkpoint: Callable[..., Any], case: Calls, given: Given, group: Any) -> Observed:
    tracker = seed_all(given.seed)
    weight = given.weights[dist.get_rank()].to(device()).requires_grad_()
    body = Body(weight, tracker)
    xs = [x.to(device()).requires_grad_(case.x_needs_grad) for x in given.xs]
    more = [] if case.factor is None else [case.factor]
    with record() as forward, called_as(f"checkpoint(function, x,{' factor,' * len(more)} tracker=tracker)"):
        outs = [checkpoint(body, x, *more, tracker=tracker) for x in xs]
    runs, kept = len(body.made), sum(ref() is not None for ref in body.made)
    loss = sum((out * given.dy.to(device())).sum() for out in outs)
    with record() as backward:
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
    both = (runs, len(body.made) - runs)
    seen: Observed = {
        **dict(zip(case.names("out"), outs, strict=True)),
        "forward traffic": traffic(forward), "backward traffic": traffic(backward), "dw": weight.grad,
        **{name: x.grad for name, x in zip(case.names("dx"), xs, strict=True)},
        FREED: Claim(f"of {runs} tensors made inside, {kept} are still there" if kept else ""),
        TWICE: Claim("" if both == (len(xs), len(xs)) else f"{both[0]} runs forward, {both[1]} backward"),
    }  # fmt: skip
    ones = torch.ones(SIZE, dtype=case.dtype, device=device())
    following = [dropout(ones, RATE, sharded=sharded, rng=tracker) for sharded in (True, False)]
    seen[NEXT] = [*following, F.dropout(ones, RATE)]
    streams = (SHARDED, REPLICATED, CURRENT)
    drawn = draw_masks([(name, (SIZE,)) for name in streams] * (case.calls + 1), given.seed, dist.get_rank(), RATE)
    return seen | {"plain masks": torch.stack(drawn).unflatten(0, (-1, len(streams)))}  # [calls + 1, streams, n]


def right_calls(case: Calls, given: Given, place: Place) -> Observed:
    drawn = torch.stack([seen["plain masks"] for seen in place.observed])  # [p, calls + 1, streams, n]
    found: dict[str, Any] = {}
    total = torch.zeros(SIZE, dtype=torch.float64)
    for call, (out_name, dx_name) in enumerate(zip(case.names("out"), case.names("dx"), strict=True)):
        x, weights = given.xs[call].clone().requires_grad_(), torch.stack(given.weights).requires_grad_()  # [p, n]
        sharded, (_, replicated, current) = drawn[:, call, 0], drawn[place.index, call]
        out = (case.factor or 1.0) * ((sharded * weights * x).sum(0) * replicated * current) ** 2
        dx, dws = torch.autograd.grad(out, (x, weights), given.dy)
        found |= {out_name: out.detach(), dx_name: dx if case.x_needs_grad else None}
        total += dws[place.index]
    sent = [("all_reduce", SIZE)] * case.calls
    return found | {
        "forward traffic": place.traffic(*sent),
        "backward traffic": place.traffic(*sent * (2 if case.x_needs_grad else 1)),
        "dw": total,
        NEXT: list(drawn[place.index, case.calls]),
    }


exercise(
    "9.5", "Run it again with the same dropout", takes=["checkpoint"],
    trials=[
        OnRanks(
            cases=(
                Calls("one function"),
                Calls("two functions, one after the other", calls=2),
                Calls("an x that needs no gradient", x_needs_grad=False),
                Calls("a function of a tensor and a number", factor=-1.5),
            ),
            draw=draw_calls, run=run_calls, right=right_calls, world_sizes=(2, 4, 1), values_on_cpu=True,
        )
    ],
    passed="The second run drops what the first run has dropped, and no stream notices that there was a second run.",
)  # fmt: skip
