"""The check of exercise 15.3, which compares a training step on a grid of ranks with one in a single process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.course.checks.cases import Case, Place
from tplab.course.checks.describe import describe
from tplab.course.checks.observation import Claim, NotRun, Observed, Snapshot, portable
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.exercises.ch15 import small_model as small
from tplab.course.exercises.ch15.small_model import LR, MicroBatch, SmallModel, Weights
from tplab.data.grid import Grid, mesh
from tplab.runtime import device, record

FEW = 6  # elements that may be sent in addition to the gradients, for the norm and the loss
FLOAT32_SUM = 1e-6  # allowed relative error of the loss, because the text doesn't say that its sum must be in float64

DP_ONCE = "each gradient crosses the replicas once per step"
TWO = "training_step returns two numbers"
FLOATS = "both are floats"
MARKED_ONCE = "only the marked gradients are sent over tp"
MODE = "the model stays in the mode it was in"

FIRST_GROUP = ("scale", "W1")  # the first of the optimizer's two parameter groups

Batch = list[list[MicroBatch]]  # the micro-batches of each replica


@dataclass(frozen=True)
class Step(Case):
    """One step on a grid of ranks, which comes after all earlier steps.

    m:        number of micro-batches per replica
    max_norm: largest gradient norm that isn't clipped
    number:   the step's number, counted from 1
    zeros:    whether every x of the last replica is zero, so that its gradients are zero except for that of shift
    training: whether the model is in training mode
    """

    tp: int
    dp: int
    m: int
    max_norm: float
    sequence_parallel: bool = False
    number: int = 1
    zeros: bool = False
    training: bool = True

    def describe(self, name: str) -> str:
        grid = f"tp = {self.tp}, dp = {self.dp}, {self.m} micro-batch" + ("es" if self.m > 1 else "")
        grid += ", with sequence parallelism" * self.sequence_parallel + ", one replica with zeros for x" * self.zeros
        grid += ", in eval mode" * (not self.training)
        return f"{grid}, step {self.number}"

    @property
    def grid(self) -> Grid:
        return Grid(dp=self.dp, tp=self.tp)


FIRST_STEPS = {
    1: (Step(1, 1, 3, 1e3), Step(1, 1, 1, 0.05)),
    2: (Step(1, 2, 3, 1e3), Step(2, 1, 3, 1e3, True), Step(2, 1, 1, 0.05, True)),
    4: (Step(2, 2, 3, 0.05, True), Step(4, 1, 1, 1e3)),
}


def cases(world_size: int) -> list[Step]:
    usual = [replace(step, number=number) for step in FIRST_STEPS[world_size] for number in (1, 2)]
    more = [Step(1, 2, 1, 1e3, zeros=True), Step(1, 2, 2, 1e3, training=False)]
    return usual + more * (world_size == 2)


class Problem(NamedTuple):
    weights: Weights  # before the first step
    batches: list[Batch]  # one batch per step
    before: Weights  # the weights before the last step


class Given(NamedTuple):
    weights: Weights
    batches: list[list[MicroBatch]]  # this replica's micro-batches in every step


def draw(case: Step, generator: torch.Generator, size: int) -> Problem:
    weights = before = small.random_weights(generator)
    batches = [
        [[small.random_micro_batch(generator) for _ in range(case.m)] for _ in range(case.dp)]
        for _ in range(case.number)
    ]
    if case.zeros:
        batches[-1][-1] = [(torch.zeros_like(x), y) for x, y in batches[-1][-1]]
    for batch in batches[:-1]:
        parts = [small.loss_and_gradients(before, micro_batch)[1] for own in batch for micro_batch in own]
        before = small.stepped(before, small.summed(parts, 1 / len(parts)), case.max_norm)
    return Problem(weights, batches, before)


def give(case: Step, problem: Problem, place: Place) -> Given:
    return Given(problem.weights, [batch[case.grid.place(place.index).dp] for batch in problem.batches])


def run(step: Callable[..., Any], case: Step, given: Given, group: Any) -> Observed:
    """Run all steps, and return the loss, norm, weights, and traffic of the last one."""
    grid = mesh(dp=case.dp, tp=case.tp)
    model = SmallModel(given.weights, grid.get_group("tp"), sequence_parallel=case.sequence_parallel)
    model.train(case.training)
    parameters = dict(model.named_parameters())
    groups = [[parameters.pop(name) for name in FIRST_GROUP], [*parameters.values()]]  # as with two weight decays
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=LR)
    return [one_step(step, model, optimizer, own, grid, case) for own in given.batches][-1]


def one_step(step: Callable[..., Any], model: Any, optimizer: Any, own: Any, grid: Any, case: Step) -> Observed:
    own = [(x.to(device()), y.to(device())) for x, y in own]
    before = Snapshot(micro_batches=own, **{f"micro-batch {k}": x for k, (x, _) in enumerate(own)})
    call = f"training_step(model, optimizer, {case.m} micro-batches, mesh, max_norm={case.max_norm})"
    with record() as section, called_as(call):
        said = step(model, optimizer, own, grid, case.max_norm)
    pair = isinstance(said, (tuple, list)) and len(said) == 2
    loss, norm = said if pair else [NotRun("there aren't two numbers")] * 2
    sent = {axis: small.reduced(section, grid.get_group(axis)) for axis in ("tp", "dp")}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    marked = sum(p.numel() for p in model.parameters() if getattr(p, "sequence_parallel", False))
    of_model = case.m * small.messages_of_model(case.tp, sequence_parallel=case.sequence_parallel)
    over = {"dp": sent["dp"] - numbers, "tp": sent["tp"] - of_model - marked}
    tensors = [f"{name} is a tensor" for name, value in (("loss", loss), ("norm", norm)) if isinstance(value, Tensor)]
    return {
        "loss": number(loss, case.dtype),
        "norm": number(norm, case.dtype),
        MODE: Claim("" if model.training == case.training else "it's in a different one now"),
        TWO: Claim("" if pair else f"it returned {describe(portable(said))}"),
        FLOATS: Claim(" and ".join(tensors)),
        **{name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        DP_ONCE: Claim(
            f"{sent['dp']} elements are sent, but there are {numbers} parameters" if over["dp"] > FEW else ""
        ),
        MARKED_ONCE: Claim(f"{over['tp']} elements are too many" if over["tp"] > FEW else ""),
        "inputs unchanged": before.changed(),
    }


def number(said: Any, dtype: torch.dtype) -> Any:
    """Convert a single number to a scalar tensor. Anything else is returned unchanged."""
    if isinstance(said, Tensor) and said.numel() == 1:
        return said.detach().cpu().to(dtype).reshape(())
    return scalar(said).to(dtype) if isinstance(said, (int, float)) and not isinstance(said, bool) else said


def right(case: Step, problem: Problem, place: Place) -> Observed:
    batch = problem.batches[-1]
    found = [small.loss_and_gradients(problem.before, micro_batch) for own in batch for micro_batch in own]
    mean = sum(loss for loss, _ in found) / len(found)
    gradient = small.summed([gradient for _, gradient in found], 1 / len(found))
    after = small.stepped(problem.before, gradient, case.max_norm)
    return {
        "loss": in_its_precision(place.observed[place.index]["loss"], scalar(mean)),
        "norm": scalar(small.norm_of(gradient)),
        **small.shards_of(after, case.grid.place(place.index).tp, case.tp),
    }


def in_its_precision(said: Any, right: Tensor) -> Tensor:
    """Return the learner's loss if it's as precise as a sum in float32. Otherwise, return the right loss."""
    close = isinstance(said, Tensor) and torch.allclose(said.double(), right, rtol=FLOAT32_SUM, atol=0)
    return said.to(right.dtype) if close else right


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


exercise(
    "15.3", "A training step", takes=["training_step"],
    trials=[
        OnRanks(
            cases=cases, draw=draw, give=give, run=run, right=right, values_on_cpu=True, world_sizes=(2, 1, 4),
        )
    ],
    passed="It's the step that a single process would have taken, and every gradient crossed the replicas once.",
)  # fmt: skip
