"""The checks of exercises 5.1, an MLP with the least traffic, and 5.3, a detector for replicas that drift apart."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.default_device import DefaultDevice
from tplab.course.checks.describe import describe
from tplab.course.checks.observation import Claim, Observed, Snapshot, observe
from tplab.course.checks.recorded_traffic import traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.runtime import device, record
from tplab.tensor.sharding import Sharding

# 5.1: an MLP with the least traffic. A token has h elements in x and m elements between the two matmuls. This table
# shows how many elements per token each design sends in the forward and backward passes together, if it uses the four
# operators of chapter 03. So the first design is the cheapest for all h and m:
#
#     A by columns, B by rows      2 h          f before A, g after B
#     A by columns, B by columns   2 h + 2 m    f, gather; f, gather
#     A by rows, B by rows         2 h + 2 m    scatter, g; scatter, g
#     A by rows, B by columns      2 h + 2 m    scatter, g; f, gather

DIM = {"column": 1, "row": 0}
CHEAPEST = ["column", "row"]
TWO_WORDS = 'mlp_splits returns two words, each of them "column" or "row"'


@dataclass(frozen=True)
class Sizes(Case):
    hidden: int = 8
    ffn: int = 20
    leading: tuple[int, ...] = (5,)  # all dimensions of x except the last

    def describe(self, name: str) -> str:
        return f"h = {self.hidden}, m = {self.ffn}, x with {len(self.leading) + 1} dimensions"


class Matmuls(NamedTuple):
    x: Tensor  # [.., h]
    a: Tensor  # [h, m]
    b: Tensor  # [m, h]
    dy: Tensor  # [.., h], the upstream gradient

    def backward(self) -> list[Tensor]:
        """Return the output and the gradients of x, a and b."""
        leaves = [tensor.clone().requires_grad_() for tensor in (self.x, self.a, self.b)]
        out = gelu(leaves[0] @ leaves[1]) @ leaves[2]
        return [out.detach(), *torch.autograd.grad(out, leaves, self.dy)]


def draw_matmuls(case: Sizes, generator: torch.Generator, size: int) -> Matmuls:
    random, (hidden, ffn) = partial(random_tensor, generator), (case.hidden, case.ffn)
    return Matmuls(
        random(*case.leading, hidden), random(hidden, ffn), random(ffn, hidden), random(*case.leading, hidden)
    )


def give_shards(case: Sizes, full: Matmuls, place: Place) -> dict[str, Any]:
    """Return x, dy, and this rank's shards of a and b for each way to split them."""

    def shards(weight: Tensor) -> dict[str, Tensor]:
        return {split: place.part(weight, dim).contiguous() for split, dim in DIM.items()}

    return {"x": full.x, "a": shards(full.a), "b": shards(full.b), "dy": full.dy}


def run_design(answers: tuple[Any, Any], case: Sizes, given: dict[str, Any], group: Any) -> Observed:
    mlp_splits, sharded_mlp = answers
    with called_as("mlp_splits()"):
        said = mlp_splits()
    words = list(said) if isinstance(said, (tuple, list)) else []
    if len(words) != 2 or any(word not in list(DIM) for word in words):
        return {TWO_WORDS: Claim(f"it returned {said!r}")}
    inputs = {"x": given["x"], "a": given["a"][words[0]], "b": given["b"][words[1]]}
    inputs = {name: tensor.to(device()) for name, tensor in inputs.items()}
    seen = observe(sharded_mlp, given["dy"].to(device()), inputs=inputs)
    return {TWO_WORDS: Claim(""), "splits": words} | {traffic_of(words, name): value for name, value in seen.items()}


def traffic_of(words: Sequence[str], name: str) -> str:
    """Return an observation's name, to which other splits than the cheapest are added if it's about traffic.

    A question about traffic depends on the splits.
    """
    return f"{name} with A by {words[0]}s and B by {words[1]}s" if "traffic" in name and words != CHEAPEST else name


def right_design(case: Sizes, full: Matmuls, place: Place) -> Observed:
    words = place.observed[place.index].get("splits")
    if words is None:
        return {}
    out, dx, da, db = full.backward()
    sent = place.traffic(("all_reduce", out.numel()))
    return {
        "out": out,
        "dx": dx,
        "da": place.part(da, DIM[words[0]]),
        "db": place.part(db, DIM[words[1]]),
        traffic_of(words, "forward traffic"): sent,
        traffic_of(words, "backward traffic"): sent,
    }


