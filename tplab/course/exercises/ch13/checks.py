"""The checks of exercises 13.2, F and B of a single stage, and 13.3, the program of one rank.

The stages y = tanh(x W^T + b) note which micro-batch goes forward or backward, and how many graphs they keep alive.
What's right comes from the full chain of stages in a single process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from tplab.course.checks import twins
from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.describe import describe
from tplab.course.checks.forms.alone import Alone, Call, in_other_conditions
from tplab.course.checks.observation import Changed, Claim, Observed, Seen, Snapshot
from tplab.course.checks.recorded_traffic import CollectiveCall, Traffic, traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.exercises.ch13.played import shelf
from tplab.pipeline.p2p import Channels
from tplab.pipeline.schedules import Action
from tplab.runtime import device, record

BATCH, HIDDEN = 3, 5

IN_ORDER = "the stage's work follows the list"
KEPT = "nothing stays behind when a micro-batch leaves the shelf"
UNWAITED = "every message was waited for"
PAIR = "forward_stage returns a message and what backward_stage needs"
PLAIN = "a message has no graph"
SENT_BACK = "backward_stage returns a gradient for the previous stage"
EARLIER = 0.5  # the value of each element of an earlier gradient

Lists = Sequence[Sequence[tuple[str, int]]]  # for each rank, the (kind, micro-batch) of its actions


class WatchedStage(nn.Module):
    """A stage y = tanh(x W^T + b), with x [b, h] or ids [b], that notes what it does.

    weight     [h, h + 1], with the bias in the last column
    flow       the expected x of each micro-batch, [m, b, h], used to recognize the micro-batch
    tol        how far an element may be from the expected one
    events     the actions so far, "F0", "B0", ..., or "F of something else" for an x that is none of these
    live       the number of graphs for a backward pass that exist
    """

    def __init__(self, weight: Tensor, flow: Tensor, tol: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight[:, :-1].clone())
        self.bias = nn.Parameter(weight[:, -1].clone())
        self.flow, self.tol = flow, tol
        self.events: list[str] = []
        self.live = self.most_live = 0

    def forward(self, x: Tensor) -> Tensor:
        same_shape = x.shape == self.flow.shape[1:]
        known = [k for k, right in enumerate(self.flow) if same_shape and torch.allclose(x, right, atol=self.tol)]
        name = str(known[0]) if known else " of something else"
        self.events.append(f"F{name}")
        return _Watch.apply(through([(self.weight, self.bias)], x), self, name)

    def out_of_step(self, right: Sequence[str]) -> str:
        """Describe the first action that differs from the right one, or return ""."""
        for place, (mine, wanted) in enumerate(zip(self.events, right, strict=False)):
            if mine != wanted:
                return f"action {place} was {mine} instead of {wanted}"
        if len(self.events) < len(right):
            return f"only {len(self.events)} of {len(right)} actions were done, and {right[len(self.events)]} wasn't"
        extra = self.events[len(right) :]
        return f"after all of them, there was {extra[0]}" if extra else ""


class _Token:
    """An object that lives as long as the graph of one micro-batch."""

    def __init__(self, stage: WatchedStage) -> None:
        self.stage = stage
        stage.live += 1
        stage.most_live = max(stage.most_live, stage.live)

    def __del__(self) -> None:
        self.stage.live -= 1


class _Watch(Function):
    """Identity function whose graph node notes a micro-batch's backward pass and holds a `_Token`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: WatchedStage, name: str) -> Tensor:
        ctx.stage, ctx.name = stage, name
        if ctx.needs_input_grad[0]:
            ctx.token = _Token(stage)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        ctx.stage.events.append(f"B{ctx.name}")
        return dy, None, None


