"""The check for exercise 13.4, which compares pipeline stages on real ranks with the full chain in a single process.

A message that no rank waits for can block whatever comes after it. The first case exposes such a message, because that
case has its own launch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from tplab.course import checks
from tplab.course.exercises.ch13.lists import Lists, actions, in_turn, peak
from tplab.pipeline.p2p import Channels
from tplab.runtime import device, record

BATCH, HIDDEN = 3, 5

IN_ORDER = "the stage's work follows the list"
KEPT = "no more is kept than the list asks for"
UNWAITED = "every message was waited for"
SUM_OF_LOSSES = "the sum of the micro-batches' losses"
LAST_LOSS = "the loss of the last micro-batch alone"
MANY_TIMES = "m times the right one: the gradient of the sum of the losses"
EARLIER = 0.5  # the value of each element of an earlier gradient
WITHOUT_EARLIER = "the gradient of this call alone, without the one that was there before"
LAST_ONLY = "the gradient of the last micro-batch alone"
LAST_ONLY_OVER_M = "the gradient of the last micro-batch alone, over m"


@dataclass(frozen=True)
class Schedule(checks.Case):
    """A schedule, which consists of the lists of all ranks for m micro-batches.

    earlier: whether the parameters already have gradients, from an earlier call
    """

    name: str
    lists: Lists
    m: int
    earlier: bool = False

    def describe(self, name: str) -> str:
        return self.name + "," * bool(self.groups)  # because "in groups ..." follows


def all_forwards_first(p: int, m: int, order: Sequence[int]) -> Lists:
    return [[(kind, k) for kind in "FB" for k in order]] * p


def first_the_last(p: int) -> Lists:
    """Return lists whose last F is followed by its own B. The Bs are neither in the Fs' order nor in reverse order."""
    return [[("F", k) for k in range(4)] + [("B", k) for k in (3, 1, 2, 0)]] * p


def schedules(p: int) -> list[Schedule]:
    m = {1: 3, 2: 5, 4: 7}[p]
    backwards = "lists that go from the last micro-batch to the first, m = 3"
    return [
        Schedule(f"GPipe's lists, m = {p + 1}", all_forwards_first(p, p + 1, range(p + 1)), p + 1),
        Schedule(f"1F1B's lists, m = {m}", in_turn(p, m), m),
        Schedule(backwards, all_forwards_first(p, 3, (2, 1, 0)), 3),
        Schedule("lists whose last F is their first B, m = 4", first_the_last(p), 4),
        Schedule("1F1B's lists, m = 2, where the parameters have gradients already", in_turn(p, 2), 2, earlier=True),
    ] + [Schedule("two pipelines of two stages, m = 3", in_turn(2, 3), 3, groups=checks.GROUPS)] * (p == 4)


class Problem(NamedTuple):
    """The full chain and its micro-batches."""

    weights: Tensor  # weights of all stages, [p, h, h + 1], with the bias in the last column
    inputs: Tensor  # micro-batches [m, b, h]
    targets: Tensor  # [m, b, h]


def draw(case: Schedule, generator: torch.Generator, size: int) -> Problem:
    return Problem(
        checks.random_tensor(generator, size, HIDDEN, HIDDEN + 1),
        checks.random_tensor(generator, case.m, BATCH, HIDDEN),
        checks.random_tensor(generator, case.m, BATCH, HIDDEN),
    )


def through(stages: Tensor, x: Tensor) -> Tensor:
    """Pass x [.., h] through these stages, whose weights are [stages, h, h + 1]. Returns [.., h]."""
    for weight in stages:
        x = torch.tanh(F.linear(x, weight[:, :-1], weight[:, -1]))
    return x


class WatchedStage(nn.Module):
    """A stage y = tanh(x W^T + b), with x [b, h], that records what it does.

    weight     [h, h + 1], with the bias in the last column
    flow       the expected x of each micro-batch, [m, b, h], used to recognize the micro-batch
    tol        how far an element may be from the expected one
    events     the actions so far, "F0", "B0", ..., or "F of something else" for an x that is none of these
    most_live  the largest number of graphs for a backward pass that were alive at the same time
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
        return torch.tanh(_Watch.apply(F.linear(x, self.weight, self.bias), self, name))

    def out_of_step(self, right: Sequence[str]) -> str:
        """Describe the first action that differs from the right one. Returns "" if there is none."""
        for place, (mine, wanted) in enumerate(zip(self.events, right, strict=False)):
            if mine != wanted:
                return f"action {place} was {mine}, and should be {wanted}"
        if len(self.events) < len(right):
            return f"only {len(self.events)} of {len(right)} actions were done, not {right[len(self.events)]}"
        extra = self.events[len(right) :]
        return f"after all of them came {extra[0]}" if extra else ""


class _Token:
    """An object that lives as long as the graph of one micro-batch."""

    def __init__(self, stage: WatchedStage) -> None:
        self.stage = stage
        stage.live += 1
        stage.most_live = max(stage.most_live, stage.live)

    def __del__(self) -> None:
        self.stage.live -= 1


class _Watch(Function):
    """Identity function whose graph node records a micro-batch's backward pass and holds a `_Token`."""

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


