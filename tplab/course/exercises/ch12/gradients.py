"""The check for exercise 12.3, in which learners sum the gradients of marked parameters in a single all-reduce.

A parameter is marked with `sequence_parallel` if it saw only this rank's tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course import checks
from tplab.runtime import device, record

CALL = "allreduce_sequence_gradients(module, group)"
RETURNS, KEEPS = "nothing is returned", "a parameter without a gradient has none afterwards"
MARKED = {"norm.weight": (6,), "norm.bias": (6,), "deep.inside.table": (4, 3), "bias": (5,)}
UNMARKED = {"up.weight": (3, 4), "down.weight": (2, 5), "said_no.weight": (3,)}
WITHOUT = "unused.weight"  # a marked parameter without a gradient
OWN, MEAN, TWICE = "this rank's own term", "the mean over the ranks", "what a second sum over the ranks gives"

Gradients = dict[str, Tensor]  # gradients by parameter name


@dataclass(frozen=True)
class Ranks(checks.Case):
    """A case in which all ranks, or the ranks of each group, sum their gradients.

    idle:   whether all gradients of the last rank are zero
    frozen: name of a marked parameter that no longer requires grad, or ""
    """

    idle: bool = False
    frozen: str = ""

    def describe(self, name: str) -> str:
        return "with all gradients zero on the last rank" * self.idle + f"with {self.frozen} frozen" * bool(self.frozen)


CASES = (Ranks(), Ranks(groups=checks.GROUPS), Ranks(idle=True), Ranks(frozen="deep.inside.table"))


def draw(case: Ranks, generator: torch.Generator, size: int) -> list[Gradients]:
    shapes = {**MARKED, **UNMARKED}
    drawn = [{name: checks.random_tensor(generator, *shape) for name, shape in shapes.items()} for _ in range(size)]
    return drawn[:-1] + [{name: value * (not case.idle) for name, value in drawn[-1].items()}]


def give(case: Ranks, problem: list[Gradients], place: checks.Place) -> Gradients:
    return problem[place.index]


def laid_out(gradient: Tensor, group: Any) -> Tensor:
    """Return a copy on this device. On every other rank, matrices are transposed in memory."""
    gradient = gradient.clone().to(device())
    return gradient.T.contiguous().T if gradient.dim() == 2 and dist.get_rank(group) % 2 == 0 else gradient


def build(gradients: Gradients, case: Ranks, group: Any) -> nn.Module:
    """Build a module whose parameters have these gradients."""
    model = nn.Module()
    for name, shape in {**MARKED, **UNMARKED, WITHOUT: (2,)}.items():
        *path, last = name.split(".")
        home = model
        for part in path:
            if part not in dict(home.named_children()):
                home.add_module(part, nn.Module())
            home = home.get_submodule(part)
        parameter = nn.Parameter(torch.full(shape, 0.5, dtype=case.dtype, device=device()))
        parameter.requires_grad_(name != case.frozen)
        if name in MARKED or name == WITHOUT:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        elif name.startswith("said_no"):
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
        if name in gradients:
            parameter.grad = laid_out(gradients[name], group)
        home.register_parameter(last, parameter)
    return model


def run(add_up: Callable[..., Any], case: Ranks, given: Gradients, group: Any) -> checks.Observed:
    model = build(given, case, group)
    params = dict(model.named_parameters())
    values = checks.Snapshot(**{name: param.detach() for name, param in params.items()})
    if case.twin is checks.Twin.BETWEEN:
        add_up(model, group)  # this is an earlier step, and the gradients of this step replace its gradients
        for name, gradient in given.items():
            left_over = params[name].grad
            if left_over is not None:
                params[name].grad = laid_out(gradient, group)  # a new tensor, as after zero_grad()
    with record() as section, checks.called_as(CALL):
        returned = add_up(model, group)
    left = params.pop(WITHOUT).grad
    return {
        **{f"d{name}": param.grad for name, param in params.items()},
        "traffic": checks.traffic(section),
        "parameters unchanged": values.changed(),
        KEEPS: checks.Claim("" if left is None else f"{WITHOUT} has one now"),
        RETURNS: checks.Claim("" if returned is None else f"it returned a {type(returned).__name__}"),
    }


def expect(case: Ranks, problem: list[Gradients], place: checks.Place) -> checks.Expected:
    own = problem[place.index]
    total = {name: torch.stack([gradients[name] for gradients in problem]).sum(0) for name in MARKED}
    right: checks.Observed = {f"d{name}": total.get(name, value) for name, value in own.items()}
    right["traffic"] = place.traffic(("all_reduce", sum(value.numel() for value in total.values())))
    if place.size == 1:
        return checks.Expected(right)
    mistakes = {
        f"d{name}": {OWN: own[name], MEAN: value / place.size, TWICE: value * place.size}
        for name, value in total.items()
    }
    return checks.Expected(right, mistakes)


@checks.exercise("12.3", "Add up what each rank's tokens gave")
def gradients(add_up: Callable[..., Any]) -> checks.Verdict:
    checks.check_cases(
        "12.3", add_up, CASES, draw=draw, give=give, run=run, expect=expect,
        questions=lambda case, observed: (*[FROZEN] * bool(case.frozen), *QUESTIONS), crash=CRASH,
        stuck=lambda case: IDLE if case.idle else CRASH, whose_group=WHOSE_GROUP,
    )  # fmt: skip
    return checks.Verdict("One small all-reduce a step, and the replicas are one model again.")


def marked(differences: checks.Differences) -> set[str]:
    return {name for name in MARKED if f"d{name}" in differences.names}


def any_kind(*kinds: str) -> Callable[[checks.Differences], bool]:
    return lambda d: any(checks.has_kind(f"d{name}", *kinds)(d) for name in MARKED)


WHOSE_GROUP = "Which call was not given `group`, and so adds up over all ranks?"
CRASH = (
    "A parameter that took no part in this step has the gradient None, and a gradient may lie transposed in memory. "
    "Which line expects something else? (`flatten()` copes with any layout, `view` does not.)"
)
IDLE = (
    "Here all gradients of the last rank are zero, and the others wait for that rank in the all-reduce. It can't know "
    "what the others have, so it has to take part with its zeros. Which of your lines makes it leave early?"
)
FROZEN = checks.Question(
    lambda d: bool(marked(d)) and any_kind(OWN)(d),
    "Here a marked parameter has a gradient but no longer requires one. A parameter that is marked and has a gradient "
    "takes part in the sum. What else does your loop look at?",
)
QUESTIONS = (
    checks.Question(
        lambda d: "parameters unchanged" in d.names,
        "The parameters themselves have changed. Which tensor is summed, `param` or `param.grad`?",
    ),
    checks.Question(
        lambda d: RETURNS in d.names, "The result is in the gradients; nothing has to be returned. What is?"
    ),
    checks.Question(
        lambda d: any(f"d{name}" in d.names for name in UNMARKED),
        "A gradient that belongs to this rank alone was changed too. Which parameters are marked, and with which "
        "value? (Shards have the attribute `tensor_parallel`; here what counts is `sequence_parallel`, which may be "
        "False.)",
    ),
    checks.Question(
        any_kind(MEAN, "1/p"),
        "The loss is not divided by p: each rank's tokens gave one term of one gradient. Sum or mean?",
    ),
    checks.Question(any_kind(TWICE, "p times"), "How many times does each rank's term enter the sum?"),
    checks.Question(
        lambda d: bool(marked(d)) and any_kind(OWN)(d) and "traffic" in d.names,
        "The marked gradients are still this rank's own. Which parameters does your loop find? (Also those of modules "
        "within modules.)",
    ),
    checks.Question(
        lambda d: bool(marked(d)) and any_kind(OWN)(d),
        "The sum was sent and did not arrive in `param.grad`. `torch.cat` makes a new tensor: who copies its parts "
        "back?",
    ),
    checks.Question(
        lambda d: bool(marked(d)),
        "The sum is there, but its parts are in the wrong places. In which order were the gradients put together, with "
        "which lengths are they taken apart, and in which shape do they go back? A gradient may be transposed in "
        "memory on some ranks and not on others.",
    ),
    checks.Question(
        lambda d: "traffic" in d.names,
        "The gradients are right, the communication is not: one all-reduce with the numbers of all marked gradients, "
        "since each message costs its latency. What does yours send?",
    ),
    checks.Question(lambda d: KEEPS in d.names, "It took no part in this step, and its gradient is None. Leave it so."),
)