def through(stages: Sequence[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """Pass x [.., h], or ids [..], through stages, each a (weight [h, h], bias [h]) pair. Returns [.., h]."""
    for weight, bias in stages:
        x = torch.tanh((F.linear(x, weight) if x.is_floating_point() else F.embedding(x, weight)) + bias)
    return x


def halves(weights: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Split the weights of all stages [p, .., h + 1] into (weight, bias) pairs."""
    return [(weight[:, :-1], weight[:, -1]) for weight in weights]


# Exercise 13.2


class Chain(NamedTuple):
    """Stages in a single process, and the micro-batches that go through them.

    order      the actions, which each go through all stages
    """

    weights: Tensor  # [stages, h, h + 1]
    inputs: Tensor  # [m, b, h], or ids [m, b]
    gradients: Tensor  # of the last stage's outputs, [m, b, h]
    order: tuple[str, ...]


def chains(generator: torch.Generator) -> Iterator[Call]:
    for ids, count, order in (
        (False, 1, "F0 B0"), (False, 2, "F0 B0"), (True, 2, "F0 F1 B0 B1"), (False, 3, "F0 F1 B1 F2 B2 B0"),
        (True, 3, "F0 F1 F2 B0 B2 B1"),
    ):  # fmt: skip
        m = order.count("F")
        inputs = torch.randint(HIDDEN, (m, BATCH), generator=generator)
        if not ids:
            inputs = random_tensor(generator, m, BATCH, HIDDEN)
        weights, gradients = random_tensor(generator, count, HIDDEN, HIDDEN + 1), random_tensor(
            generator, m, BATCH, HIDDEN)  # fmt: skip
        note = f"stages: {count}, micro-batches of {'token IDs' if ids else 'floats'}: {m}"
        yield from in_other_conditions(Call(Chain(weights, inputs, gradients, tuple(order.split())), note))


def run_chain(answers: Any, call: Call) -> Seen:
    forward_stage, backward_stage = answers
    weights, inputs, upstream = (twins.given(call.twin, tensor) for tensor in call.given[:3])
    stages = [WatchedStage(weight, inputs, 0.0) for weight in weights]
    seen: Observed = {PAIR: Claim(""), PLAIN: Claim("")}
    kept: dict[tuple[int, int], Any] = {}
    outputs, gradients, changed = {}, {}, list[str]()
    for kind, k in [(action[0], int(action[1:])) for action in call.given.order]:
        if kind == "F":
            message = inputs[k]
            for number, stage in enumerate(stages):
                before = Snapshot(message=message)
                returned = forward_stage(stage, message)
                changed += before.changed()
                if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Tensor)):
                    return [{PAIR: Claim(f"it returned {describe(returned)}")}]
                message, kept[k, number] = returned
                if message.requires_grad:
                    seen[PLAIN] = Claim(f"the message of stage {number} has one")
            outputs[k] = message.detach().clone()
            del message, returned
            continue
        gradient = upstream[k]
        for number in reversed(range(len(stages))):
            before = Snapshot(gradient=gradient)
            returned = backward_stage(kept.pop((k, number)), gradient)
            changed += before.changed()
            if not isinstance(returned, Tensor) and number > 0:
                text = f"backward_stage returned {describe(returned)} for stage {number}"
                return [seen | {SENT_BACK: Claim(text)}]
            gradient = returned
        gradients[k] = gradient
    live = max(stage.live for stage in stages)
    sent_back = [gradients[k] for k in sorted(gradients)]
    return [
        seen
        | {
            "output": torch.stack([outputs[k] for k in sorted(outputs)]),
            "dx": torch.stack(sent_back) if all(isinstance(each, Tensor) for each in sent_back) else sent_back[0],
            **{f"dW{i}": stage.weight.grad for i, stage in enumerate(stages)},
            **{f"db{i}": stage.bias.grad for i, stage in enumerate(stages)},
            KEPT: Claim(f"{live} graph{'s are' if live > 1 else ' is'} still there" if live else ""),
            "messages unchanged": Changed(changed),
        }
    ]


def right_chain(call: Call) -> Seen:
    weights, inputs, gradients, _ = call.given
    leaves = [weights.clone().requires_grad_()]
    x = inputs.clone()
    if x.is_floating_point():
        leaves.append(x.requires_grad_())
    out = through(halves(leaves[0]), x)
    found = torch.autograd.grad(out, leaves, gradients)
    each = {f"dW{i}": d[:, :-1] for i, d in enumerate(found[0])} | {f"db{i}": d[:, -1] for i, d in enumerate(found[0])}
    right = {"output": out.detach(), "dx": found[1] if len(found) > 1 else None, **each}
    return [twins.expected(call.twin, right)]


exercise(
    "13.2", "Across the gap", takes=["forward_stage", "backward_stage"],
    trials=[Alone(calls=chains, run=run_chain, right=right_chain)],
    passed="Your stages get the same gradients as autograd in one process, although no graph connects them.",
)  # fmt: skip


# Exercise 13.3


@dataclass(frozen=True)
class Schedule(Case):
    """The lists of all ranks for m micro-batches.

    earlier: whether the parameters already have gradients, from an earlier call
    """

    name: str
    lists: Lists
    m: int
    earlier: bool = False

    def describe(self, name: str) -> str:
        return self.name + "," * bool(self.groups)  # because "in groups ..." follows


def in_turn(p: int, m: int) -> Lists:
    """Return 1F1B's lists. A rank runs an F if fewer than p - rank micro-batches are live, and otherwise a B."""
    rows = []
    for rank in range(p):
        row: list[tuple[str, int]] = []
        forward = backward = 0
        while backward < m:
            if forward < m and forward - backward < p - rank:
                row.append(("F", forward))
                forward += 1
            else:
                row.append(("B", backward))
                backward += 1
        rows.append(row)
    return rows


def forwards_first(p: int, order: Sequence[int]) -> Lists:
    return [[(kind, k) for kind in "FB" for k in order]] * p


def schedules(p: int) -> list[Schedule]:
    m = {1: 3, 2: 5, 4: 7}[p]
    last_first = [[("F", k) for k in range(4)] + [("B", k) for k in (3, 1, 2, 0)]] * p
    return [
        Schedule(f"GPipe's lists, m = {p + 1}", forwards_first(p, range(p + 1)), p + 1),
        Schedule(f"1F1B's lists, m = {m}", in_turn(p, m), m),
        Schedule("lists from the last micro-batch to the first, m = 3", forwards_first(p, (2, 1, 0)), 3),
        Schedule("lists whose last F is their first B, m = 4", last_first, 4),
        Schedule("1F1B's lists, m = 2, where the parameters have gradients already", in_turn(p, 2), 2, earlier=True),
    ] + [Schedule("two pipelines of two stages, m = 3", in_turn(2, 3), 3, groups=GROUPS)] * (p == 4)


class Problem(NamedTuple):
    weights: Tensor  # of all stages, [p, h, h + 1]
    inputs: Tensor  # [m, b, h]
    targets: Tensor  # [m, b, h]


def draw(case: Schedule, generator: torch.Generator, size: int) -> Problem:
    weights = random_tensor(generator, size, HIDDEN, HIDDEN + 1)
    return Problem(weights, *(random_tensor(generator, case.m, BATCH, HIDDEN) for _ in range(2)))


@cache
def channels_of(group: Any) -> Channels:
    """Return this rank's channels in a group, which all cases share because process groups are slow to create."""
    return Channels(group)


def run(run_stage: Any, case: Schedule, given: Problem, group: Any) -> Observed:
    channels = channels_of(group or dist.group.WORLD)
    rank, last = channels.rank, channels.world_size - 1
    flow = through(halves(given.weights[:rank]), given.inputs)
    stage = WatchedStage(given.weights[rank].to(device()), flow.to(device()), twins.tolerance(case.twin, 1e-8))
    inputs = list(given.inputs.to(device()).clone()) if rank == 0 else None
    targets = list(given.targets.to(device()).clone()) if rank == last else None
    template = torch.zeros(BATCH, HIDDEN, dtype=case.dtype, device=device())
    right, row = ([Action(kind, k) for kind, k in case.lists[rank]] for _ in range(2))
    for param in stage.parameters() if case.earlier else ():
        param.grad = torch.full_like(param, EARLIER)
    lists = {"inputs": inputs, "targets": targets}
    watched = {f"{name}[{k}]": x for name, xs in lists.items() for k, x in enumerate(xs or ())}
    before, weights = Snapshot(**lists, **watched), Snapshot(weight=stage.weight, bias=stage.bias)
    with (
        record() as section,
        called_as(f"run_stage(stage, actions, channels, template, loss, ...) with {case.name}"),
    ):
        loss = run_stage(stage, row, channels, template, F.mse_loss, inputs, targets)
    sent = traffic(section)
    allowed = shelf(case.lists[rank], "B") + 1  # one micro-batch may enter as another leaves
    many = f"{stage.most_live} micro-batches were on the shelf, and {allowed - 1} would do"
    return {
        "loss": scalar(loss, case.dtype),
        "dW": stage.weight.grad,
        "db": stage.bias.grad,
        IN_ORDER: Claim(stage.out_of_step([f"{kind}{k}" for kind, k in case.lists[rank]])),
        "traffic": sent,
        UNWAITED: Claim("" if all(call.waited for call in sent) else "some of them weren't"),
        KEPT: Claim("" if stage.most_live <= allowed else many),
        "the list is as it was": Claim("" if row == right else "it was changed"),
        "inputs unchanged": before.changed(),
        "weights unchanged": weights.changed(),
    }


def scalar(loss: Any, dtype: torch.dtype) -> Any:
    """Convert a loss to a tensor []. Anything that isn't a single number is returned unchanged."""
    if isinstance(loss, float):
        return torch.tensor(loss, dtype=dtype, device=device())
    return loss.detach().reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 else loss


def chain_losses(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the weights as a leaf, and the loss of each micro-batch [m]."""
    weights = problem.weights.clone().requires_grad_()
    outputs = through(halves(weights), problem.inputs)
    return weights, (outputs - problem.targets).square().mean((1, 2))


def right(case: Schedule, problem: Problem, place: Place) -> Observed:
    weights, losses = chain_losses(problem)
    mine = torch.autograd.grad(losses.mean(), weights)[0][place.index]
    before = EARLIER if case.earlier else 0.0
    return {
        "loss": losses.mean().detach() if place.index == place.size - 1 else None,
        "dW": mine[:, :-1] + before,
        "db": mine[:, -1] + before,
        "traffic": messages(place, case.m),
    }


def messages(place: Place, m: int) -> Traffic:
    """Return the expected traffic with each neighbor: m outputs in one direction and m gradients in the other."""
    mine = place.ranks[place.index]
    others = [other for other in place.ranks[max(place.index - 1, 0) : place.index + 2] if other != mine]
    calls = [call for other in others for call in (("send", (mine, other)), ("recv", (other, mine)))] * m
    return Traffic(CollectiveCall(kind, BATCH * HIDDEN, "float64", pair) for kind, pair in calls)


exercise(
    "13.3", "A stage at work", takes=["run_stage"],
    trials=[OnRanks(cases=schedules, draw=draw, run=run, right=right, late=True)],
    passed="Your ranks get the loss and the gradients of a single process, whatever the order of the lists, and no "
    "shelf is larger than the list asks for.",
)  # fmt: skip
