"""The checks of chapter 01: scatter and gather (1.1), rings (1.2, 1.3), costs (1.4) and a step to fix (1.5)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.course.checks import twins
from tplab.course.checks.cases import Case, Place, random_tensor
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.messages import unnamed
from tplab.course.checks.observation import Claim, Observed, Seen, Snapshot, same_memory
from tplab.course.checks.recorded_traffic import CollectiveCall, Traffic, traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.runtime import device, record

# Two ranks reveal the most about a mistake, and three ranks are the fewest with two different neighbors. An answer that
# still runs after 30 seconds won't end, because its messages only take milliseconds
messages_on_ranks = partial(OnRanks, world_sizes=(2, 3, 4, 1), timeout=30.0)

# 1.1: scatter and gather. Messages have to be contiguous, so the tensors always are

NAMES_SENDER = "every receive names its sender"
RETURNS_OUT = "scatter returns out itself"
OWN_MEMORY = "the gathered tensors share no memory with x"
SHAPES = ((5,), (2, 3))


@dataclass(frozen=True)
class Root(Case):
    """A scatter from rank `root` followed by a gather to the same rank, or only one of the two.

    shape: the shape of each rank's chunk in the scatter, and of each rank's tensor in the gather
    """

    root: int
    shape: tuple[int, ...] = SHAPES[0]
    scatters: bool = True
    gathers: bool = True

    def describe(self, name: str) -> str:
        return " = ".join([*["src"] * self.scatters, *["dst"] * self.gathers, str(self.root)])


def roots(p: int) -> list[Root]:
    return [Root(root, SHAPES[index % len(SHAPES)]) for index, root in enumerate(sorted({0, p - 1, p // 2}))]


class Chunks(NamedTuple):
    chunks: list[Tensor] | None  # the root scatters these. None on every rank except the root
    xs: list[Tensor]  # the root gathers these


def draw_chunks(case: Root, generator: torch.Generator, size: int) -> Chunks:
    return Chunks(*([random_tensor(generator, *case.shape) for _ in range(size)] for _ in range(2)))


def give_chunks(case: Root, problem: Chunks, place: Place) -> Chunks:
    return Chunks(problem.chunks if place.index == case.root else None, [problem.xs[place.index]])


def run_scatter_and_gather(answers: tuple[Any, Any], case: Root, given: Chunks, group: Any) -> Observed:
    scatter, gather = answers
    chunks = None if given.chunks is None else [chunk.to(device()) for chunk in given.chunks]
    buffer = torch.full((2, *case.shape), 7.0, dtype=case.dtype, device=device())
    out = buffer[1]  # the check reads the buffer itself, to see whether this memory was filled
    x = given.xs[0].to(device())
    before = Snapshot(x=x, chunks=chunks, **{f"chunks[{index}]": chunk for index, chunk in enumerate(chunks or [])})
    seen: Observed = {}
    if case.scatters:
        with record() as section:
            returned = scatter(out, chunks, case.root)
        seen |= {"out": buffer[1], "returned": returned, "scatter traffic": traffic(section)}
        is_out = not isinstance(returned, Tensor) or same_memory(returned, out)
        seen[RETURNS_OUT] = Claim("" if is_out else "it returns a different tensor with the same values")
    if case.gathers:
        with record() as section:
            gathered = gather(x, case.root)
        seen |= {"gathered": gathered, "gather traffic": traffic(section)}
        shares = isinstance(gathered, (list, tuple)) and any(same_memory(each, x) for each in gathered)
        seen[OWN_MEMORY] = Claim("one of them does" if shares else "")
    text = f"{len(unnamed)} of them name no sender" if unnamed else ""
    return seen | {NAMES_SENDER: Claim(text), "inputs unchanged": before.changed()}


def right_chunks(case: Root, problem: Chunks, place: Place) -> Observed:
    assert problem.chunks is not None
    rank, mine = place.index, problem.chunks[place.index]
    at_root = rank == case.root
    others = [other for other in range(place.size) if other != case.root] if at_root else [rank]
    here, there = ("send", "recv") if at_root else ("recv", "send")  # what this rank does in scatter and in gather
    right: Observed = {}
    if case.scatters:
        sent = Traffic(CollectiveCall(here, mine.numel(), "float64", (case.root, other)) for other in others)
        right |= {"out": mine, "returned": mine, "scatter traffic": sent}
    if case.gathers:
        sent = Traffic(CollectiveCall(there, mine.numel(), "float64", (other, case.root)) for other in others)
        right |= {"gathered": problem.xs if at_root else None, "gather traffic": sent}
    return right


both = messages_on_ranks(
    cases=roots, draw=draw_chunks, give=give_chunks, run=run_scatter_and_gather, right=right_chunks,
    without=(Twin.STRIDED,),
)  # fmt: skip
exercise(
    "1.1", "Scatter and gather from send and receive", takes=["scatter", "gather"],
    trials=[  # each function alone first, so that a mistake in one of them isn't blamed on the other
        replace(both, cases=[Root(0, gathers=False)], world_sizes=(2,)),
        replace(both, cases=[Root(0, scatters=False)], world_sizes=(2,)),
        both,
    ],
    passed="Scatter and gather work with any root, and each of them needs only p - 1 messages.",
)  # fmt: skip

# 1.2 and 1.3: rings, which may send to the left or to the right

RING_OWN_MEMORY = "the result has its own memory"
Ring = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Input(Case):
    """The x of each rank.

    shape: each size is a number, or a multiple of p such as "p" or "4p"
    name:  the function's name, if the exercise has several functions
    """

    shape: tuple[int | str, ...]
    name: str = ""

    def describe(self, name: str) -> str:
        of = f"{self.name} of a tensor of shape" if self.name else "x of shape"
        return f"{of} [{', '.join(map(str, self.shape))}]"

    def sizes(self, p: int) -> list[int]:
        return [size if isinstance(size, int) else int(size.removesuffix("p") or 1) * p for size in self.shape]


def draw_xs(case: Input, generator: torch.Generator, size: int) -> list[Tensor]:
    return [random_tensor(generator, *case.sizes(size)) for _ in range(size)]


def run_ring(function: Ring, case: Input, given: Tensor, group: Any) -> Observed:
    x = given.to(device())
    before = Snapshot(x=x)
    with record() as section:
        out = function(x)
    shares = "writing into the result would change the caller's tensor" if same_memory(out, x) else ""
    return {
        "out": out, "traffic": traffic(section), "inputs unchanged": before.changed(), RING_OWN_MEMORY: Claim(shares),
    }  # fmt: skip


def ring_traffic(place: Place, count: int, numel: int) -> Traffic:
    """Return the traffic of a rank that sends `count` messages of `numel` elements and receives just as many.

    The rank sends them to the next rank in the ring's direction, and receives them from the previous rank.
    """
    if place.size == 1:
        return Traffic()
    rank, p, step = place.index, place.size, direction(place.observed)
    return Traffic(
        [CollectiveCall("send", numel, "float64", (rank, (rank + step) % p))] * count
        + [CollectiveCall("recv", numel, "float64", ((rank - step) % p, rank))] * count
    )


def direction(observed: Sequence[Observed]) -> int:
    """Return the direction of the ring, which is -1 if rank 0 sends to its left neighbor first, and 1 otherwise."""
    sends = [call for call in observed[0]["traffic"] if call.kind == "send"]
    p = len(observed)
    return -1 if p > 2 and sends and sends[0].group == (0, p - 1) else 1


def right_reduce_scatter(case: Input, xs: list[Tensor], place: Place) -> Observed:
    chunk = torch.stack(xs).sum(0)[place.index]
    return {"out": chunk, "traffic": ring_traffic(place, place.size - 1, chunk.numel())}


def right_all_gather(case: Input, xs: list[Tensor], place: Place) -> Observed:
    return {"out": torch.stack(xs), "traffic": ring_traffic(place, place.size - 1, xs[0].numel())}


def right_all_reduce(case: Input, xs: list[Tensor], place: Place) -> Observed:
    total = torch.stack(xs).sum(0)
    return {"out": total, "traffic": ring_traffic(place, 2 * (place.size - 1), total.numel() // place.size)}


def values_by_chunk(case: Input, xs: list[Tensor], size: int) -> dict[str, list[Tensor]]:
    return {f"values of chunk {index}": [x[index] for x in xs] for index in range(size)}


ring = partial(
    messages_on_ranks, draw=draw_xs, give=lambda case, xs, place: xs[place.index], run=run_ring,
    without=(Twin.STRIDED,),
)  # fmt: skip
exercise(
    "1.2", "Reduce-scatter in a ring", takes=["ring_reduce_scatter"],
    trials=[ring(cases=(Input(("p", 5)), Input(("p", 2, 3))), right=right_reduce_scatter, terms=values_by_chunk)],
    passed="Each rank sent p - 1 messages of one chunk each. Together, these chunks are (p-1)/p of x.",
)  # fmt: skip
exercise(
    "1.3", "All-gather and all-reduce in a ring", takes=["ring_all_gather", "ring_all_reduce"],
    trials=[
        ring(
            of="ring_all_gather", part="all-gather", right=right_all_gather,
            cases=[Input(shape, "ring_all_gather") for shape in ((5,), (2, 3))],
        ),
        ring(  # x may be non-contiguous, because the answer has to copy it anyway
            of="ring_all_reduce", part="all-reduce", right=right_all_reduce, without=(),
            cases=[Input(shape, "ring_all_reduce") for shape in (("4p", 3), (3, "p", 2), ("5p",))],
        ),
    ],
    passed="In your all-reduce, each rank sent 2(p-1) messages, and each message contained 1/p of x.",
)  # fmt: skip

# 1.4: what a ring and a tree cost, and the message size from which the ring is faster


class Link(NamedTuple):
    alpha: float  # seconds per message
    beta: float  # seconds per byte


def ring_cost(n: float, p: int, link: Link) -> float:
    return 2 * (p - 1) * (link.alpha + link.beta * n / p)


def tree_cost(n: float, p: int, link: Link) -> float:
    levels = next(levels for levels in range(p) if 2**levels >= p)
    return 2 * levels * (link.alpha + link.beta * n)


def crossover(p: int, link: Link) -> float:
    """Return the smallest n for which the ring costs at most as much as the tree. This is found by bisection."""

    def ring_is_slower(n: float) -> bool:
        return ring_cost(n, p, link) > tree_cost(n, p, link) * (1 + 1e-15)

    low, high = 0.0, 1e15
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if ring_is_slower(middle) else (low, middle)
    return high if ring_is_slower(0.0) else 0.0


def cost_calls(generator: torch.Generator) -> Iterator[Call]:
    for p in (8, 5, 3, 2, 64, 1):
        for n, link in ((3.0e6, Link(2e-5, 1e-10)), (64.0, Link(3e-6, 2e-11)), (5e8, Link(1e-5, 4e-11))):
            yield Call((n, link), f"microseconds for n = {n:g} bytes", p=p)


def crossover_calls(generator: torch.Generator) -> Iterator[Call]:
    for p in (8, 5, 4, 64, 512, 3, 2, 1):
        for link in (Link(2e-5, 1e-10), Link(3e-6, 2e-11), Link(0.5, 2.0)):
            yield Call(link, f"ring_wins_from with alpha = {link.alpha:g} and beta = {link.beta:g}", p=p)


def run_costs(answers: tuple[Any, Any], call: Call) -> Seen:
    n, link = call.given
    seen = {}
    for name, seconds in zip(("ring", "tree"), answers, strict=True):
        with called_as(f"{name}_seconds(n={n:g}, world_size={call.p}, alpha={link.alpha:g}, beta={link.beta:g})"):
            seen[name] = number(seconds(n, call.p, *link), 1e6)
    return one(seen)


def run_crossover(ring_wins_from: Any, call: Call) -> Seen:
    alpha, beta = call.given
    with called_as(f"ring_wins_from(world_size={call.p}, alpha={alpha:g}, beta={beta:g})"):
        return one({"bytes": number(ring_wins_from(call.p, alpha, beta))})


def number(value: object, unit: float = 1.0) -> object:
    """Return value times unit as a float64 tensor. If the value isn't a number, return it unchanged."""
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return torch.as_tensor(value, dtype=torch.float64).detach().reshape(()) * unit
    return value


