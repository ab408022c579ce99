"""The check for exercise 15.1, a learning rate that rises linearly and falls along a cosine. It starts no ranks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tplab.course.checks import Differences, Question, Verdict, calling, exercise, fail, fresh_generator, verify


@dataclass(frozen=True)
class Case:
    """A run, given by its number of steps, how many of them are warm-up, and the highest and lowest learning rates."""

    steps: int
    warmup: int
    highest: float
    lowest: float

    def note(self) -> str:
        return f"{self.steps} steps, {self.warmup} of them warm-up, {self.lowest:.3g} to {self.highest:.3g}"

    def asked(self) -> dict[str, list[int]]:
        """Return the steps to check, grouped by part of the run."""
        asked = {
            "warm-up": range(1, min(self.warmup, self.steps - 1) + 1),
            "cosine": range(self.warmup + 1, self.steps),
            "last step": [self.steps],
            "after the end": [self.steps + 1, self.steps + 2, 2 * self.steps + 5],
        }
        return {part: list(steps) for part, steps in asked.items() if len(steps)}

    def values(self, rate: Callable[[int], float]) -> dict[str, Tensor]:
        return {
            part: torch.tensor([rate(step) for step in steps], dtype=torch.float64)
            for part, steps in self.asked().items()
        }


FROM_ZERO = "the right one for the step before: the first step has a rate of 0"
NO_WARMUP = "a cosine over all steps, those of the warm-up included"
TO_ZERO = "a cosine down to 0"
FLOORED = "a cosine down to 0 that is cut off at the lowest rate"
QUARTER = "a quarter of a cosine, from 1 to 0"
LATE = "a cosine that comes to its end one step too late"
STRAIGHT = "a straight line down"
ADDED = "a cosine that begins at the sum of both rates"
DOUBLED = "a cosine that swings between the lowest rate and twice the way up"
AGAIN = "a cosine that goes on, and up again"
FROM_LOWEST = "a line that begins at the lowest rate, not at 0"
STAYS_HIGH = "the highest rate"


def right(case: Case, step: int) -> float:
    """Return the right learning rate at a step, computed the way the exercise describes it."""
    if step <= case.warmup:
        return case.highest * step / case.warmup
    if step > case.steps:
        return case.lowest
    part = (step - case.warmup) / (case.steps - case.warmup)
    return case.lowest + (case.highest - case.lowest) * (1 + math.cos(math.pi * part)) / 2


def mistakes(case: Case) -> dict[str, Callable[[int], float]]:
    """Return functions from a step to the learning rate that a common mistake would produce, in any part of the run."""
    c = case

    def cosine(part: float, low: float = c.lowest, height: float | None = None) -> float:
        return low + (c.highest - low if height is None else height) * (1 + math.cos(math.pi * part)) / 2

    def part(step: int) -> float:
        return (step - c.warmup) / max(c.steps - c.warmup, 1)

    return {
        FROM_ZERO: lambda step: (
            c.highest * (step - 1) / max(c.warmup, 1) if step <= c.warmup else cosine(part(step - 1))
        ),
        NO_WARMUP: lambda step: cosine(step / c.steps),
        f"{NO_WARMUP} ": lambda step: cosine((step - 1) / c.steps),
        TO_ZERO: lambda step: cosine(min(part(step), 1.0), 0.0),
        FLOORED: lambda step: max(c.lowest, cosine(min(part(step), 1.0), 0.0, c.highest)),
        QUARTER: lambda step: c.lowest + (c.highest - c.lowest) * math.cos(math.pi / 2 * part(step)),
        LATE: lambda step: cosine(part(step - 1)),
        STRAIGHT: lambda step: c.lowest + (c.highest - c.lowest) * (1 - part(step)),
        ADDED: lambda step: cosine(part(step), height=c.highest),
        DOUBLED: lambda step: cosine(part(step), height=2 * (c.highest - c.lowest)),
        AGAIN: lambda step: cosine(part(step)),
        FROM_LOWEST: lambda step: c.lowest + (c.highest - c.lowest) * step / max(c.warmup, 1),
        STAYS_HIGH: lambda step: c.highest,
    }


def lookalikes(case: Case, rights: dict[str, Tensor]) -> dict[str, dict[str, list[Tensor]]]:
    values = {label: case.values(rate) for label, rate in mistakes(case).items()}
    return {
        part: {label: [of[part]] for label, of in values.items() if not torch.allclose(of[part], rights[part])}
        for part in rights
    }


def cases() -> list[Case]:
    a, b, c, d = (0.2 + torch.rand(4, generator=fresh_generator(), dtype=torch.float64)).tolist()
    return [
        Case(40, 8, a, a / 10),
        Case(25, 0, b, b / 4),
        Case(12, 5, c, 0.0),
        Case(6, 5, d, d / 2),
        Case(7, 7, d, d / 3),
        Case(1, 0, c, c / 2),
    ]


@exercise("15.1", "The learning rate")
def the_learning_rate(function: Callable[..., Any]) -> Verdict:
    for case in cases():
        rights = case.values(lambda step, case=case: right(case, step))  # type: ignore[misc]
        seen = {}
        for part, steps in case.asked().items():
            values = [called(function, case, step) for step in steps]
            seen[part] = torch.tensor(values, dtype=torch.float64)
        verify(
            "15.1", 1, [seen], [rights], questions=QUESTIONS, lookalikes=lookalikes(case, rights), note=case.note(),
            alone=True,
        )  # fmt: skip
    return Verdict("Up in a line, down in a cosine, and it stays down.")


def called(function: Callable[..., Any], case: Case, step: int) -> float:
    given = f"{step}, steps={case.steps}, warmup={case.warmup}, highest={case.highest:.3g}, lowest={case.lowest:.3g}"
    call = f"learning_rate({given})"
    with calling(call, CRASH):
        said = function(step, steps=case.steps, warmup=case.warmup, highest=case.highest, lowest=case.lowest)
    if isinstance(said, Tensor) and said.numel() == 1:
        said = said.item()
    if isinstance(said, bool) or not isinstance(said, (int, float)):
        fail("15.1", f"{call} gave {'None' if said is None else f'a {type(said).__name__}'}, not a number.", FORM)
    return float(said)


FORM = "What comes out is one number. Is there a `return` on every way through the function?"
CRASH = (
    "How long is the warm-up here, and how long the cosine behind it? A length of 0 is allowed for both. Which line "
    "divides by it, and for which steps should that line run?"
)


def only(*kinds: str) -> Callable[[Differences], bool]:
    return lambda d: bool(d.kinds() & set(kinds))


QUESTIONS = (
    Question(
        lambda d: "warm-up" in d.names and d.kind("warm-up") == FROM_ZERO,
        "The first step has a rate of 0 here: it computes a gradient and does nothing with it. By which number do you "
        "multiply in step 1, and by which in the last step of the warm-up?",
    ),
    Question(
        lambda d: d.kind("warm-up") == FROM_LOWEST,
        "The line begins at 0 and not at the lowest rate: step 1 has a part of the highest one. Which part?",
    ),
    Question(
        lambda d: d.kind("warm-up") == STAYS_HIGH,
        "There is no warm-up. What is the rate while `step` is at most `warmup`?",
    ),
    Question(
        only(NO_WARMUP, f"{NO_WARMUP} "),
        "The cosine begins when the warm-up is over. How many steps has it, and which of them is this one?",
    ),
    Question(
        only(LATE, FROM_ZERO),
        "Steps are counted from 1, and the last one is step `steps`. In it the way down is at its end. Which part of "
        "the way does your function see there?",
    ),
    Question(only(TO_ZERO), "It goes down to 0. Where is the lowest rate in your sum?"),
    Question(
        only(FLOORED),
        "The cosine goes to 0 and is cut off at the lowest rate, so the last steps are flat. Between which two rates "
        "should the cosine itself go, and where do they stand in your sum?",
    ),
    Question(
        only(QUARTER),
        "That is a quarter of a cosine: it is steepest at its end. Half a cosine goes from 1 to -1. Which angle does "
        "it reach at the end, and what makes of 1 to -1 a part between 1 and 0?",
    ),
    Question(only(STRAIGHT), "That is a straight line. Which function of the part of the way turns it into a cosine?"),
    Question(
        only(ADDED),
        "The cosine goes from the highest rate down to the lowest. How high is it above the lowest at its beginning?",
    ),
    Question(
        only(DOUBLED),
        "1 + cos goes from 2 down to 0. What makes that a part between 1 and 0?",
    ),
    Question(
        lambda d: d.names == {"after the end"},
        "The last step is `steps`, and somebody goes on: the rate stays where it is. What does your cosine do after "
        "its end?",
    ),
    Question(
        lambda d: d.names == {"warm-up"},
        "In a warm-up of n steps, step 1 has 1/n of the highest rate and step n all of it. What has step k?",
    ),
    Question(
        lambda d: True,
        "Write the rate of a few steps by hand: the first one, the last of the warm-up, the one behind it, the last of "
        "all. Which of them differs?",
    ),
)