@cache
def channels_of(group: Any) -> Channels:
    """Return this rank's channels in a group, which all cases share because process groups are slow to create."""
    return Channels(group)


def run(run_stage: Callable[..., Any], case: Schedule, given: Problem, group: Any) -> checks.Observed:
    channels = channels_of(group or dist.group.WORLD)
    rank, last = channels.rank, channels.world_size - 1
    flow = through(given.weights[:rank], given.inputs)
    stage = WatchedStage(given.weights[rank].to(device()), flow.to(device()), checks.twins.tolerance(case.twin, 1e-8))
    inputs = list(given.inputs.to(device()).clone()) if rank == 0 else None
    targets = list(given.targets.to(device()).clone()) if rank == last else None
    template = torch.zeros(BATCH, HIDDEN, dtype=case.dtype, device=device())
    row = actions(case.lists)[rank]
    for param in stage.parameters() if case.earlier else ():
        param.grad = torch.full_like(param, EARLIER)
    tensors = {"inputs": inputs, "targets": targets}
    watched = {f"{name}[{k}]": x for name, xs in tensors.items() for k, x in enumerate(xs or ())}
    before = checks.Snapshot(**tensors, weight=stage.weight, bias=stage.bias, **watched)
    with (
        record() as section,
        checks.called_as(f"run_stage(stage, actions, channels, template, loss, ...) with {case.name}"),
    ):
        loss = run_stage(stage, row, channels, template, F.mse_loss, inputs, targets)
    sent = checks.traffic(section)
    most, allowed = stage.most_live, peak(case.lists[rank]) + 1  # one micro-batch may enter as another leaves
    return {
        "loss": scalar(loss, case.dtype),
        "dW": stage.weight.grad,
        "db": stage.bias.grad,
        IN_ORDER: checks.Claim(stage.out_of_step([f"{kind}{k}" for kind, k in case.lists[rank]])),
        "messages": sent,
        UNWAITED: checks.Claim("" if all(call.waited for call in sent) else "nobody waited for some of them"),
        KEPT: checks.Claim("" if most <= allowed else f"{most} micro-batches at once; {allowed - 1} would do"),
        "the actions are as they were": checks.Claim(
            "" if row == actions(case.lists)[rank] else "the list was changed"
        ),
        "inputs unchanged": before.changed(),
    }


def scalar(loss: Any, dtype: torch.dtype) -> Any:
    """Convert a loss to a tensor []. Anything that isn't a single number is returned unchanged."""
    if isinstance(loss, float):
        return torch.tensor(loss, dtype=dtype)
    return loss.reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 else loss


def expect(case: Schedule, problem: Problem, place: checks.Place) -> checks.Expected:
    weights = problem.weights.clone().requires_grad_()
    outputs = through(weights, problem.inputs)
    losses = torch.stack([F.mse_loss(*pair) for pair in zip(outputs, problem.targets, strict=True)])
    last = losses[case.lists[-1][-1][1]]  # loss of the micro-batch whose backward is last
    (gradient,) = torch.autograd.grad(losses.mean(), weights, retain_graph=True)
    (of_last,) = torch.autograd.grad(last, weights)
    losses, mine, mine_of_last = losses.detach(), gradient[place.index], of_last[place.index]
    before = EARLIER if case.earlier else 0.0
    right = {
        "loss": losses.mean() if place.index == place.size - 1 else None,
        "dW": mine[:, :-1] + before,
        "db": mine[:, -1] + before,
        "messages": messages(place, case.m),
    }
    wrong = {MANY_TIMES: case.m * mine, LAST_ONLY: mine_of_last, LAST_ONLY_OVER_M: mine_of_last / case.m}
    if case.earlier:
        wrong = {WITHOUT_EARLIER: mine}
    mistakes = {
        "loss": {SUM_OF_LOSSES: losses.sum(), LAST_LOSS: last.detach()},
        "dW": {label: value[:, :-1] for label, value in wrong.items()},
        "db": {label: value[:, -1] for label, value in wrong.items()},
    }
    return checks.Expected(right, mistakes)


