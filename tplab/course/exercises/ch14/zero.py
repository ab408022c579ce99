"""The check of exercise 14.2, ZeRO-1, which shards the optimizer state over the replicas."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.observation import Claim, Observed, Snapshot, portable
from tplab.course.checks.recorded_traffic import traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.runtime import device, record

SIZES = ((3, 5), (7,), (3, 3))
ELEMENTS = 31  # can't be divided by 2 or 4
NO_OPTIMIZER = "`self.optimizer` is an optimizer"
IN_PLACE = "the new weights are in the parameters' own memory"
OWN_MEMORY = "the shard has memory of its own"
NOT_WHOLE = "the full vector doesn't stay in memory"
STATE_DTYPE = "the optimizer's state has the parameters' dtype"
LENGTH, HELD = "elements that the optimizer updates", "elements in the optimizer's state"

Flat = list[Tensor]  # one tensor for each parameter


@dataclass(frozen=True)
class Step(Case):
    """One step of an optimizer, which comes after all earlier steps.

    kept:   how many tensors of a parameter's size the optimizer's state has for each parameter
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
        (SGD, MOMENTUM, 1, GROUPS),
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
        return [random_tensor(generator, *shape) for shape in SIZES]

    return Problem(flat(), [[flat() for _ in range(case.number)] for _ in range(size)])


def run(zero_class: Callable[..., Any], case: Step, given: Given, group: Any) -> Observed:
    """Run all steps. Return the weights and the traffic of the last one, and what the optimizer holds after it."""
    params = [nn.Parameter(value.clone().to(device())) for value in given.weights]
    options: dict[str, Any] = dict(case.options)
    with called_as(f"ZeRO1(parameters, {case.optimizer.__name__}, group, **{options})"):
        handed = list(params)
        before = Snapshot(parameters=handed)
        zero = zero_class(handed, case.optimizer, group, **options)
    twin = None
    if case.twin is Twin.BETWEEN:
        others = [nn.Parameter(-2 * value.to(device())) for value in given.weights]
        twin = zero_class(others, case.optimizer, group, **options), others
    for gradients in given.gradients:
        if twin:
            one_step(*twin, [gradient.flip(0) for gradient in gradients])
        seen = one_step(zero, params, gradients)
    return seen | {"inputs unchanged": before.changed()}


def one_step(zero: Any, params: list[nn.Parameter], gradients: Flat) -> Observed:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone().to(device())
    views = [param.detach() for param in params]
    with record() as section, called_as("step()"):
        zero.step()
    left = sum(not torch.equal(view, param) for view, param in zip(views, params, strict=True))
    optimizer = getattr(zero, "optimizer", None)
    updated = [param for group in getattr(optimizer, "param_groups", []) for param in group["params"]]
    larger = sum(param.untyped_storage().nbytes() > param.nbytes for param in updated)
    is_one = isinstance(optimizer, Optimizer)
    return {
        "weights": [portable(param) for param in params],
        "traffic": traffic(section),
        IN_PLACE: Claim(f"{left} of {len(params)} parameters have other memory now" if left else ""),
        LENGTH: sum(param.numel() for param in updated),
        HELD: sum(value.numel() for value in state_of(optimizer)),
        NOT_WHOLE: Claim(kept_whole(zero, [*params, *updated])),
        OWN_MEMORY: Claim("it's a view of a larger tensor, which stays in memory" if larger else ""),
        STATE_DTYPE: Claim(other_dtype(optimizer, params[0].dtype)),
        NO_OPTIMIZER: Claim("" if is_one else f"it's a {type(optimizer).__name__}"),
    }


def kept_whole(zero: Any, others: list[Tensor]) -> str:
    """Say which attribute keeps all elements a second time, or return "". `others` are the tensors that may."""
    places = {other.data_ptr() for other in others}
    for name, value in vars(zero).items():
        tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
        if any(tensor.numel() >= ELEMENTS and tensor.data_ptr() not in places for tensor in tensors):
            return f"self.{name} keeps it"
    return ""


def state_of(optimizer: Any) -> list[Tensor]:
    """Return the tensors in an optimizer's state, except for step counts. Returns [] for anything but an optimizer."""
    states = optimizer.state.values() if isinstance(optimizer, Optimizer) else ()
    values = [value for state in states for value in state.values()]
    return [value for value in values if isinstance(value, Tensor) and value.dim() > 0]


def other_dtype(optimizer: Any, dtype: torch.dtype) -> str:
    """Describe the dtype of the state if it differs from that of the parameters. Otherwise, return ""."""
    others = [value.dtype for value in state_of(optimizer) if value.dtype != dtype]
    names = [str(each).removeprefix("torch.") for each in (*others[:1], dtype)]
    return "it's {}, but the parameters are {}".format(*names) if others else ""


def right(case: Step, problem: Problem, place: Place) -> Observed:
    """Return what's right for this rank. A shard may have one element of padding more than it needs."""
    p = place.size
    needed = -(-ELEMENTS // p)
    lengths = {seen.get(LENGTH) for seen in place.observed}
    length = needed + 1 if lengths == {needed + 1} else needed
    return {
        "weights": plain(case, problem),
        LENGTH: length,
        HELD: case.kept * length,
        "traffic": place.traffic(("reduce_scatter", p * length), ("all_gather", p * length)),
    }


def plain(case: Step, problem: Problem) -> Flat:
    """Return the weights after all steps of the optimizer in a single process, with the sum of all ranks' gradients."""
    params = [nn.Parameter(value.clone()) for value in problem.weights]
    options: dict[str, Any] = dict(case.options)
    optimizer = case.optimizer(params, **options)
    for step in range(case.number):
        for index, param in enumerate(params):
            param.grad = torch.stack([mine[step][index] for mine in problem.gradients]).sum(0)
        optimizer.step()
    return [param.detach() for param in params]


exercise(
    "14.2", "A step of ZeRO-1", takes=["ZeRO1"],
    trials=[
        OnRanks(
            cases=CASES, draw=draw, run=run, right=right,
            give=lambda case, problem, place: Given(problem.weights, problem.gradients[place.index]),
            without=(Twin.EVALUATION, Twin.STRIDED),  # what these change isn't used here
            late=True, world_sizes=(2, 4, 1),
        )
    ],
    passed="The weights are those of the plain optimizer, and each rank keeps only its share of the optimizer's "
    "state.",
)  # fmt: skip
