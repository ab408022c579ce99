"""The check for exercise 14.1, in which gradients are summed bucket by bucket while the backward pass is running."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tplab.course import checks
from tplab.runtime import device, record

SIZES = {"W1": (6, 4), "b1": (6,), "W2": (5, 6), "b2": (5,), "W3": (2, 5), "b3": (2,)}  # the gradients of b3 come first
OTHER_ORDER = ("W3", "b3", "W1", "b1", "W2", "b2")  # not the layers' order, so the last layer's gradients come early
NO_WAIT = "the backward pass waits for no all-reduce"
ONLY_A_NUMBER = "finish sends no gradient"
COUNTS = "the number of tokens is sent in a dtype that can hold it"
HOLDS = {"float16": 2048, "bfloat16": 256}  # these dtypes hold every integer up to this one

NOT_DIVIDED = "the sum over the ranks, not divided by the tokens"
MEAN_OF_MEANS = "the mean over the ranks of each rank's mean"
BY_OWN_TOKENS = "the sum divided by the tokens of this rank"
BY_MEAN_TOKENS = "the sum divided by the mean number of tokens on a rank"
BY_RANKS = "the sum divided by the number of ranks"
OWN = "this rank's own gradient, not added up"

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Step(checks.Case):
    """One step of a model with this bucket size, which comes after all earlier steps.

    buckets: number of elements in each bucket
    number:  the step's number, counted from 1
    order:   the order of the model's parameters
    idle:    whether the last of several ranks has no tokens in this step
    """

    bucket_size: int
    buckets: tuple[int, ...]
    number: int
    order: tuple[str, ...] = tuple(SIZES)
    idle: bool = False

    def describe(self, name: str) -> str:
        how = ", the parameters not in the order of the layers" * (self.order == OTHER_ORDER)
        how += ", no tokens on the last rank" * self.idle
        return f"buckets of {self.bucket_size} numbers, step {self.number}{how}"


CASES = tuple(
    Step(bucket_size, buckets, number, groups=groups)
    for bucket_size, buckets, groups in (
        (32, (17, 30, 30), None),
        (10**6, (77,), None),
        (32, (17, 30, 30), checks.GROUPS),
    )
    for number in (1, 2)
) + (
    Step(10**6, (77,), 1, OTHER_ORDER),
    Step(32, (5, 30, 32, 10), 2, OTHER_ORDER),
    Step(32, (17, 30, 30), 1, idle=True),
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
    gradients: list[Weights]  # gradients of each rank's last batch, summed over its tokens


class Given(NamedTuple):
    weights: Weights
    batches: list[Tensor]  # this rank's batches


def draw(case: Step, generator: torch.Generator, size: int) -> Problem:
    weights = {name: checks.random_tensor(generator, *shape) for name, shape in SIZES.items()}
    batches = []
    for index in range(size):
        tokens = torch.randperm(6, generator=generator)[: case.number] + 5 + 6 * index
        if case.idle and 0 < index == size - 1:
            tokens[-1] = 0
        batches.append([checks.random_tensor(generator, int(count), 4) for count in tokens])
    return Problem(weights, batches, [gradients_of(weights, own[-1]) for own in batches])


def gradients_of(weights: Weights, x: Tensor) -> Weights:
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    values = torch.autograd.grad(summed_loss(leaves, x), list(leaves.values()))
    return dict(zip(leaves, values, strict=True))


def give(case: Step, problem: Problem, place: checks.Place) -> Given:
    return Given(problem.weights, problem.batches[place.index])


def run(parallel_class: Callable[..., Any], case: Step, given: Given, group: Any) -> checks.Observed:
    """Run all steps, and return the gradients after the last step and the traffic during it."""
    model = Net(given.weights, case.order)
    with checks.called_as(f"DataParallel(model, {case.bucket_size}, group)"):
        parallel = parallel_class(model, case.bucket_size, group)
    between = case.twin is checks.Twin.BETWEEN
    other = Net({name: -value for name, value in given.weights.items()}, case.order)
    twin: Any = parallel_class(other, case.bucket_size, group) if between else None
    for x in given.batches:
        x = x.to(device())

        def other_step(fewer: Tensor = x[1:]) -> None:
            other.zero_grad()
            other(-fewer).backward()
            twin.finish(len(fewer))

        seen = one_step(model, parallel, x, other_step if between else None)
    return seen


def one_step(model: Net, parallel: Any, x: Tensor, between: Callable[[], None] | None) -> checks.Observed:
    """Run a step. If `between` is given, it runs another model's step between the backward pass and `finish`."""
    params = dict(model.named_parameters())
    model.zero_grad()
    before = checks.Snapshot(x=x, **params)
    with record() as whole:
        with record() as backward:
            model(x).backward()
        with record() as others:
            if between:
                between()
        with checks.called_as(f"finish({len(x)})"):
            parallel.finish(len(x))
    entered, early = len(backward), [c for c in backward if len(c.group) > 1 and c.end is not None]
    large = [c for c in list(whole)[entered + len(others) :] if c.numel > len(c.group) > 1]
    numbers = [c for c in list(whole)[entered + len(others) :] if c.numel <= len(c.group) > 1 and c.dtype in HOLDS]
    too_few = [f"it is sent in {c.dtype}, which rounds whole numbers above {HOLDS[c.dtype]}" for c in numbers]
    return {
        **{f"d{name}": checks.portable(param.grad) for name, param in params.items()},
        "backward traffic": checks.traffic(list(whole)[:entered]),
        NO_WAIT: checks.Claim(f"{len(early)} had been waited for when it ended" if early else ""),
        ONLY_A_NUMBER: checks.Claim(f"it sends {large[0].kind} of {large[0].numel} elements" if large else ""),
        COUNTS: checks.Claim(too_few[0] if too_few else ""),
        "inputs unchanged": before.changed(),
    }


