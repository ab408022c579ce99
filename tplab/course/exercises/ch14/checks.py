"""The checks of exercises 14.3, the seats of ranks, and 14.4, the norm of the gradient over a mesh."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tplab.common.units import size as in_words
from tplab.course.checks.cases import Case, Place, make_group, random_tensor
from tplab.course.checks.describe import describe
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.observation import Claim, Observed, Seen, Snapshot
from tplab.course.checks.recorded_traffic import traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.memory.config import PRESETS, GPTConfig
from tplab.runtime import device, record
from tplab.tensor.sharding import Sharding

# 14.3: which rank sits where

AXES = ("tp", "pp", "dp")
Sizes = Mapping[str, int]


class Run(NamedTuple):
    """A training run on a cluster. `tokens` is the number of tokens in the whole batch."""

    model: str
    dp: int
    pp: int
    tp: int
    tokens: int
    gpus_per_node: int

    @property
    def sizes(self) -> dict[str, int]:
        return {"dp": self.dp, "pp": self.pp, "tp": self.tp}

    @property
    def config(self) -> GPTConfig:
        return PRESETS[self.model]

    def sent(self) -> dict[str, int]:
        """Return the bytes in the messages of a rank, by axis."""
        h = self.config.hidden_size
        activations = 2 * self.tokens // self.dp * h  # of one replica
        layers = self.config.num_layers // self.pp
        sent = {"dp": 2 * 12 * h * h * layers // self.tp, "pp": 2 * activations, "tp": 4 * layers * activations}
        return {axis: sent[axis] if self.sizes[axis] > 1 else 0 for axis in sent}

    def __str__(self) -> str:
        return f"{self.model} with dp = {self.dp}, pp = {self.pp}, tp = {self.tp}"


CLUSTERS = (
    Run("Llama 3 70B", 2, 4, 8, 128 * 2048, 8),
    Run("GPT-2 1.5B", 4, 4, 2, 512 * 1024, 8),
    Run("Llama 3 70B", 8, 4, 2, 128 * 2048, 8),  # dp sends 15 times as much as pp
    Run("Llama 3 70B", 8, 1, 8, 16 * 1024, 8),  # dp sends more than tp
    Run("Llama 3 70B", 2, 1, 16, 8 * 1024, 8),  # a tp group doesn't fit into a machine
    Run("Llama 3 8B", 4, 4, 4, 256 * 1024, 8),
    Run("Llama 3 70B", 8, 8, 4, 1024 * 2048, 72),
    Run("Llama 3 8B", 2, 4, 6, 512 * 4096, 8),  # a tp group may begin in one machine and end in the next
    Run("Llama 3 8B", 2, 1, 8, 8 * 1024, 8),  # tp sends more than dp, but in fewer groups
    Run("Llama 3 70B", 8, 2, 2, 16 * 2048, 6),
    Run("GPT-2 1.5B", 3, 2, 2, 192 * 1024, 8),
    Run("GPT-2 1.5B", 2, 2, 16, 2 * 1024, 4),
    Run("GPT-2 1.5B", 1, 1, 1, 4096, 8),
)
FORM = "bytes_per_axis returns a dictionary with a number for dp, pp, and tp"
ORDER = "best_order returns the three axes, each of them once"
FEWEST = "no other order sends fewer bytes through the walls"


def run_bytes(bytes_per_axis: Callable[..., Any], call: Call) -> Seen:
    run: Run = call.given
    said = bytes_per_axis(run.config, run.dp, run.pp, run.tp, run.tokens)
    if not isinstance(said, dict) or set(said) != set(AXES) or not all(map(is_number, said.values())):
        return one({FORM: Claim(f"it returned {describe(said)}")})
    return one({FORM: Claim("")} | {axis: float(said[axis]) for axis in AXES})


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def right_bytes(call: Call) -> Seen:
    return one({axis: float(size) for axis, size in call.given.sent().items()})


def byte_calls(generator: torch.Generator) -> Iterator[Call]:
    for run in CLUSTERS:
        yield Call(run, f"bytes_per_axis of {run} and {run.tokens:,} tokens")


def through_walls(order: Sequence[str], sizes: Sizes, sent: Mapping[str, int], gpus_per_node: int) -> dict[str, int]:
    """Return how many bytes of each axis pass through walls, if the ranks are seated in this order, innermost first."""
    machines: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    places = product(*(range(sizes[axis]) for axis in reversed(order)))  # the last coordinate advances fastest
    for rank, coordinates in enumerate(places):
        place = dict(zip(reversed(order), coordinates, strict=True))
        for axis in order:
            others = tuple(place[other] for other in order if other != axis)
            machines.setdefault((axis, others), set()).add(rank // gpus_per_node)
    walls = {axis: sum(len(seats) - 1 for (its, _), seats in machines.items() if its == axis) for axis in order}
    return {axis: walls[axis] * sent[axis] for axis in order}


def run_order(best_order: Callable[..., Any], call: Call) -> Seen:
    """Seat the ranks of every cluster, and return how many bytes pass through its walls."""
    seen: Observed = {ORDER: Claim(""), FEWEST: Claim("")}
    for number, run in enumerate(call.given, 1):
        said = best_order(run.sizes, run.sent(), run.gpus_per_node)
        order = tuple(said) if isinstance(said, (list, tuple)) else ()
        if sorted(map(str, order)) != sorted(AXES):
            return one({ORDER: Claim(f"for {run}, it returned {describe(said)}")})
        passed = through_walls(order, run.sizes, run.sent(), run.gpus_per_node)
        total = seen[f"cluster {number}"] = sum(passed.values())
        if not seen[FEWEST] and total > fewest_bytes(run):
            parts = ", ".join(f"{in_words(passed[axis])} of {axis}" for axis in order)
            cluster = f"cluster {number}, {run} and {run.gpus_per_node} GPUs per machine"
            seen[FEWEST] = Claim(
                f"in {cluster}, you seat {', '.join(order)}, innermost first, so {in_words(total)} pass through walls "
                f"({parts}), but {in_words(fewest_bytes(run))} are enough"
            )
    return one(seen)


def fewest_bytes(run: Run) -> int:
    every = (through_walls(order, run.sizes, run.sent(), run.gpus_per_node) for order in permutations(AXES))
    return min(sum(passed.values()) for passed in every)


def right_order(call: Call) -> Seen:
    return one({f"cluster {number}": fewest_bytes(run) for number, run in enumerate(call.given, 1)})


exercise(
    "14.3", "Seat the ranks", takes=["bytes_per_axis", "best_order"],
    trials=[
        Alone(of="bytes_per_axis", part="bytes_per_axis", calls=byte_calls, run=run_bytes, right=right_bytes),
        Alone(
            of="best_order", part="best_order", run=run_order, right=right_order,
            calls=lambda generator: [Call(CLUSTERS, f"best_order on {len(CLUSTERS)} clusters")],
        ),
    ],
    passed="On every cluster, no other order sends fewer bytes through the walls. And no single order is the best one "
    "on all of them.",
)  # fmt: skip

# 14.4: the norm of the gradient

SMALL = "nothing as large as a gradient is sent"
FLOAT = "the norm is a float"


@dataclass(frozen=True)
class Mesh(Case):
    """A mesh, given by the number of ranks along each axis.

    half:    whether the gradients are in float16, which can't hold their squares
    frozen:  whether a later stage has no gradients (except for the tied table's if that stage is the last one)
    copied:  whether the tied table is replicated over tp instead of split
    single:  whether the only stage, which is both the first and the last one, gets the table as `tied`
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    half: bool = False
    frozen: bool = False
    copied: bool = False
    single: bool = False

    def describe(self, name: str) -> str:
        how = ", gradients in float16" * self.half + ", and a stage without gradients of its own" * self.frozen
        how += ", and the full tied table on every tp rank" * self.copied
        how += ", and a tied table on the only stage" * self.single
        return f"dp = {self.dp}, pp = {self.pp}, tp = {self.tp}{how}"

    @property
    def cuts(self) -> dict[str, int]:
        """The dimension along which each sharded parameter is split. Parameters that aren't listed are replicated."""
        return {"up": 0, "down": 1} | ({} if self.copied else {"table": 0})

    def groups_of(self, axis: str) -> list[list[int]]:
        """Return the ranks of every "tp" group or every "pp" group."""
        grid = torch.arange(self.dp * self.pp * self.tp).view(self.dp, self.pp, self.tp)
        return (grid if axis == "tp" else grid.transpose(1, 2)).flatten(0, 1).tolist()


MESHES = {
    1: (Mesh(), Mesh(half=True), Mesh(single=True)),
    2: (Mesh(tp=2), Mesh(tp=2, single=True), Mesh(pp=2), Mesh(dp=2), Mesh(pp=2, frozen=True)),
    4: (
        Mesh(pp=2, tp=2),
        Mesh(dp=2, tp=2),
        Mesh(dp=2, pp=2),
        Mesh(tp=4),
        Mesh(pp=2, tp=2, half=True),
        Mesh(pp=4, frozen=True),
        Mesh(pp=2, tp=2, copied=True),
    ),
}


class Full(NamedTuple):
    """The unsharded gradients, which are the same for all replicas."""

    stages: list[dict[str, Tensor]]
    table: Tensor  # shared by the first and the last stage


def draw(case: Mesh, generator: torch.Generator, size: int) -> Full:
    shapes = {"up": (12, 3), "down": (3, 8), "norm": (6,)}  # `up` has the shape of the table, but isn't tied

    def gradient(*shape: int) -> Tensor:
        if case.half:
            return torch.randint(-400, 401, shape, generator=generator).double()
        return random_tensor(generator, *shape)

    stages = [{name: gradient(*shape) for name, shape in shapes.items()} for _ in range(case.pp)]
    if case.frozen:
        stages[case.pp // 2] = {}
    return Full(stages, gradient(12, 3))


def give(case: Mesh, full: Full, place: Place) -> dict[str, Tensor]:
    """Return the gradients that a rank holds."""
    stage, part = place.index // case.tp % case.pp, place.index % case.tp
    mine = full.stages[stage] | ({"table": full.table} if stage in (0, case.pp - 1) else {})
    return {
        name: value.chunk(case.tp, case.cuts[name])[part].contiguous() if name in case.cuts else value
        for name, value in mine.items()
    }


def run_norm(gradient_norm: Callable[..., Any], case: Mesh, given: dict[str, Tensor], group: Any) -> Observed:
    tp_group, pp_group = (make_group(case.groups_of(axis)) for axis in ("tp", "pp"))
    gradients = {name: gradient.half() if case.half else gradient for name, gradient in given.items()}
    named = {name: as_parameter(gradient, case.cuts.get(name)) for name, gradient in gradients.items()}
    tied = named.get("table") if case.pp > 1 or case.single else None
    params = list(named.values())
    params.insert(1, nn.Parameter(torch.ones(2, dtype=case.dtype, device=device())))  # it has no gradient
    before = Snapshot(parameters=params, **{f"gradient {n}": param.grad for n, param in enumerate(params)})
    with record() as section, called_as("gradient_norm(parameters, tp_group, pp_group, tied)"):
        norm = gradient_norm(iter(params) if case.frozen else params, tp_group, pp_group, tied)
    sent = [call for call in traffic(section) if call.numel > 2 * len(call.group)]
    return {
        "norm": torch.tensor(norm, dtype=case.dtype) if type(norm) is float else norm,
        FLOAT: Claim("" if type(norm) is float or norm is None else f"it's a {type(norm).__name__}"),
        SMALL: Claim(f"{sent[0].kind} of {sent[0].numel} elements" if sent else ""),
        "inputs unchanged": before.changed(),
    }


def as_parameter(gradient: Tensor, dim: int | None) -> nn.Parameter:
    """Return a parameter with this gradient. It's split along `dim`, or replicated if `dim` is None."""
    param = nn.Parameter(torch.zeros_like(gradient, device=device()))
    param.grad = gradient.clone().to(device())
    if dim is not None:
        param.tensor_parallel = Sharding(dim)  # type: ignore[attr-defined]
    return param


def right_norm(case: Mesh, full: Full, place: Place) -> Observed:
    every = [*(value for stage in full.stages for value in stage.values()), full.table]
    return {"norm": torch.tensor(math.sqrt(sum(float(value.square().sum()) for value in every)), dtype=torch.float64)}


exercise(
    "14.4", "Fix the norm of the gradient", takes=["gradient_norm"],
    trials=[
        OnRanks(
            cases=lambda world_size: MESHES[world_size], draw=draw, give=give, run=run_norm, right=right_norm,
            values_on_cpu=True, world_sizes=(2, 4, 1),
        )
    ],
    passed="Every parameter of the model counts once, on every mesh, and all ranks agree on the norm.",
)  # fmt: skip