exercise(
    "1.4", "Ring or tree?", takes=["ring_seconds", "tree_seconds", "ring_wins_from"],
    trials=[
        Alone(
            of=("ring_seconds", "tree_seconds"), calls=cost_calls, run=run_costs, tol=1e-6,
            right=lambda call: one(
                {"ring": number(ring_cost(call.given[0], call.p, call.given[1]), 1e6),
                 "tree": number(tree_cost(call.given[0], call.p, call.given[1]), 1e6)}
            ),
        ),
        Alone(
            of="ring_wins_from", calls=crossover_calls, run=run_crossover, tol=1e-6,
            right=lambda call: one({"bytes": number(crossover(call.p, call.given))}),
        ),
    ],
    passed="Small messages are all about latency, and large messages are all about bandwidth.",
)  # fmt: skip

# 1.5: a training step that the ranks should all take or all skip

RATE = 0.25
WAITS = "the step waits for every collective"
LITTLE = "the step sends at most the gradient and one more element"
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Scene(Case):
    """A case that specifies what's wrong with the gradients.

    broken: (b, value) pairs. The value replaces the last element of the gradient on rank -b modulo p
    """

    note: str
    broken: tuple[tuple[int, float], ...] = ()
    shape: tuple[int, ...] = (8,)

    def describe(self, name: str) -> str:
        return self.note