def own_terms(case: Sizes, full: Matmuls, size: int) -> dict[str, list[Tensor]]:
    """Return what each rank adds to the output and to dx, if A is split by columns and B by rows."""
    shards = zip(full.a.chunk(size, 1), full.b.chunk(size, 0), strict=True)
    ranks = [full._replace(a=a, b=b).backward() for a, b in shards]
    return {"partial sum": [rank[0] for rank in ranks], "contribution to dx": [rank[1] for rank in ranks]}


exercise(
    "5.1", "Split an MLP with the least traffic", takes=["mlp_splits", "sharded_mlp"],
    trials=[
        OnRanks(
            cases=(Sizes(), Sizes(leading=(2, 3)), Sizes(12, 4), Sizes(4, 8, (2, 1, 3))), draw=draw_matmuls,
            give=give_shards, run=run_design, right=right_design, terms=own_terms,
            world_sizes=(2, 4, 1),  # two ranks come first, as they reveal the most about a mistake
        )
    ],
    passed="Your MLP sends one message in the forward pass and one in the backward pass, and each message is the size "
    "of x. No other design needs fewer bytes.",
)  # fmt: skip

# 5.3: a detector for replicas that drift apart

SHARDED_NUMEL = 77  # no other parameter has this many elements, so the check can recognize a collective on a shard
SHAPES = {"first": (5,), "second": (3, 4), "shard": (SHARDED_NUMEL,)}
NOT_FINITE = "nan or inf"  # stands for a drift that's NaN or infinite
Values = dict[str, Tensor]  # {name of a parameter: its value}


@dataclass(frozen=True)
class Scenario(Case):
    """A way in which a model's parameters differ between ranks.

    offsets:    {parameter: offsets of its last element on four ranks}
    opposite:   an element that gets the opposite offsets, or None
    base:       a number that's added to all elements, so that none of them is near zero
    stored_in:  the dtype of the parameters
    frozen:     whether the second parameter needs no gradient
    once_more:  whether the detector has seen the module before, when another element had drifted further
    parameters: the names of the parameters
    """

    note: str
    offsets: Mapping[str, Sequence[float]] = field(default_factory=dict)
    opposite: int | None = None
    base: float = 0
    stored_in: torch.dtype = torch.float64
    frozen: bool = False
    once_more: bool = False
    parameters: Sequence[str] = (*SHAPES, *(f"inner.{name}" for name in SHAPES))

    def describe(self, name: str) -> str:
        return self.note

    def offset(self, name: str, place: Place) -> float:
        """Return the offset on a rank. If a smaller group's last rank has none, it gets that of the fourth rank."""
        values = self.offsets.get(name, (0, 0, 0, 0))
        return values[place.index] or (values[3] if place.index == place.size - 1 else 0)


FINITE = (
    Scenario("equal replicas"),
    Scenario("only the shards differ", {"shard": (0, 1, 2, 3)}),
    Scenario("one element differs on the last rank", {"second": (0, 0, 0, 0.5)}),
    Scenario("one element differs on rank 1", {"second": (0, -0.5, 0, 0)}),
    Scenario(
        "the first parameter differs more than the second", {"first": (0, 2, 0, 2), "second": (0, 0.25, 0, 0)}
    ),
    Scenario("the second parameter differs more than the first", {"first": (0, 0.25, 0, 0), "second": (0, 2, 0, 2)}),
    Scenario("ranks 1 and 2 are furthest apart", {"first": (0, 1, -1, 0.5)}),
    Scenario("the values climb from rank to rank", {"first": (0, 0.5, 1, 1.5)}),
    Scenario("the differences cancel in the sum", {"second": (0.5, -0.5, 0.5, -0.5)}, opposite=0),
    Scenario("the differences cancel within a column", {"second": (0.5, -0.5, 0.5, -0.5)}, opposite=3),
    Scenario("inside a module", {"inner.second": (0, 0, 0, 4)}),
    Scenario("one element of a frozen parameter differs", {"second": (0, 0.5, 0, 0)}, frozen=True),
    Scenario("one element differs in its ninth digit", {"first": (0, 0, 2.0**-24, 0)}, base=16),
    Scenario("one element differs by a number with many digits", {"second": (0, 0, 2.0**10 + 2.0**-15, 0)}),
    Scenario(
        "the parameters are float32, and one element differs", {"second": (0, 0, 0.5, 0)}, stored_in=torch.float32
    ),
    Scenario(
        "the parameters are bfloat16, and one element differs", {"second": (0, 0, 0.5, 0)}, stored_in=torch.bfloat16
    ),
    Scenario(
        "the same module was measured before, when another element differed", {"second": (0, 0, 0.25, 0)},
        once_more=True,
    ),
    Scenario("a module without any replicated parameter", parameters=("shard",)),
)  # fmt: skip
NAN = (
    Scenario("one element is NaN on rank 1", {"second": (0, math.nan, 0, 0)}),
    Scenario("one element is NaN on every rank", {"second": (math.nan,) * 4}),
)


