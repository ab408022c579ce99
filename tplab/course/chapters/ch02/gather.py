"""The check for exercise 2.4: a gather along the last dimension, repaired."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.runtime import device, record

AS_SHIPPED = "the memory of all ranks, one after another, in the shape of the result"
STACKED = "the ranks' tensors, stacked along dimension 0"
SUM = "the sum of the ranks' tensors"


@dataclass(frozen=True)
class Shape(checks.Case):
    shape: tuple[int, ...] = (3, 2)

    def describe(self, name: str) -> str:
        return f"y of shape {list(self.shape)}"


CASES = (Shape(), Shape((2, 3, 4)), Shape((5,)), Shape((1, 3)), Shape((4, 1)), Shape((2, 1, 3, 2)))


def draw(case: Shape, generator: torch.Generator, size: int) -> list[Tensor]:
    return [checks.random_tensor(generator, *case.shape) for _ in range(size)]


def give(case: Shape, problem: list[Tensor], place: checks.Place) -> Tensor:
    return problem[place.index]


def run(gather: Callable[[Tensor], Tensor], case: Shape, given: Tensor, group: Any) -> checks.Observed:
    y = given.to(device())
    before = checks.Snapshot(y=y)
    with record() as section:
        out = gather(y)
    return {"out": out, "traffic": checks.traffic(section), "inputs unchanged": before.changed()}


def expect(case: Shape, problem: list[Tensor], place: checks.Place) -> checks.Expected:
    right = torch.cat(problem, -1)
    mistakes = {
        AS_SHIPPED: torch.cat([y.flatten() for y in problem]).view_as(right),
        STACKED: torch.cat(problem),
        SUM: torch.stack(problem).sum(0),
    }
    traffic = place.traffic(("all_gather", right.numel()))
    return checks.Expected({"out": right, "traffic": traffic}, {"out": mistakes if place.size > 1 else {}})


@checks.exercise("2.4", "A gather along the last dimension, repaired")
def repaired_gather(gather_last_dim: Callable[[Tensor], Tensor]) -> checks.Verdict:
    checks.check_cases(
        "2.4", gather_last_dim, CASES, draw=draw, give=give, run=run, expect=expect, questions=QUESTIONS,
        world_sizes=(2, 4, 1), tol=0,
    )  # fmt: skip
    return checks.Verdict("It's still one message, and every element is where it belongs.")


QUESTIONS = (
    checks.LATE_QUESTION,
    checks.Question(
        checks.kind_is("out", AS_SHIPPED),
        "All the values are there, but they come in the order of memory: first everything from rank 0, then everything "
        "from rank 1. Which shape describes that order, and which dimension has to move?",
    ),
    checks.Question(
        checks.kind_is("out", STACKED),
        "The ranks' tensors stand below each other. Which dimension should grow instead?",
    ),
    checks.Question(
        checks.kind_is("out", SUM),
        "You added the ranks' tensors. They should stand side by side, so which collective only collects them?",
    ),
    checks.Question(
        lambda d: d.names == {"traffic"},
        "The result is right now, but it takes more traffic than before. Can you keep the single all-gather, and put "
        "the "
        "elements in order after it?",
    ),
    checks.Question(
        "out",
        "Take y with shape [2, 2] on two ranks and write down where each of the eight elements belongs. Which of your "
        "dimensions counts the ranks, and where is it when you merge it with the last one?",
    ),
)
