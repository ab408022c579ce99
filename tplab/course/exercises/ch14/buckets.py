"""The check of exercise 14.1, in which gradients are summed bucket by bucket while the backward pass is running."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.late import late
from tplab.course.checks.observation import Claim, Observed, Snapshot, portable
from tplab.course.checks.recorded_traffic import traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.runtime import device, record

SIZES = {"W1": (6, 4), "b1": (6,), "W2": (5, 6), "b2": (5,), "W3": (2, 5), "b3": (2,)}  # the gradients of b3 come first
OTHER_ORDER = ("W3", "b3", "W1", "b1", "W2", "b2")  # not the layers' order, so the last layer's gradients come early
NO_WAIT = "the backward pass waits for no all-reduce"
ONLY_A_NUMBER = "finish sends no gradient"
ONE_NUMBER = "finish sends a single message besides the buckets"
COUNTS = "the number of tokens is sent in a dtype that can hold it"
NO_LEAK = "no tensors pile up in memory from step to step"
HOLDS = {"float16": 2048, "bfloat16": 256, "int16": 32767, "uint8": 255, "int8": 127}  # every integer up to this one
STEPS = 5  # for counting tensors

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Step(Case):
    """One step of a model, which comes after all earlier steps.

    bucket_size: the number of elements that a bucket may have
    buckets:     the number of elements in each bucket
    number:      the step's number, counted from 1
    order:       the order of the model's parameters
    idle:        whether the last of several ranks has no tokens in this step
    count:       whether to count the tensors that are left in memory after each step
    """

    bucket_size: int = 32
    buckets: tuple[int, ...] = (17, 30, 30)
    number: int = 1
    order: tuple[str, ...] = tuple(SIZES)
    idle: bool = False
    count: bool = False

    def describe(self, name: str) -> str:
        how = ", with parameters that aren't in the layers' order" * (self.order == OTHER_ORDER)
        how += ", without any tokens on the last rank" * self.idle + ", counting tensors" * self.count
        return f"buckets of {self.bucket_size} elements, step {self.number}{how}"


ONE_BUCKET = Step(10**6, (77,))
CASES = (
    Step(),
    Step(number=2),
    ONE_BUCKET,
    replace(ONE_BUCKET, number=2),
    replace(ONE_BUCKET, order=OTHER_ORDER),
    Step(buckets=(5, 30, 32, 10), number=2, order=OTHER_ORDER),
    Step(idle=True),
    Step(groups=GROUPS),
    Step(number=2, groups=GROUPS),
)


class Net(nn.Module):
    """A model with three small layers."""

    def __init__(self, weights: Weights, order: Sequence[str]) -> None:
        super().__init__()
        for name in order:
            self.register_parameter(name, nn.Parameter(weights[name].clone().to(device())))

    def forward(self, x: Tensor) -> Tensor:
        return summed_loss(dict(self.named_parameters()), x)


def summed_loss(w: Weights, x: Tensor) -> Tensor:
    """Compute a loss that is summed over the tokens of x [tokens, 4]."""
    inner = torch.tanh(torch.tanh(x @ w["W1"].T + w["b1"]) @ w["W2"].T + w["b2"])  # [tokens, 5]
    return (inner @ w["W3"].T + w["b3"]).square().sum()


class Problem(NamedTuple):
    weights: Weights
    batches: list[list[Tensor]]  # for each rank, x [tokens, 4] of every step; ranks have different numbers of tokens
    gradients: list[Weights]  # for each rank, the gradients of its last batch, summed over its tokens


class Given(NamedTuple):
    weights: Weights
    batches: list[Tensor]  # this rank's batches


def draw(case: Step, generator: torch.Generator, size: int) -> Problem:
    weights = {name: random_tensor(generator, *shape) for name, shape in SIZES.items()}
    batches = []
    for index in range(size):
        tokens = torch.randperm(6, generator=generator)[: case.number] + 5 + 6 * index
        if case.idle and 0 < index == size - 1:
            tokens[-1] = 0
        batches.append([random_tensor(generator, int(count), 4) for count in tokens])
    return Problem(weights, batches, [gradients_of(weights, own[-1]) for own in batches])


def gradients_of(weights: Weights, x: Tensor) -> Weights:
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    values = torch.autograd.grad(summed_loss(leaves, x), list(leaves.values()))
    return dict(zip(leaves, values, strict=True))


def run(parallel_class: Callable[..., Any], case: Step, given: Given, group: Any) -> Observed:
    """Run all steps with messages that arrive at the last moment.

    Return the gradients after the last step and the traffic during it. A message that arrives quickly would hide that
    an answer doesn't wait for it, so there's no case without `late`.
    """
    with late():
        return steps(parallel_class, case, given, group)


def steps(parallel_class: Callable[..., Any], case: Step, given: Given, group: Any) -> Observed:
    model = Net(given.weights, case.order)
    with called_as(f"DataParallel(model, {case.bucket_size}, group)"):
        parallel = parallel_class(model, case.bucket_size, group)
    between = case.twin is Twin.BETWEEN
    other = Net({name: -value for name, value in given.weights.items()}, case.order)
    twin: Any = parallel_class(other, case.bucket_size, group) if between else None
    for x in given.batches:
        x = x.to(device())

        def other_step(fewer: Tensor = x[1:]) -> None:
            other.zero_grad()
            other(-fewer).backward()
            twin.finish(len(fewer))

        seen = one_step(model, parallel, x, other_step if between else None)
    return seen | ({NO_LEAK: Claim(leak(model, parallel, x))} if case.count else {})


def one_step(model: Net, parallel: Any, x: Tensor, between: Callable[[], None] | None = None) -> Observed:
    """Run a step. If `between` is given, it runs another model's step between the backward pass and `finish`."""
    params = dict(model.named_parameters())
    model.zero_grad()
    before = Snapshot(x=x, **params)
    with record() as whole:
        with record() as backward:
            model(x).backward()
        with record() as others:
            if between:
                between()
        with called_as(f"finish({len(x)})"):
            parallel.finish(len(x))
    entered, early = len(backward), [call for call in backward if len(call.group) > 1 and call.end is not None]
    later = [call for call in list(whole)[entered + len(others) :] if len(call.group) > 1]
    large = [call for call in later if call.numel > len(call.group)]
    rounded = [call.dtype for call in later if call.numel <= len(call.group) and call.dtype in HOLDS]
    too_few = [f"it's sent in {dtype}, which can't hold every integer above {HOLDS[dtype]}" for dtype in rounded]
    return {
        **{f"d{name}": portable(param.grad) for name, param in params.items()},
        "backward traffic": traffic(list(whole)[:entered]),
        NO_WAIT: Claim(f"{len(early)} had been waited for when it ended" if early else ""),
        ONLY_A_NUMBER: Claim(f"it sends {large[0].kind} of {large[0].numel} elements" if large else ""),
        ONE_NUMBER: Claim(f"it sends {len(later)} messages" if len(later) > 1 and not large else ""),
        COUNTS: Claim(too_few[0] if too_few else ""),
        "inputs unchanged": before.changed(),
    }


