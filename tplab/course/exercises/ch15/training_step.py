"""The check for exercise 15.3, which compares a training step on a grid of ranks with a single-process float64 step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.course import checks
from tplab.course.checks.describe import describe
from tplab.course.exercises.ch15 import small_model as small
from tplab.course.exercises.ch15.small_model import CUTS, LR, PARAMETERS, MicroBatch, SmallModel, Weights
from tplab.data.grid import Grid, mesh
from tplab.runtime import device, record

FEW = 6  # elements that may be sent in addition to the gradients, for the norm and the loss
FLOAT32_SUM = 1e-6  # allowed relative error of the loss, because the text doesn't say that its sum must be in float64

SUM_OF_M = "what comes out when the micro-batches are added up, and not averaged"
SUM_OF_DP = "what comes out when the replicas are added up, and not averaged"
BY_M = "what comes out when the micro-batches are divided by their number twice"
BY_DP = "what comes out when the replicas are divided by their number twice"
WITHOUT_DP = "what this replica's sequences give alone"
LAST_OF_M = "what the last micro-batch gives alone"
NOT_CLIPPED = "what comes out without clipping"
UNCHANGED = "the weights before the step"
TWO_STEPS = "what comes out when the optimizer steps after each micro-batch"

NORM_OF_RANK = "the norm of what this rank holds"
REPLICATED = "the norm that counts the replicated parameters once for each tensor-parallel rank"
NORM_AFTER = "the norm after clipping"

LOSS_SUM = "the sum over the micro-batches"
LOSS_OF_LAST = "the loss of the last micro-batch alone"
LOSS_WORLD = "the mean, times the number of tensor-parallel ranks"
LOSS_OF_OWN = "the mean over this replica's sequences alone"

DP_ONCE = "each gradient crosses the replicas once in a step"
TWO = "two numbers come out"
TENSORS = "what comes out are plain floats"
MARKED_ONCE = "of the gradients only the marked ones travel over tp"

FIRST_GROUP = ("scale", "W1")  # the first of the optimizer's two parameter groups

Batch = list[list[MicroBatch]]  # the micro-batches of each replica
Values = dict[str, float | Tensor]  # keyed by the name of the result


@dataclass(frozen=True)
class Step(checks.Case):
    """One step on a grid of ranks, which comes after all earlier steps.

    m:        number of micro-batches per replica
    max_norm: largest gradient norm that isn't clipped
    number:   the step's number, counted from 1
    zeros:    whether every x of the last replica is zero, so that its gradients are zero except for that of shift
    """

    tp: int
    dp: int
    m: int
    max_norm: float
    sequence_parallel: bool = False
    number: int = 1
    zeros: bool = False

    def describe(self, name: str) -> str:
        grid = f"tp = {self.tp}, dp = {self.dp}, {self.m} micro-batch" + ("es" if self.m > 1 else "")
        grid += ", with sequence parallelism" * self.sequence_parallel + ", one replica with zeros for x" * self.zeros
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
    return usual + [Step(1, 2, 1, 1e3, zeros=True)] * (world_size == 2)


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


def give(case: Step, problem: Problem, place: checks.Place) -> Given:
    return Given(problem.weights, [batch[case.grid.place(place.index).dp] for batch in problem.batches])


def run(step: Callable[..., Any], case: Step, given: Given, group: Any) -> checks.Observed:
    """Run all steps, and return the loss, norm, weights, and traffic of the last one."""
    grid = mesh(dp=case.dp, tp=case.tp)
    model = SmallModel(given.weights, grid.get_group("tp"), sequence_parallel=case.sequence_parallel)
    parameters = dict(model.named_parameters())
    groups = [[parameters.pop(name) for name in FIRST_GROUP], [*parameters.values()]]  # as with two weight decays
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=LR)
    return [one_step(step, model, optimizer, own, grid, case) for own in given.batches][-1]


def one_step(step: Callable[..., Any], model: Any, optimizer: Any, own: Any, grid: Any, case: Step) -> checks.Observed:
    own = [(x.to(device()), y.to(device())) for x, y in own]
    before = checks.Snapshot(micro_batches=own, **{f"micro-batch {k}": x for k, (x, _) in enumerate(own)})
    call = f"training_step(model, optimizer, {case.m} micro-batches, mesh, max_norm={case.max_norm})"
    with record() as section, checks.called_as(call):
        said = step(model, optimizer, own, grid, case.max_norm)
    pair = isinstance(said, (tuple, list)) and len(said) == 2
    loss, norm = said if pair else [checks.NotRun("no two numbers came out")] * 2
    sent = {axis: small.reduced(section, grid.get_group(axis)) for axis in ("tp", "dp")}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    marked = sum(p.numel() for p in model.parameters() if getattr(p, "sequence_parallel", False))
    of_model = case.m * small.messages_of_model(case.tp, sequence_parallel=case.sequence_parallel)
    over = {"dp": sent["dp"] - numbers, "tp": sent["tp"] - of_model - marked}
    tensors = [f"{name} is a tensor" for name, value in (("loss", loss), ("norm", norm)) if isinstance(value, Tensor)]
    return {
        "loss": number(loss, case.dtype),
        "norm": number(norm, case.dtype),
        TWO: checks.Claim("" if pair else f"it returned {describe(checks.portable(said))}"),
        TENSORS: checks.Claim(" and ".join(tensors)),
        **{name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        DP_ONCE: checks.Claim(f"{sent['dp']} numbers, of {numbers} parameters" if over["dp"] > FEW else ""),
        MARKED_ONCE: checks.Claim(f"{over['tp']} numbers too many" if over["tp"] > FEW else ""),
        "inputs unchanged": before.changed(),
    }


def number(said: Any, dtype: torch.dtype) -> Any:
    """Convert a single number to a scalar tensor. Anything else is returned unchanged."""
    if isinstance(said, Tensor) and said.numel() == 1:
        return said.detach().cpu().to(dtype).reshape(())
    return scalar(said).to(dtype) if isinstance(said, (int, float)) and not isinstance(said, bool) else said


def expect(case: Step, problem: Problem, place: checks.Place) -> checks.Expected:
    at, weights, batch = case.grid.place(place.index), problem.before, problem.batches[-1]
    found = [[small.loss_and_gradients(weights, micro_batch) for micro_batch in own] for own in batch]
    losses = [[loss for loss, _ in own] for own in found]
    parts = [[gradient for _, gradient in own] for own in found]
    every, mine, last = [part for own in parts for part in own], parts[at.dp], [own[-1] for own in parts]
    count = len(every)
    mean, gradient = sum(map(sum, losses)) / count, small.summed(every, 1 / count)
    norm = small.norm_of(gradient)
    replicated = small.norm_of({name: value for name, value in gradient.items() if name not in CUTS})

    def held(full: Weights) -> Weights:
        return small.shards_of(full, at.tp, case.tp)

    def step(wrong: Weights) -> Values:
        return {"norm": small.norm_of(wrong), **held(small.stepped(weights, wrong, case.max_norm))}

    loss = in_its_precision(place.observed[place.index]["loss"], scalar(mean))
    right = {"loss": loss, "norm": scalar(norm), **held(small.stepped(weights, gradient, case.max_norm))}
    mistakes: dict[str, Values] = {
        SUM_OF_M: step(small.summed(every, 1 / case.dp)),
        SUM_OF_DP: {"loss": mean * case.dp, **step(small.summed(every, 1 / case.m))},
        BY_M: step(small.summed(every, 1 / case.m / count)),
        BY_DP: step(small.summed(every, 1 / case.dp / count)),
        WITHOUT_DP: step(small.summed(mine, 1 / case.m)),
        LAST_OF_M: step(small.summed(last, 1 / case.dp)),
        f"{LAST_OF_M} ": step(small.summed(last, 1 / count)),
        NOT_CLIPPED: {**held(small.stepped(weights, gradient, 1e9))},
        UNCHANGED: {**held(weights)},
        TWO_STEPS: {**held(micro_steps(case, weights, batch))},
        NORM_OF_RANK: {"norm": small.norm_of(held(gradient))},
        REPLICATED: {"norm": (norm**2 + (case.tp - 1) * replicated**2) ** 0.5},
        NORM_AFTER: {"norm": min(norm, case.max_norm)},
        f"{NORM_AFTER} ": {"norm": norm * min(1.0, case.max_norm / (norm + 1e-6))},
        LOSS_SUM: {"loss": mean * case.m},
        LOSS_OF_LAST: {"loss": losses[at.dp][-1]},
        f"{LOSS_OF_LAST} ": {"loss": losses[at.dp][-1] / case.m},
        LOSS_OF_OWN: {"loss": sum(losses[at.dp]) / case.m},
        LOSS_WORLD: {"loss": mean * case.tp},
    }
    return checks.Expected(right, by_observation(mistakes, right))


def by_observation(mistakes: dict[str, Values], right: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Regroup the mistakes as {result: {mistake: value}}, with NaN for a mistake that doesn't change this result."""
    turned: dict[str, dict[str, Tensor]] = {name: {} for name in right}
    for label, values in mistakes.items():
        for name, given in values.items():
            value = torch.as_tensor(given, dtype=torch.float64)
            turned[name][label] = scalar(torch.nan) if torch.allclose(value, right[name]) else value
    return turned


