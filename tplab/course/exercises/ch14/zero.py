"""The check for exercise 14.2, ZeRO-1, which shards the optimizer state over the data-parallel ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tplab.course import checks
from tplab.runtime import device, record

SIZES = ((3, 5), (7,), (3, 3))  # 31 elements, divisible by neither 2 nor 4
NUMBERS = 31
NO_OPTIMIZER = "`self.optimizer` is an optimizer"
IN_PLACE = "the new weights are in the parameters' own memory"
STATE_DTYPE = "the optimizer's state has the parameters' dtype"
HELD = "numbers in the optimizer's state"

AVERAGED = "what comes out when the gradients are averaged, not added up"
ALONE = "what comes out with this rank's gradients alone"
OWN_PART = "the new weights in this rank's part only, the old ones elsewhere"
UNCHANGED = "the weights before the first step"

Flat = list[Tensor]  # one tensor for each parameter


@dataclass(frozen=True)
class Step(checks.Case):
    """One step of an optimizer, which comes after all earlier steps.

    kept:   number of tensors of a parameter's size that the optimizer's state holds for each parameter
    number: the step's number, counted from 1
    """

    optimizer: type[Optimizer]
    options: tuple[tuple[str, float], ...]
    kept: int
    number: int

    def describe(self, name: str) -> str:
        return f"with {self.optimizer.__name__}, step {self.number}"


MOMENTUM = (("lr", 0.1), ("momentum", 0.9))
# Adam hides a wrong factor in the gradients, but a large eps reveals it
LARGE_EPS = (("lr", 0.1), ("eps", 0.3), ("weight_decay", 0.2))
CASES = tuple(
    Step(optimizer, options, kept, number, groups=groups)
    for optimizer, options, kept, groups in (
        (SGD, MOMENTUM, 1, None),
        (AdamW, LARGE_EPS, 2, None),
        (SGD, MOMENTUM, 1, checks.GROUPS),
    )
    for number in (1, 2, 3)
)


class Problem(NamedTuple):
    weights: Flat
    gradients: list[list[Flat]]  # per rank and step


class Given(NamedTuple):
    weights: Flat
    gradients: list[Flat]  # this rank's gradients, per step


def draw(case: Step, generator: torch.Generator, size: int) -> Problem:
    def flat() -> Flat:
        return [checks.random_tensor(generator, *shape) for shape in SIZES]

    return Problem(flat(), [[flat() for _ in range(case.number)] for _ in range(size)])


def give(case: Step, problem: Problem, place: checks.Place) -> Given:
    return Given(problem.weights, problem.gradients[place.index])


def run(zero_class: Callable[..., Any], case: Step, given: Given, group: Any) -> checks.Observed:
    """Run all steps. Return the weights and traffic of the last one and the size of the optimizer's state after it."""
    params = [nn.Parameter(_laid_out(value).to(device())) for value in given.weights]
    options = dict(case.options)
    with checks.called_as(f"ZeRO1(parameters, {case.optimizer.__name__}, group, **{options})"):
        handed = list(params)
        before = checks.Snapshot(parameters=handed)
        zero = zero_class(handed, case.optimizer, group, **options)
    twin = another(zero_class, case, given, group) if case.twin is checks.Twin.BETWEEN else None
    for gradients in given.gradients:
        if twin:
            one_step(*twin, [gradient.flip(0) for gradient in gradients])
        seen = one_step(zero, params, gradients)
    changed = before.changed()
    return seen | ({"inputs unchanged": changed} if changed else {})


def _laid_out(value: Tensor) -> Tensor:
    """Return a copy of the tensor. Matrices are transposed in memory."""
    return value.T.clone(memory_format=torch.contiguous_format).T if value.dim() == 2 else value.clone()


def another(zero_class: Any, case: Step, given: Given, group: Any) -> tuple[Any, list[nn.Parameter]]:
    """Return a second optimizer, which is used between the steps of the first one, and its parameters."""
    params = [nn.Parameter(-2 * value.to(device())) for value in given.weights]
    return zero_class(params, case.optimizer, group, **dict(case.options)), params


def one_step(zero: Any, params: list[nn.Parameter], gradients: Flat) -> checks.Observed:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone().to(device())
    views = [param.detach() for param in params]
    with record() as section, checks.called_as("step()"):
        zero.step()
    left = sum(not torch.equal(view, param) for view, param in zip(views, params, strict=True))
    optimizer = getattr(zero, "optimizer", None)
    return {
        "weights": [checks.portable(param) for param in params],
        "traffic": checks.traffic(section),
        IN_PLACE: checks.Claim(f"{left} of {len(params)} parameters have other memory now" if left else ""),
        HELD: held(optimizer) if isinstance(optimizer, Optimizer) else None,
        STATE_DTYPE: checks.Claim(other_dtype(optimizer, params[0].dtype)),
        NO_OPTIMIZER: checks.Claim("" if isinstance(optimizer, Optimizer) else f"it is a {type(optimizer).__name__}"),
    }


def state_of(optimizer: Any) -> list[Tensor]:
    """Return the tensors in an optimizer's state, except for step counts. Returns [] for anything but an optimizer."""
    states = optimizer.state.values() if isinstance(optimizer, Optimizer) else ()
    values = [value for state in states for value in state.values()]
    return [value for value in values if isinstance(value, Tensor) and value.dim() > 0]


