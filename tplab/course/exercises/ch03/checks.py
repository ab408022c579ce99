"""The checks of chapter 03: a table of operators (3.1), f (3.2), g, scatter, gather (3.3) and a sum to fix (3.4)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tplab.course.checks import Case, Claim, Observed, Place, Snapshot, Twin, random_tensor, same_memory, traffic
from tplab.course.checks.forms.operators import ADD, COPY, GATHER, SPLIT, laid_out, operator, total
from tplab.course.checks.forms.statements import Statement, refuses, statements
from tplab.course.checks.trials import OnRanks, exercise
from tplab.runtime import device, record

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

# 3.4: a sum to fix

NOT_WRITTEN = "nothing is written into x, not even for a moment"
OWN_MEMORY = "the result has memory of its own"


@dataclass(frozen=True)
class Layout(Case):
    layout: str = "contiguous"
    shape: tuple[int, ...] = (3, 4)

    def describe(self, name: str) -> str:
        return f"x of shape {list(self.shape)}, {self.layout}"


LAYOUTS = (
    Layout(),
    Layout("transposed"),
    Layout("every other column"),
    Layout("expanded"),
    Layout("transposed on rank 0 only"),
    Layout("transposed", (2, 3, 4)),
    Layout(shape=(5,)),
    Layout(shape=()),
)


def draw_terms(case: Layout, generator: torch.Generator, size: int) -> list[Tensor]:
    shape = (1, *case.shape[1:]) if case.layout == "expanded" else case.shape
    return [random_tensor(generator, *shape, 1)[..., 0].expand(case.shape) for _ in range(size)]


def give_term(case: Layout, problem: list[Tensor], place: Place) -> tuple[Tensor, str]:
    layout = case.layout.removesuffix(" on rank 0 only")
    return problem[place.index].contiguous().clone(), "contiguous" if layout != case.layout and place.index else layout


def run_sum(answer: Callable[[Tensor], Tensor], case: Layout, given: tuple[Tensor, str], group: Any) -> Observed:
    x, layout = given[0].to(device()), given[1]
    x = x[:1].expand(case.shape) if layout == "expanded" else laid_out(x, layout)
    before, version = Snapshot(x=x), x._version
    with record() as section:
        out = answer(x)
    changed = before.changed()
    restored = x._version != version and not changed
    shares = isinstance(out, Tensor) and same_memory(out, x)
    seen: Observed = {"out": out, "traffic": traffic(section), "inputs unchanged": changed}
    if not changed:
        seen[NOT_WRITTEN] = Claim("x was overwritten, and then its old values were restored" if restored else "")
    return seen | {OWN_MEMORY: Claim("it shares that of x" if shares else "")}


exercise(
    "3.4", "Fix a sum", takes=["sum_over_ranks"],
    trials=[
        OnRanks(
            cases=LAYOUTS, draw=draw_terms, give=give_term, run=run_sum, world_sizes=(2, 4, 1),
            right=lambda case, problem, place: {
                "out": total(problem), "traffic": place.traffic(("all_reduce", problem[0].numel())),
            },
            terms=lambda case, problem, size: {"x": problem},
        )
    ],
    passed="The sum is correct for any memory layout, and the caller's tensor is left unchanged.",
)  # fmt: skip
