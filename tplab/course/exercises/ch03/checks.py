"""The checks of chapter 03: operators in a table (3.1), f (3.2), g, scatter, gather (3.3), and a block to fix (3.4)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tplab.course.checks.cases import Case, Place, random_tensor
from tplab.course.checks.forms.operators import ADD, COPY, GATHER, SPLIT, operator
from tplab.course.checks.forms.statements import Statement, refuses, statements
from tplab.course.checks.observation import Claim, Observed, observe
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.runtime import device

# 3.1: a table of operators

Table = dict[str, tuple[str, str]]
WAYS = ("nothing", "all-reduce", "all-gather", "my slice")
RIGHT: Table = {
    "f": ("nothing", "all-reduce"),
    "g": ("all-reduce", "nothing"),
    "scatter": ("my slice", "all-gather"),
    "gather": ("all-gather", "my slice"),
}
H, INNER, OUT = 8, 12, 16  # divisible by every p, and different, so that the check notices if they're mixed up
KEYS = "the table has the keys f, g, scatter and gather"
WORDS = "the table has two of the four words for each operator"
RUNS = "the network runs"


class Meeting(Function):
    """An operator that does `forward_way` in the forward pass and `backward_way` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_way: str, backward_way: str) -> Tensor:
        ctx.way = backward_way
        return done(forward_way, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return done(ctx.way, gradients[0]), None, None


def done(way: str, x: Tensor) -> Tensor:
    p = dist.get_world_size()
    if way == "nothing":
        return x.view_as(x)
    if way == "my slice":
        return x.chunk(p, -1)[dist.get_rank()].clone()
    y = x.clone(memory_format=torch.contiguous_format)
    if way == "all-reduce":
        dist.all_reduce(y)
        return y
    parts = [torch.empty_like(y) for _ in range(p)]
    dist.all_gather(parts, y)
    return torch.cat(parts, -1)


@dataclass(frozen=True)
class Network(Case):
    """A small network in which only the operator `name` follows the learner's table."""

    name: str

    def describe(self, name: str) -> str:
        return f"a network with {self.name}"

    def __call__(self, x: Tensor, a: Tensor, b: Tensor, op: Callable[[str, Tensor], Tensor]) -> Tensor:
        """Run the network with full weights or with shards: f and g test two layers, scatter and gather just one."""
        if self.name in ("f", "g"):
            return op("g", torch.tanh(op("f", x) @ a) @ b)
        return op("g", op("scatter", x) @ a) if self.name == "scatter" else op("gather", op("f", x) @ a)

    def shards(self, a: Tensor, b: Tensor, rank: int, p: int) -> tuple[Tensor, Tensor]:
        part = a.chunk(p, 0 if self.name == "scatter" else 1)[rank]
        return part.contiguous(), b.chunk(p, 0)[rank].contiguous()

    def gradients(self, out: Tensor, dy: Tensor, **leaves: Tensor) -> dict[str, Tensor]:
        out.backward(dy)
        found = {"out": out.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}
        return {name: value for name, value in found.items() if value is not None}


class Problem(NamedTuple):
    x: Tensor  # [5, H]
    a: Tensor  # [H, INNER]
    b: Tensor  # [INNER, OUT]
    dy: Tensor  # [5, OUT], or [5, INNER] for a network with one layer


def draw_network(case: Network, generator: torch.Generator, size: int) -> Problem:
    random = partial(random_tensor, generator)
    return Problem(random(5, H), random(H, INNER), random(INNER, OUT), random(5, OUT if case.name in "fg" else INNER))


def run_network(operator_table: Callable[[], Any], case: Network, given: Problem, group: Any) -> Observed:
    said, rank, p = operator_table(), dist.get_rank(), dist.get_world_size()
    if not isinstance(said, dict) or set(said) != set(RIGHT):
        return {KEYS: Claim(f"it's {str(said):.60}")}
    for name, ways in said.items():
        if not isinstance(ways, (tuple, list)) or len(ways) != 2 or not set(ways) <= set(WAYS):
            return {WORDS: Claim(f"for {name}, it says {ways!r}")}
    ways = RIGHT | {case.name: tuple(said[case.name])}
    shards = case.shards(given.a, given.b, rank, p)
    x, a, b = (tensor.to(device()).clone().requires_grad_() for tensor in (given.x, *shards))
    try:
        out = case(x, a, b, lambda which, tensor: Meeting.apply(tensor, *ways[which]))
        seen = case.gradients(out, given.dy.to(device()), x=x, a=a, b=b)
    except RuntimeError as error:
        return {RUNS: Claim(str(error).splitlines()[0])}
    return seen | {RUNS: Claim("")}


def right_network(case: Network, problem: Problem, place: Place) -> Observed:
    x, a, b = (tensor.clone().requires_grad_() for tensor in problem[:3])
    found = case.gradients(case(x, a, b, lambda which, tensor: tensor), problem.dy, x=x, a=a, b=b)
    shards = case.shards(found["da"], found.get("db", b), place.index, place.size)
    return found | {name: value for name, value in zip(("da", "db"), shards, strict=True) if name in found}


def network(name: str) -> OnRanks:
    return OnRanks(
        part=name, cases=[Network(name)], draw=draw_network, run=run_network, right=right_network, world_sizes=(2, 4),
        without=tuple(Twin), values_on_cpu=True,
    )  # fmt: skip


exercise(
    "3.1", "A table of four operators", takes=["operator_table"], trials=[network(name) for name in RIGHT],
    passed="Networks built with the operators in your table compute the same gradients as a single process does.",
)  # fmt: skip

# 3.2 and 3.3: the four operators

exercise(
    "3.2", "f", takes=["CopyToRegion"], trials=[operator("f", COPY, ADD, of="CopyToRegion")],
    passed="Your operator computes the correct gradient with a single all-reduce in the backward pass. The operator "
    "also handles strided and expanded gradients, and it doesn't overwrite any of its inputs.",
)  # fmt: skip

NINE_COLUMNS = Statement(
    "a size that can't be divided evenly is refused",
    refuses(lambda scatter: scatter.apply(torch.zeros(4, 9, device=device()))),
    "scatter of 9 columns",
)
exercise(
    "3.3", "g, scatter and gather", takes=["ReduceFromRegion", "ScatterToRegion", "GatherFromRegion"],
    trials=[
        operator("g", ADD, COPY, of="ReduceFromRegion", part="g"),
        operator("scatter", SPLIT, GATHER, of="ScatterToRegion", part="scatter"),
        statements(NINE_COLUMNS, of="ScatterToRegion", part="scatter"),
        operator("gather", GATHER, SPLIT, of="GatherFromRegion", part="gather"),
    ],
    passed="Each operator calls a collective in one of its two passes and sends nothing in the other pass.",
)  # fmt: skip

# 3.4: a residual block to fix

WIDTH = 8


@dataclass(frozen=True)
class Leading(Case):
    """All dimensions of x except the last."""

    leading: tuple[int, ...] = (5,)

    def describe(self, name: str) -> str:
        return f"{name} with x of shape {[*self.leading, WIDTH]}"


class Block(NamedTuple):
    """The tensors of a residual block in a single process."""

    x: Tensor  # [.., h]
    w: Tensor  # [h]
    a: Tensor  # [p, h], each rank's own weight
    dz: Tensor  # [.., h]

    def backward(self) -> dict[str, Tensor]:
        x, w, a = (tensor.clone().requires_grad_() for tensor in self[:3])
        z = x + torch.tanh(a * (w * x).unsqueeze(-2)).sum(-2)  # the terms have the shape [.., p, h]
        gradients = torch.autograd.grad(z, (x, w, a), self.dz)
        return {"out": z.detach(), **dict(zip(("dx", "dw", "da"), gradients, strict=True))}


def draw_block(case: Leading, generator: torch.Generator, size: int) -> Block:
    random = partial(random_tensor, generator)
    return Block(random(*case.leading, WIDTH), random(WIDTH), random(size, WIDTH), random(*case.leading, WIDTH))


def run_block(answer: Callable[..., Any], case: Leading, given: Block, group: Any) -> Observed:
    inputs = {name: getattr(given, name).to(device()) for name in "xwa"}
    return observe(answer, given.dz.to(device()), inputs=inputs, any_size=-1)


def right_block(case: Leading, problem: Block, place: Place) -> Observed:
    found, sent = problem.backward(), place.traffic(("all_reduce", problem.x.numel()))
    return found | {"da": found["da"][place.index], "forward traffic": sent, "backward traffic": sent}


def own_terms(case: Leading, problem: Block, size: int) -> dict[str, list[Tensor]]:
    """Return what the ranks would compute alone: the terms of the sum, and their contributions to dx and to dw."""
    alone = [problem._replace(a=problem.a[rank : rank + 1]).backward() for rank in range(size)]
    return {
        "tanh term": [each["out"] - problem.x for each in alone],
        "contribution to dw": [each["dw"] for each in alone],
        "contribution to dx": [each["dx"] - problem.dz for each in alone],
        "upstream gradient": [problem.dz] * size,
    }


exercise(
    "3.4", "Fix a residual block", takes=["residual_block"],
    trials=[
        OnRanks(
            cases=(Leading(), Leading((2, 3)), Leading(())), draw=draw_block, run=run_block, right=right_block,
            give=lambda case, problem, place: problem._replace(a=problem.a[place.index]), terms=own_terms,
            world_sizes=(2, 4, 1),  # two ranks come first, as they reveal the most about a mistake
        )
    ],
    passed="All gradients are those of a single process, and there's one all-reduce in each pass. So every rank's copy "
    "of w makes the same update.",
)  # fmt: skip