def in_its_precision(said: Any, right: Tensor) -> Tensor:
    """Return the learner's loss if it's as precise as a sum in float32. Otherwise, return the right loss."""
    close = isinstance(said, Tensor) and torch.allclose(said.double(), right, rtol=FLOAT32_SUM, atol=0)
    return said.to(right.dtype) if close else right


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def micro_steps(case: Step, weights: Weights, batch: Batch) -> Weights:
    """Return the weights if the optimizer takes a step after each micro-batch."""
    for k in range(case.m):
        parts = [small.loss_and_gradients(weights, own[k])[1] for own in batch]
        weights = small.stepped(weights, small.summed(parts, 1 / len(parts) / case.m), case.max_norm)
    return weights


@checks.exercise("15.3", "A training step")
def a_training_step(step: Callable[..., Any]) -> checks.Verdict:
    checks.check_cases(
        "15.3", step, cases, values_on_cpu=True, draw=draw, give=give, run=run, expect=expect,
        questions=lambda case, observed: (*FIRST_QUESTIONS, *[LATER] * (case.number > 1), *QUESTIONS),
        crash=CRASH, stuck=lambda case: ZEROS if case.zeros else STUCK,
    )  # fmt: skip
    return checks.Verdict("The same step as on one process, and every gradient travelled once.")