SCENES = (
    Scene("all gradients finite"),
    Scene("inf on the last rank", ((1, INF),)),
    Scene("NaN on the first rank", ((0, NAN),)),
    Scene("-inf on the last rank and inf on the one before", ((1, -INF), (2, INF)), (2, 3)),
    Scene("all gradients finite, in two dimensions", (), (2, 3)),
    Scene("gradients that sum to zero", (), (1,)),
)


class Training(NamedTuple):
    weight: Tensor
    gradients: list[Tensor]


def draw_training(case: Scene, generator: torch.Generator, size: int) -> Training:
    gradients = [random_tensor(generator, *case.shape) for _ in range(size)]
    if "zero" in case.note and size > 1:
        gradients[-1] = -torch.stack(gradients[:-1]).sum(0)
    for back, value in case.broken:
        gradients[-back % size].view(-1)[-1] = value
    return Training(random_tensor(generator, *case.shape), gradients)


def run_step(step: Any, case: Scene, given: tuple[Tensor, Tensor], group: Any) -> Observed:
    weight, gradient = (tensor.to(device()).clone() for tensor in given)
    with record() as section:
        taken = step(weight, gradient, RATE)
    seen = traffic(section)
    sent, late = sum(call.numel for call in seen), Traffic(call for call in seen if not call.waited)
    said = f"it sends {sent} elements, and the gradient has {gradient.numel()}" if sent > gradient.numel() + 1 else ""
    waits = str(late) if late else ""
    return {"weight": weight, "step taken": bool(taken), WAITS: Claim(waits), LITTLE: Claim(said)}


def right_step(case: Scene, problem: Training, place: Place) -> Observed:
    total = torch.stack(problem.gradients).sum(0)
    weight = problem.weight if case.broken else problem.weight - RATE * total
    return {"weight": weight, "step taken": not case.broken}


def scene(case: Scene) -> OnRanks:
    """Return the trial of one case. Only the first case has twins, which repeat it in float32 and in bfloat16."""
    return OnRanks(
        cases=[case], draw=draw_training, run=run_step, right=right_step, world_sizes=(2, 4, 1), timeout=30.0,
        give=lambda case, problem, place: (problem.weight, problem.gradients[place.index]),
        without=[twin for twin in Twin if case is not SCENES[0] or twin not in twins.ROUNDED],
    )  # fmt: skip


exercise(
    "1.5", "Fix a careful training step", takes=["careful_step"],
    # One case at a time, because a skipped collective would be paired with a call from the next case
    trials=[scene(case) for case in SCENES],
    passed="Either all ranks take the step, or none of them do. There are two ways to get there. You can send a flag, "
    "as the hints suggest, or you can look at the sum of the gradients, because inf and NaN survive a sum. But only "
    "the flag can tell a gradient that isn't finite from finite gradients whose sum overflows.",
)  # fmt: skip