def messages(place: checks.Place, m: int) -> checks.Traffic:
    """Return the expected traffic with each neighbor: m outputs in one direction and m gradients in the other."""
    rank = place.index
    ranks = place.ranks[max(rank - 1, 0) : rank + 2]
    neighbors = [other for other in ranks if other != place.ranks[rank]]
    mine = place.ranks[rank]
    calls = [call for other in neighbors for call in (("send", (mine, other)), ("recv", (other, mine)))] * m
    return checks.Traffic(checks.Call(kind, BATCH * HIDDEN, "float64", pair) for kind, pair in calls)


@checks.exercise("13.4", "A stage at work")
def stage_at_work(run_stage: Callable[..., Any]) -> checks.Verdict:
    checks.check_cases(
        "13.4", run_stage, schedules, draw=draw, run=run, expect=expect, questions=QUESTIONS, stuck=STUCK,
        whose_group=WHOSE_PLACE,
    )  # fmt: skip
    return checks.Verdict(
        "Loss and gradients of one process, whatever the order, and no more is kept than the lists ask for."
    )


WHOSE_PLACE = (
    "Each group is a pipeline of two stages. `channels.rank` is a rank's place in its pipeline, and "
    "`channels.world_size` is the number of stages. Which line takes the rank or the size of the whole run instead?"
)
STUCK = (
    "For each rank, what does it wait for in the line that the report names? A send that you wait for at once waits "
    "for its receiver, and the receiver may be waiting for you: when is the result of channels.send needed? Does each "
    "rank receive from the neighbour that sends, once for each micro-batch? And what must have happened to the sends "
    "before the function comes back?"
)

QUESTIONS = (
    checks.Question(
        lambda d: WITHOUT_EARLIER in d.kinds(),
        "The parameters had gradients before the call, and those are gone. Gradients are added to what is there, as "
        "autograd does it: which line sets them to something else?",
    ),
    checks.Question(
        lambda d: "changed" in d.kinds(),
        "The caller goes on using the micro-batches and the weights. Which line writes into one of them?",
    ),
    checks.Question(
        lambda d: "the actions are as they were" in d.names,
        "The list of actions belongs to the caller. Which line changes it?",
    ),
    checks.Question(
        checks.has_kind("dW", MANY_TIMES),
        "Gradients of micro-batches add up in `.grad`: that is the gradient of the *sum* of their losses. The loss of "
        "the batch is their mean. Where does 1/m belong?",
    ),
    checks.Question(
        checks.has_kind("dW", LAST_ONLY, LAST_ONLY_OVER_M),
        "Only one micro-batch has left its gradient, and m of them should add up. Which line forgets the others?",
    ),
    checks.Question(
        checks.has_no_gradient("dW", "db"),
        "No gradient arrives at the weights of this stage. From which tensor does its backward begin, and with which "
        "gradient?",
    ),
    checks.Question(
        lambda d: any("of something else" in row.text for row in d if row.name == IN_ORDER),
        "What goes into the stage is no micro-batch's activation. Was the message there when you read it? Is it a "
        "tensor of its own, or one that the next message writes into?",
    ),
    checks.Question(
        lambda d: IN_ORDER in d.names,
        "Work through `actions` from front to back: an action's kind says forward or backward, its micro_batch says "
        "which one. Where does your order come from?",
    ),
    checks.Question(
        lambda d: KEPT in d.names and not {"dW", "db", "loss"} & d.names,
        "The numbers are right, and too much is kept. What still holds a micro-batch's graph after its backward: an "
        "entry of a dictionary, a list of losses that were never detached, a message that was sent with its graph?",
    ),
    checks.Question(
        lambda d: any("expected None" in row.text for row in d if row.name == "loss"),
        "Only the last rank knows the loss. What do the others return?",
    ),
    checks.Question(
        checks.has_kind("loss", SUM_OF_LOSSES, LAST_LOSS),
        "The loss of the batch is the mean over its m micro-batches. What do you return?",
    ),
    checks.Question(
        lambda d: d.names == {"loss"},
        "The gradients are right. What does the last rank return: a number, the mean of the m losses?",
    ),
    checks.Question(
        lambda d: d.names == {"messages"},
        "The numbers are right, but other messages were sent than have to be: m outputs to the next rank, m gradients "
        "to the one before. Who sends what too often?",
    ),
    checks.Question(
        lambda d: "dW" in d.names and not {"db", "loss"} & d.names,
        "The gradient of the bias is right, that of the weight is not. It needs what went into the stage: what stands "
        "in that tensor when its backward comes? Does every message get memory of its own?",
    ),
    checks.Question(
        lambda d: bool({"dW", "db"} & d.names) and "loss" not in d.names,
        "The forward pass is right. Follow the gradient: the last stage starts from its loss, every other from what it "
        "receives; and each sends on the gradient of *its input*. Is each received input a leaf of its own that "
        "requires a gradient?",
    ),
)