def leak(model: Net, parallel: Any, x: Tensor) -> str:
    """Return by how many tensors the memory grows with each step, or "" if it doesn't grow."""
    counts = []
    gc.freeze()  # only objects that are created from here on count, which is much faster
    try:
        for _ in range(STEPS):
            model.zero_grad()
            model(x).backward()
            parallel.finish(len(x))
            gc.collect()
            counts.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    finally:
        gc.unfreeze()
    more = growth(counts)
    return f"with each step, there are about {more} more of them" if more else ""


def growth(counts: Sequence[int]) -> int:
    """Return by how much a count grows with each step, or 0 if it only grows now and then.

    A backend may free a tensor a step later, so a step may seem to leave less behind than it does, and the next one
    more. The step with the largest growth doesn't count, because it may have created something once and for all.
    """
    steps = sorted(after - before for before, after in zip(counts, counts[1:], strict=False))[:-1]
    return max(0, round(sum(steps) / len(steps)))


def right(case: Step, problem: Problem, place: Place) -> Observed:
    total = sum(len(batches[-1]) for batches in problem.batches)
    means = {
        f"d{name}": torch.stack([gradients[name] for gradients in problem.gradients]).sum(0) / total for name in SIZES
    }
    return means | {"backward traffic": place.traffic(*(("all_reduce", size) for size in case.buckets))}


def terms(case: Step, problem: Problem, size: int) -> dict[str, list[Tensor]]:
    """Return the gradients from which each rank starts: those of its summed loss, and those of its mean loss."""
    tokens = [max(len(batches[-1]), 1) for batches in problem.batches]
    summed = {f"gradient of {name} for the summed loss": [mine[name] for mine in problem.gradients] for name in SIZES}
    return summed | {
        name.replace("summed", "mean"): [each / count for each, count in zip(ranks, tokens, strict=True)]
        for name, ranks in summed.items()
    }


NOT_CALLED = (Twin.EVALUATION, Twin.STRIDED)  # what these change isn't used here

exercise(
    "14.1", "Gradients in buckets", takes=["DataParallel"],
    trials=[
        OnRanks(
            cases=cases, draw=draw, run=run, right=right, terms=terms, without=without,
            give=lambda case, problem, place: Given(problem.weights, problem.batches[place.index]),
            world_sizes=world_sizes,  # 2 first, because on one rank different mistakes give the same values
        )
        for cases, without, world_sizes in (
            (CASES, NOT_CALLED, (2, 1, 4)),
            ((Step(number=2, count=True),), tuple(Twin), (2,)),
        )
    ],
    passed="Every token counts the same, no matter how many tokens its rank has, and the messages start during the "
    "backward pass. Nothing touches a message before it has arrived.",
)  # fmt: skip
