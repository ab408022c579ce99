"""The check of exercise 12.3, the gradients that are only a part of a sum.

First, the learner's list of names is tried out. The ranks run a small model, sum the gradients of the parameters with
these names, and all nine gradients are compared with those of plain PyTorch. Then the learner's own sum is tried out on
made-up gradients.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.describe import describe
from tplab.course.checks.observation import Claim, Observed, Snapshot
from tplab.course.checks.recorded_traffic import traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.runtime import device, record
from tplab.sequence.examples import SmallModel
from tplab.tensor.sharding import Sharding

# The names of the partial gradients

B, S, H, HEADS = 2, 8, 12, 4
D = H // HEADS
SHAPES = {  # of the full parameters, and how they're split
    "positions": ((S, H), None),
    "norm.weight": ((H,), None),
    "norm.bias": ((H,), None),
    "attention.qkv.weight": ((3 * H, H), Sharding(0, 3)),
    "attention.qkv.bias": ((3 * H,), Sharding(0, 3)),
    "attention.q_norm.weight": ((D,), None),
    "attention.k_norm.weight": ((D,), None),
    "attention.out.weight": ((H, H), Sharding(1)),
    "bias": ((H,), None),
}
NAMES = "partial_gradients returns names from the list"


class Model(NamedTuple):
    x: Tensor  # [b, s, h]
    dy: Tensor  # [b, s, h]
    weights: dict[str, Tensor]  # unsharded


def draw_model(case: Case, generator: torch.Generator, size: int) -> Model:
    random = partial(random_tensor, generator)
    return Model(random(B, S, H), random(B, S, H), {name: random(*shape) for name, (shape, _) in SHAPES.items()})


def shard_of(name: str, full: Tensor, place: Place) -> Tensor:
    split = SHAPES[name][1]
    return place.part(full, split.dim, split.stride) if split else full


def give_model(case: Case, full: Model, place: Place) -> Model:
    weights = {name: shard_of(name, value, place) for name, value in full.weights.items()}
    return Model(full.x, place.part(full.dy, 1), weights)


def run_model(partial_gradients: Callable[[], Any], case: Case, given: Model, group: Any) -> Observed:
    with called_as("partial_gradients()"):
        names = partial_gradients()
    if isinstance(names, str) or not isinstance(names, Iterable):
        return {NAMES: Claim(f"it returned {describe(names)}")}
    names = list(names)
    if unknown := [name for name in names if name not in SHAPES]:
        return {NAMES: Claim(f"{unknown[0]!r} isn't one of the nine names")}
    model = SmallModel(S, H, HEADS, device=device(), dtype=case.dtype)
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in given.weights.items():
            params[name].copy_(value)
    model(given.x.to(device())).backward(given.dy.to(device()))
    for name in sorted(set(names)):
        dist.all_reduce(params[name].grad)
    return {NAMES: Claim("")} | {f"d{name}": param.grad for name, param in params.items()}


def right_model(case: Case, full: Model, place: Place) -> Observed:
    w = {name: value.clone().requires_grad_() for name, value in full.weights.items()}
    x = full.x + w["positions"]
    y = F.layer_norm(x, (H,), w["norm.weight"], w["norm.bias"])
    qkv = F.linear(y, w["attention.qkv.weight"], w["attention.qkv.bias"]).chunk(3, -1)
    q, k, v = (each.unflatten(-1, (HEADS, D)).transpose(1, 2) for each in qkv)  # [b, a, s, d] each
    q, k = (F.rms_norm(each, (D,), w[f"attention.{of}_norm.weight"]) for each, of in ((q, "q"), (k, "k")))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    out = x + F.linear(y, w["attention.out.weight"]) + w["bias"]
    gradients = dict(zip(w, torch.autograd.grad(out, list(w.values()), full.dy), strict=True))
    return {f"d{name}": shard_of(name, value, place) for name, value in gradients.items()}


# The sum

RETURNS, KEEPS = "nothing is returned", "a parameter without a gradient still has none"
MARKED = {"norm.weight": (6,), "norm.bias": (6,), "deep.inside.table": (4, 3), "bias": (5,)}
UNMARKED = {"up.weight": (3, 4), "down.weight": (2, 5), "said_no.weight": (3,)}
WITHOUT = "unused.weight"  # a marked parameter without a gradient
CALL = "allreduce_sequence_gradients(module, group)"

Gradients = dict[str, Tensor]  # gradients by parameter name


@dataclass(frozen=True)
class Ranks(Case):
    """A case in which all ranks, or the ranks of each group, sum their gradients.

    idle:   whether all gradients of the last rank are zero
    frozen: name of a marked parameter that no longer requires grad, or ""
    """

    idle: bool = False
    frozen: str = ""

    def describe(self, name: str) -> str:
        return "with all gradients zero on the last rank" * self.idle + f"with {self.frozen} frozen" * bool(self.frozen)


def draw_gradients(case: Ranks, generator: torch.Generator, size: int) -> list[Gradients]:
    shapes = {**MARKED, **UNMARKED}
    drawn = [{name: random_tensor(generator, *shape) for name, shape in shapes.items()} for _ in range(size)]
    return drawn[:-1] + [{name: value * (not case.idle) for name, value in drawn[-1].items()}]


def laid_out(gradient: Tensor, group: Any) -> Tensor:
    """Return a copy on this device. On every other rank, matrices are transposed in memory."""
    gradient = gradient.clone().to(device())
    return gradient.T.contiguous().T if gradient.dim() == 2 and dist.get_rank(group) % 2 == 0 else gradient


def build(gradients: Gradients, case: Ranks, group: Any) -> nn.Module:
    """Build a module whose parameters have these gradients."""
    model = nn.Module()
    for name, shape in {**MARKED, **UNMARKED, WITHOUT: (2,)}.items():
        *path, last = name.split(".")
        home = model
        for part in path:
            if part not in dict(home.named_children()):
                home.add_module(part, nn.Module())
            home = home.get_submodule(part)
        parameter = nn.Parameter(torch.full(shape, 0.5, dtype=case.dtype, device=device()))
        parameter.requires_grad_(name != case.frozen)
        if name in MARKED or name == WITHOUT:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        elif name.startswith("said_no"):
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
        if name in gradients:
            parameter.grad = laid_out(gradients[name], group)
        home.register_parameter(last, parameter)
    return model


def run_sum(add_up: Callable[..., Any], case: Ranks, given: Gradients, group: Any) -> Observed:
    model = build(given, case, group)
    params = dict(model.named_parameters())
    values = Snapshot(**{name: param.detach() for name, param in params.items()})
    if case.twin is Twin.BETWEEN:
        add_up(model, group)  # this is an earlier step, and the gradients of this step replace its gradients
        for name, gradient in given.items():
            if params[name].grad is not None:
                params[name].grad = laid_out(gradient, group)  # a new tensor, as after zero_grad()
    with record() as section, called_as(CALL):
        returned = add_up(model, group)
    left = params.pop(WITHOUT).grad
    return {
        "parameters unchanged": values.changed(),
        **{f"d{name}": param.grad for name, param in params.items()},
        "traffic": traffic(section),
        KEEPS: Claim("" if left is None else f"{WITHOUT} has one now"),
        RETURNS: Claim("" if returned is None else f"it returned a {type(returned).__name__}"),
    }


def right_sum(case: Ranks, problem: list[Gradients], place: Place) -> Observed:
    total = {name: torch.stack([gradients[name] for gradients in problem]).sum(0) for name in MARKED}
    found: Observed = {f"d{name}": total.get(name, value) for name, value in problem[place.index].items()}
    return found | {"traffic": place.traffic(("all_reduce", sum(value.numel() for value in total.values())))}


def own_terms(case: Ranks, problem: list[Gradients], size: int) -> dict[str, list[Tensor]]:
    return {"gradient": [rank["deep.inside.table"] for rank in problem]}


exercise(
    "12.3", "Which gradients are only a part?", takes=["partial_gradients", "allreduce_sequence_gradients"],
    trials=[
        OnRanks(
            of="partial_gradients", part="names", cases=(Case(),), draw=draw_model, give=give_model, run=run_model,
            right=right_model, world_sizes=(2, 4), without=tuple(Twin),
        ),
        OnRanks(
            of="allreduce_sequence_gradients", part="sum", draw=draw_gradients, run=run_sum, right=right_sum,
            cases=(Ranks(), Ranks(groups=GROUPS), Ranks(idle=True), Ranks(frozen="deep.inside.table")),
            give=lambda case, problem, place: problem[place.index], terms=own_terms, world_sizes=(2, 4, 1),
        ),
    ],
    passed="With one small all-reduce per step, all nine gradients are those of a single process, so the ranks' copies "
    "stay the same.",
)  # fmt: skip