CRASH = (
    "`mesh.get_group('tp')` and `mesh.get_group('dp')` are the groups of this rank, `model(x, y)` is the mean loss of "
    "a micro-batch. Which line expects something else?"
)
STUCK = "Every rank must enter the same collectives in the same order. Which of yours depends on the rank?"

ZEROS = (
    "One replica's gradient is zero here, but that of another replica isn't. A rank can't know what the others have, "
    "so it has to take part with its zeros. Which of your lines skips a collective because of the values of a tensor?"
)


def weights_are(*kinds: str) -> Callable[[checks.Differences], bool]:
    return lambda d: any(checks.has_kind(name, *kinds)(d) for name in PARAMETERS)


def seen(*kinds: str) -> Callable[[checks.Differences], bool]:
    """Return a predicate that tests whether the weights or the norm differ in one of these ways."""
    return lambda d: weights_are(*kinds)(d) or checks.has_kind("norm", *kinds)(d)


def wrong_weights(differences: checks.Differences) -> frozenset[str]:
    return differences.names & PARAMETERS.keys()


FIRST_QUESTIONS = (
    checks.Question(checks.changed, "The sequences belong to the caller. Which line of yours writes into them?"),
    checks.Question(
        lambda d: TWO in d.names,
        "What comes out are two numbers, the loss and the norm. What does your last line return?",
    ),
)
LATER = checks.Question(
    lambda d: bool({"norm", *PARAMETERS} & d.names),
    "The first step was right, the second is not. What does the first one leave behind, in `param.grad`, that the "
    "second has to get rid of?",
)
QUESTIONS = (
    checks.Question(
        weights_are(UNCHANGED),
        "The weights are as before. Who changes them, and which line of yours calls it?",
    ),
    checks.Question(
        lambda d: bool(wrong_weights(d)) and wrong_weights(d).isdisjoint(FIRST_GROUP) and "shift" in d.names,
        "The optimizer has two groups of parameters here, and only those of its second group are wrong. Which "
        "parameters does your loop go over, those of the model or those of `optimizer.param_groups[0]`?",
    ),
    checks.Question(
        lambda d: bool(wrong_weights(d)) and wrong_weights(d).isdisjoint(CUTS),
        "Only what every tensor-parallel rank holds whole is wrong. Which of these parameters are marked "
        "`sequence_parallel`, over which group are their gradients added up, added up or averaged, before or after the "
        "norm, and once a step or once a micro-batch?",
    ),
    checks.Question(
        lambda d: wrong_weights(d) == CUTS.keys(),
        "Only what is cut over the tensor-parallel ranks is wrong. Each of these ranks has other columns and rows. "
        "Over which group are gradients averaged, and which ranks are in it?",
    ),
    checks.Question(
        weights_are(TWO_STEPS),
        "The micro-batches make one step together. After which of them does the optimizer step?",
    ),
    checks.Question(
        seen(SUM_OF_M),
        "`backward` adds to what is in `param.grad`, and each micro-batch's loss is a mean. What turns the sum of m "
        "means into their mean?",
    ),
    checks.Question(
        seen(SUM_OF_DP),
        "An all-reduce adds up. Each replica has the mean over its own sequences; what makes one mean of them?",
    ),
    checks.Question(
        seen(BY_M),
        "The gradients are smaller than they should be, by the number of micro-batches. How often do you divide by it?",
    ),
    checks.Question(
        seen(BY_DP),
        "The gradients are smaller than they should be, by the number of replicas. How often do you divide by it?",
    ),
    checks.Question(
        seen(LAST_OF_M, f"{LAST_OF_M} "),
        "The micro-batches before the last one have no effect. Where are their gradients thrown away?",
    ),
    checks.Question(
        weights_are(WITHOUT_DP),
        "Each replica has learned from its own sequences alone, and they drift apart. Over which group are gradients "
        "averaged, and do the means arrive in `param.grad`?",
    ),
    checks.Question(
        weights_are(NOT_CLIPPED),
        "The gradient is longer than `max_norm` here, and the step was made with all of it. When is it shortened, and "
        "when does the optimizer step?",
    ),
    checks.Question(
        lambda d: DP_ONCE in d.names,
        "Each micro-batch could send its gradients, but all of them together make one gradient. When is it complete, "
        "and how often does it have to travel then?",
    ),
    checks.Question(
        checks.has_kind("norm", NORM_AFTER, f"{NORM_AFTER} "),
        "That is how long the gradient is once it is shortened. The log wants to know how long it was.",
    ),
    checks.Question(
        checks.has_kind("norm", NORM_OF_RANK),
        "That is the norm of this rank's parts alone. Whose parts come in over which group, and what do ranks do that "
        "clip by different factors?",
    ),
    checks.Question(
        checks.has_kind("norm", REPLICATED),
        "Some parameters are whole on every tensor-parallel rank, and they count once for the model. Which of the "
        "ranks counts them?",
    ),
    checks.Question(
        lambda d: MARKED_ONCE in d.names,
        "More travels over the tensor-parallel ranks than has to. Which gradients are whole there already?",
    ),
    checks.Question(
        checks.has_kind("loss", LOSS_SUM), "Each micro-batch's loss is a mean. What is the mean over all of them?"
    ),
    checks.Question(
        checks.has_kind("loss", LOSS_OF_LAST, f"{LOSS_OF_LAST} "),
        "That is the loss of the last micro-batch. Which variable did the others' go into?",
    ),
    checks.Question(
        checks.has_kind("loss", LOSS_OF_OWN),
        "That is the loss of this replica. The log has one line for all of them. Which collective makes it?",
    ),
    checks.Question(
        checks.has_kind("loss", SUM_OF_DP), "The replicas' losses were added up. How many replicas are there?"
    ),
    checks.Question(
        lambda d: d.names - {TENSORS} == {"loss"},
        "Only the loss is wrong. It is the same on all ranks of `tp` already; over which group is there something to "
        "average?",
    ),
    checks.Question(
        lambda d: d.names == {TENSORS},
        "The values are right. What comes out are two floats, for a log that outlives the step: what makes a float of "
        "a tensor with one number?",
    ),
    checks.Question(
        lambda d: {"loss", "norm"} <= d.names,
        "Loss and gradient are wrong together. By which number do you divide them: is it that of the micro-batches "
        "that there are? And is every message finished when you go on with what it brings?",
    ),
    checks.Question(
        lambda d: "norm" in d.names,
        "The norm is not that of the gradient that one process would have. In which order do you average over the "
        "replicas, add up what sequence parallelism has left apart, and take the norm?",
    ),
    checks.Question(
        lambda d: True,
        "A step is: zero the gradients, run each micro-batch forward and backward, add up and average over the ranks, "
        "take the norm, shorten, step. Which of them does yours do in another order, or not at all?",
    ),
)