def expect(case: Step, problem: Problem, place: checks.Place) -> checks.Expected:
    tokens = [len(batches[-1]) for batches in problem.batches]
    total, mine = sum(tokens), tokens[place.index]
    right: checks.Observed = {}
    mistakes = {}
    for name in SIZES:
        parts = [gradients[name] for gradients in problem.gradients]
        summed, own = torch.stack(parts).sum(0), parts[place.index]
        right[f"d{name}"] = summed / total
        means = torch.stack([part / max(count, 1) for part, count in zip(parts, tokens, strict=True)])
        mistakes[f"d{name}"] = {
            NOT_DIVIDED: summed,
            MEAN_OF_MEANS: means.mean(0),
            BY_OWN_TOKENS: summed / mine if mine else summed * torch.nan,
            BY_MEAN_TOKENS: summed / (total / place.size) if place.size > 1 else summed * torch.nan,
            BY_RANKS: summed / place.size,
            f"{BY_RANKS} ": summed / place.size / total,
            OWN: own,
            f"{OWN} ": own / total,
            f"{OWN}  ": own / mine if mine else own * torch.nan,
        }
    right["backward traffic"] = place.traffic(*(("all_reduce", size) for size in case.buckets))
    return checks.Expected(right, mistakes)


@checks.exercise("14.1", "Gradients in buckets")
def gradients_in_buckets(parallel_class: Callable[..., Any]) -> checks.Verdict:
    checks.check_cases(
        "14.1", parallel_class, CASES, draw=draw, give=give, run=run, expect=expect,
        questions=lambda case, observed: QUESTIONS if case.number == 1 else (SECOND, *QUESTIONS),
        stuck=lambda case: IDLE if case.idle else STUCK, whose_group=WHOSE_GROUP,
        world_sizes=(2, 1, 4),  # 2 first, because on one rank different mistakes give the same values
    )  # fmt: skip
    return checks.Verdict(
        "Every token counts the same, however many a rank has, and the messages start during backward."
    )


WHOSE_GROUP = "Which all-reduce was not given `group`, and so adds up over all ranks?"
STUCK = (
    "Every rank must start the same all-reduces in the same order. Does each of yours start where its bucket is full, "
    "and nowhere else?"
)
IDLE = (
    "Here one rank has no tokens, as can happen if its sequences are all padding. The others wait for it, because they "
    "can't know that it has nothing to add. Which of your lines makes this rank return early or skip a collective?"
)
SECOND = checks.Question(
    lambda d: not d.malformed and "changed" not in d.kinds(),
    "The first step was right, the second is not. What do you count or collect in a step that `finish` must set back?",
)
QUESTIONS = (
    checks.Question(
        checks.changed,
        "The hook is called with the parameter, and its gradient is `param.grad`. Which of the two did you hand to "
        "all_reduce?",
    ),
    checks.Question(
        lambda d: checks.has_kind("backward traffic", "no traffic")(d) and ONLY_A_NUMBER in d.names,
        "Everything is sent in `finish`, when the backward pass is over and there is nothing left to hide it behind. "
        "Who could tell you, during backward, that a gradient is ready?",
    ),
    checks.Question(
        lambda d: NO_WAIT in d.names and "backward traffic" not in d.names,
        "Each all-reduce is over before the backward pass goes on. Which argument of dist.all_reduce makes it return "
        "at once, and who has to wait then?",
    ),
    checks.Question(
        lambda d: "backward traffic" in d.names,
        "Each bucket is one all-reduce, as large as all its gradients together, started when the last of them is "
        "ready. How many of yours run, and when does each of them start?",
    ),
    checks.Question(
        lambda d: ONLY_A_NUMBER in d.names,
        "The gradients are on their way when `finish` is called. What is left to send is one number. Which?",
    ),
    checks.Question(
        lambda d: d.names == {COUNTS},
        "The gradients are right here, where each rank has a few tokens. In a real step, it has thousands. Which dtype "
        "can hold such a number, even if the gradients are bfloat16?",
    ),
    checks.Question(
        checks.has_kind("dW1", NOT_DIVIDED),
        "The gradients belong to the sum over all tokens. Which number turns them into those of the mean?",
    ),
    checks.Question(
        checks.has_kind("dW1", BY_RANKS, f"{BY_RANKS} "),
        "The ranks have different numbers of tokens, and the mean is over tokens. What has the number of ranks to do "
        "with it?",
    ),
    checks.Question(
        checks.has_kind("dW1", BY_OWN_TOKENS),
        "The sum is over the tokens of all ranks, and each rank divides by another number. How does a rank learn the "
        "tokens of the others?",
    ),
    checks.Question(
        checks.has_kind("dW1", BY_MEAN_TOKENS),
        "The all-reduces have added up the gradients of all ranks' tokens. You divide by the mean number of tokens on "
        "a rank. How many tokens are in that sum?",
    ),
    checks.Question(
        lambda d: any(checks.has_kind(f"d{name}", OWN, f"{OWN} ", f"{OWN}  ")(d) for name in SIZES),
        "What was added up has not arrived in `param.grad`. Which tensor did the all-reduce write into?",
    ),
    checks.Question(
        lambda d: any(name.startswith("d") for name in d.names),
        "The gradients of a bucket lie one after another in a flat tensor. In which order did you put them in, in "
        "which do you take them out, and had the all-reduce ended by then?",
    ),
)