def draw_replica(case: Scenario, generator: torch.Generator, size: int) -> Values:
    """Return the values that all ranks have in common: multiples of 1/8, which any dtype can hold."""
    shapes = {name: SHAPES[name.rpartition(".")[2]] for name in case.parameters}
    return {
        name: case.base + torch.randint(-64, 65, shape, generator=generator).double() / 8
        for name, shape in shapes.items()
    }


def drifted(case: Scenario, replica: Values, place: Place) -> Values:
    """Return the values on one rank."""
    mine = {name: value.clone() for name, value in replica.items()}
    for name in case.offsets:
        mine[name].view(-1)[-1] += case.offset(name, place)
        if case.opposite is not None:
            mine[name].view(-1)[case.opposite] -= case.offset(name, place)
    return {name: value.to(case.stored_in) for name, value in mine.items()}


def run_detector(detect: Callable[..., Any], case: Scenario, given: Values, group: Any) -> Observed:
    model: Any = nn.Module()
    model.inner = nn.Module()
    for name, value in given.items():
        parameter = nn.Parameter(value.to(device()), requires_grad=not (case.frozen and name == "second"))
        owner, _, last = name.rpartition(".")
        if last == "shard":
            parameter.tensor_parallel = Sharding(0)  # type: ignore[attr-defined]
        model.get_submodule(owner).register_parameter(last, parameter)
    if case.once_more:
        rank = torch.distributed.get_rank(group)
        model.first.data[0] += rank
        detect(model, group)
        model.first.data[0] -= rank
    before = Snapshot(**dict(model.named_parameters()))
    with record() as section, DefaultDevice() as watch, called_as("replica_drift(module, group)"):
        drift = detect(model, group)
    is_number = isinstance(drift, (int, float)) and not isinstance(drift, bool)
    sent = any(call.numel % SHARDED_NUMEL == 0 for call in traffic(section) if call.numel)
    return {
        "the drift is a float": Claim("" if is_number else f"it's {describe(drift)}"),
        "no shard is sent": Claim("a collective is as large as a sharded parameter" if sent else ""),
        "inputs unchanged": before.changed(),
        "drift": NOT_FINITE if is_number and not math.isfinite(drift) else drift,
    } | watch.claims({})


def right_drift(case: Scenario, replica: Values, place: Place) -> Observed:
    ranks = [drifted(case, replica, Place(index, place.ranks, place.world_size)) for index in range(place.size)]
    replicated = [name for name in replica if "shard" not in name]
    stacked = [torch.stack([rank[name].double() for rank in ranks]) for name in replicated]
    drifts = torch.stack([torch.zeros(()), *((each.amax(0) - each.amin(0)).max() for each in stacked)])
    drift = float(drifts.max())  # torch's max and amax keep a NaN
    return {"drift": drift if math.isfinite(drift) else NOT_FINITE}


def in_groups_too(scenarios: Sequence[Scenario]) -> list[Scenario]:
    return [*scenarios, *(replace(each, groups=GROUPS) for each in scenarios)]


exercise(
    "5.3", "A detector for drifting replicas", takes=["replica_drift"],
    trials=[
        OnRanks(
            cases=in_groups_too(scenarios), draw=draw_replica, give=drifted, run=run_detector, right=right_drift,
            without=tuple(Twin), world_sizes=(2, 4, 1),
        )
        for scenarios in (FINITE, NAN)  # every detector has to handle the scenarios without a NaN first
    ],
    passed="Your detector catches a single wrong element on a single rank, even if that element is a NaN. The detector "
    "ignores shards, because shards are supposed to differ.",
)  # fmt: skip