def held(optimizer: Optimizer) -> int:
    """Count the elements in the tensors of the optimizer's state."""
    return sum(value.numel() for value in state_of(optimizer))


def other_dtype(optimizer: Any, dtype: torch.dtype) -> str:
    """Describe the dtype of the state if it differs from that of the parameters. Otherwise, return ""."""
    others = [value.dtype for value in state_of(optimizer) if value.dtype != dtype]
    names = [str(each).removeprefix("torch.") for each in (*others[:1], dtype)]
    return "it is {}, but the parameters are {}".format(*names) if others else ""


def plain(case: Step, weights: Flat, gradients: Sequence[Flat]) -> Flat:
    """Return the weights after all steps of the optimizer in a single process."""
    params = [nn.Parameter(value.clone()) for value in weights]
    options: dict[str, Any] = dict(case.options)
    optimizer = case.optimizer(params, **options)
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
    return [param.detach() for param in params]


def summed(parts: Sequence[Sequence[Flat]], factor: float = 1.0) -> list[Flat]:
    """Sum the ranks' gradients for each step and parameter, and multiply the sums by a factor."""
    return [
        [factor * torch.stack(of_ranks).sum(0) for of_ranks in zip(*steps, strict=True)]
        for steps in zip(*parts, strict=True)
    ]


def part_length(p: int) -> int:
    """Return the number of elements in each rank's part of the flat parameters, padding included."""
    return -(-NUMBERS // p)


def own_part_only(start: Flat, after: Flat, place: checks.Place) -> Flat:
    """Return the new values in this rank's part of the flat parameters, and the old values elsewhere."""
    old, new = (torch.cat([value.flatten() for value in values]) for values in (start, after))
    mine = torch.arange(NUMBERS) // part_length(place.size) == place.index
    mixed = torch.where(mine, new, old)
    pieces = mixed.split([value.numel() for value in start])
    return [piece.view_as(value) for piece, value in zip(pieces, start, strict=True)]


def expect(case: Step, problem: Problem, place: checks.Place) -> checks.Expected:
    start, gradients, p = problem.weights, problem.gradients, place.size
    after, length = plain(case, start, summed(gradients)), part_length(p)
    right: checks.Observed = {
        "weights": after,
        HELD: case.kept * length,
        "traffic": place.traffic(("reduce_scatter", p * length), ("all_gather", p * length)),
    }
    mistakes = {UNCHANGED: start}
    if p > 1:
        mistakes[AVERAGED] = plain(case, start, summed(gradients, 1 / p))
        mistakes[ALONE] = plain(case, start, gradients[place.index])
        mistakes[OWN_PART] = own_part_only(start, after, place)
    return checks.Expected(right, {"weights": mistakes})


@checks.exercise("14.2", "A step of ZeRO-1")
def zero_one(zero_class: Callable[..., Any]) -> checks.Verdict:
    checks.check_cases(
        "14.2", zero_class, CASES, draw=draw, give=give, run=run, expect=expect,
        questions=lambda case, observed: (*QUESTIONS, FIRST_QUESTION if case.number == 1 else LATER_QUESTION),
        crash=CRASH, whose_group=WHOSE_GROUP,
    )  # fmt: skip
    return checks.Verdict("The weights of the plain optimizer, with 1/p of its state on each rank.")


WHOSE_GROUP = "Which collective, or which call for a rank or a size, was not given `group`?"
CRASH = (
    f"The parameters have {NUMBERS} numbers here, which neither 2 nor 4 divides. Write the length beside each flat "
    "tensor: all numbers, all numbers with the zeros behind them, one rank's part. Which line expects another one?"
)
QUESTIONS = (
    checks.Question(
        lambda d: NO_OPTIMIZER in d.names,
        "`self.optimizer` should be an `optimizer_class([self.shard], **options)`. Where do you make it?",
    ),
    checks.Question(
        lambda d: HELD in d.names and "weights" not in d.names,
        "The weights are right, but the optimizer does not keep what it should for this rank's part, and for "
        "nothing else. Which parameters did you give it, and did the options reach it?",
    ),
    checks.Question(
        lambda d: "traffic" in d.names and "weights" not in d.names,
        "The weights are right. One reduce-scatter brings each rank the sum of its part of the gradients, one "
        "all-gather all parts of the new weights. What else do you send, or in how many pieces?",
    ),
    checks.Question(
        checks.has_kind("weights", OWN_PART),
        "Each rank has new weights in its own part, and old ones in the parts of the others. Who tells it theirs?",
    ),
    checks.Question(
        checks.has_kind("weights", UNCHANGED),
        "The weights are what they were. The optimizer changes `self.shard`: who brings the new values back into "
        "the parameters of the model?",
    ),
    checks.Question(
        checks.has_kind("weights", AVERAGED),
        "The losses of the ranks are parts of one mean already: their gradients add up. Where do you divide?",
    ),
    checks.Question(
        checks.has_kind("weights", ALONE),
        "These weights come from this rank's gradients. Which collective adds up those of all ranks?",
    ),
)
FIRST_QUESTION = checks.Question(
    lambda d: "weights" in d.names,
    "Follow one number: its place among all flat gradients, the rank it goes to, its place in that rank's "
    "part, and its way back into the parameter. Where does it end up somewhere else?",
)
LATER_QUESTION = checks.Question(
    lambda d: "weights" in d.names,
    "The first step was right. What does the second one start from: the weights of the first, and the state "
    "that the optimizer kept?",
)
