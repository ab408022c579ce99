"""The check for exercise 1.5, in which the learner fixes a training step that the ranks should all take or all skip.

Only the first case has twins, which are repetitions of the case in float32 and in bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.course import checks
from tplab.runtime import Deadlock, device, record

Step = Callable[[Tensor, Tensor, float], bool]
RATE = 0.25
LITTLE = "the step sends at most the gradient and one more element"
OWN = "the weight after a step with this rank's own gradient only"
MEAN = "the weight after a step with the mean of the gradients"
AS_BEFORE = "the weight as it was before the step"


@dataclass(frozen=True)
class Scene(checks.Case):
    """A case that specifies what's wrong with the gradients.

    broken: (b, value) pairs. The value replaces the last element of the gradient on rank -b modulo p
    """

    note: str
    broken: tuple[tuple[int, float], ...] = ()
    shape: tuple[int, ...] = (8,)

    def describe(self, name: str) -> str:
        return self.note


INF, NAN = float("inf"), float("nan")
CASES = (
    Scene("all gradients finite"),
    Scene("inf on the last rank", ((1, INF),)),
    Scene("NaN on the first rank", ((0, NAN),)),
    Scene("-inf on the last rank and inf on the one before", ((1, -INF), (2, INF)), (2, 3)),
    Scene("all gradients finite, in two dimensions", (), (2, 3)),
    Scene("gradients that sum to zero", (), (1,)),
)


class Problem(NamedTuple):
    weight: Tensor
    gradients: list[Tensor]


def draw(case: Scene, generator: torch.Generator, size: int) -> Problem:
    gradients = [checks.random_tensor(generator, *case.shape) for _ in range(size)]
    if "zero" in case.note and size > 1:
        gradients[-1] = -torch.stack(gradients[:-1]).sum(0)
    for back, value in case.broken:
        gradients[-back % size].view(-1)[-1] = value
    return Problem(checks.random_tensor(generator, *case.shape), gradients)


def give(case: Scene, problem: Problem, place: checks.Place) -> tuple[Tensor, Tensor]:
    return problem.weight, problem.gradients[place.index]


def run(step: Step, case: Scene, given: tuple[Tensor, Tensor], group: Any) -> checks.Observed:
    weight, gradient = (tensor.to(device()).clone() for tensor in given)
    with record() as section:
        taken = step(weight, gradient, RATE)
    sent = sum(call.numel for call in checks.traffic(section))
    said = f"it sends {sent} elements, and the gradient has {gradient.numel()}" if sent > gradient.numel() + 1 else ""
    return {"weight": weight, "step taken": bool(taken), LITTLE: checks.Claim(said)}


def expect(case: Scene, problem: Problem, place: checks.Place) -> checks.Expected:
    total = torch.stack(problem.gradients).sum(0)
    taken = not case.broken
    mistakes = {
        OWN: problem.weight - RATE * problem.gradients[place.index],
        MEAN: problem.weight - RATE * total / place.size,
        AS_BEFORE: problem.weight,
    }
    right = problem.weight - RATE * total if taken else problem.weight
    alike = mistakes if taken and place.size > 1 and total.abs().max() > 1e-6 else {}
    return checks.Expected({"weight": right, "step taken": taken}, {"weight": alike})


@checks.exercise("1.5", "Fix a careful training step")
def careful_step(step: Step) -> checks.Verdict:
    for case in CASES:  # one at a time, because a skipped collective would be paired with a call from the next case
        checks.check_cases(
            "1.5", step, [case], draw=draw, give=give, run=run, expect=expect, questions=QUESTIONS,
            stuck=STUCK, ask_instead=_about_report, world_sizes=(2, 4, 1),
            without=[twin for twin in checks.Twin if case is not CASES[0] or twin not in checks.twins.ROUNDED],
        )  # fmt: skip
    return checks.Verdict("Either all ranks take the step, or none of them do.")


STUCK = (
    "The other ranks are blocked in a collective that one rank never calls. Under what condition does that rank "
    "return early? Do the other ranks know whether that condition is true? Which message would tell them?"
)


def _all_took_the_step(differences: checks.Differences) -> bool:
    """Return whether a weight is wrong because every rank took a step that all of them should have skipped."""
    taken = [row.rank for row in differences if row.name == "step taken" and row.text.startswith("got True")]
    return len(taken) == differences.p and "weight" in differences.names


def _about_report(failure: checks.CheckFailed) -> str | None:
    return STUCK if isinstance(failure.__cause__, Deadlock) else None


QUESTIONS = (
    checks.Question(
        lambda d: d.names == {LITTLE},
        "Every rank does the right thing, but your function sends more data than it needs to. What do the other ranks "
        "need to know about a gradient to decide whether to skip the step? How many elements does it take to send that "
        "information?",
    ),
    checks.Question(
        lambda d: "step taken" in d.names and "weight" not in d.names,
        "The weights are right, but the return value isn't. What should your function return on a rank that takes the "
        "step? What should your function return on a rank that skips the step?",
    ),
    checks.Question(
        checks.kind_is("weight", OWN),
        "Each rank used only its own gradient. Which collective gives every rank the sum of all gradients?",
    ),
    checks.Question(
        checks.kind_is("weight", MEAN), "You used the mean of the gradients. Does the task ask for the mean or the sum?"
    ),
    checks.Question(
        checks.kind_is("weight", AS_BEFORE),
        "All gradients are finite, so the weight should have changed, but it didn't. Under what condition do you skip "
        "the step? When all ranks take the step, does your code change `weight` in place?",
    ),
    checks.Question(
        lambda d: _all_took_the_step(d) and d.kind("weight") == "nan",
        "Every rank took the step, even though one rank's gradient contains inf or NaN. Does each rank's gradient "
        "affect your decision? If you sum one flag per rank, which sums are possible, and what does your condition "
        "decide for each sum?",
    ),
    checks.Question(
        lambda d: _all_took_the_step(d),
        "Every rank took the step, even though one rank's gradient isn't finite. It isn't enough to leave out the "
        "values that aren't finite, because then the other values still change the weight. How can every rank find "
        "out that it has to skip the step?",
    ),
    checks.Question(
        lambda d: "weight" in d.names,
        "Either a rank changed its weight by the wrong amount, or only some of the ranks skipped the step. Do all "
        "ranks make the same decision? If the ranks take the step, what should each rank subtract from its weight?",
    ),
)
