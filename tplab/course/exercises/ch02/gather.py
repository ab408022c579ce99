"""The check for exercise 2.4, in which the learner fixes a gather along the last dimension.

The check skips each case's non-contiguous variant, because separate cases cover non-contiguous tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.runtime import device, record

AS_SHIPPED = "the values of one rank after another, in memory order, viewed in the shape of the result"
STACKED = "the ranks' tensors, concatenated along dimension 0"
SUM = "the sum of the ranks' tensors"


@dataclass(frozen=True)
class Shape(checks.Case):
    shape: tuple[int, ...] = (3, 2)
    gaps: bool = False  # y is every other column of a wider tensor, so it isn't contiguous

    def describe(self, name: str) -> str:
        return f"y of shape {list(self.shape)}" + ", not contiguous" * self.gaps


CASES = (
    Shape(), Shape((2, 3, 4)), Shape((5,)), Shape((1, 3)), Shape((4, 1)), Shape((1, 3, 2)), Shape((2, 1, 3, 2)),
    Shape(gaps=True), Shape((2, 3, 4), gaps=True),
)  # fmt: skip


def draw(case: Shape, generator: torch.Generator, size: int) -> list[Tensor]:
    *leading, n = case.shape
    step = 2 if case.gaps else 1
    return [checks.random_tensor(generator, *leading, step * n)[..., ::step] for _ in range(size)]


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


@checks.exercise("2.4", "Fix a gather")
def repaired_gather(gather_last_dim: Callable[[Tensor], Tensor]) -> checks.Verdict:
    checks.check_cases(
        "2.4", gather_last_dim, CASES, draw=draw, give=give, run=run, expect=expect, questions=QUESTIONS,
        world_sizes=(2, 4, 1), tol=0, crash=lambda case: NOT_CONTIGUOUS if case.gaps else None,
        without={checks.Twin.STRIDED},  # separate cases cover non-contiguous tensors
    )  # fmt: skip
    return checks.Verdict("Your function still calls all-gather only once, and every element is in the right place.")


NOT_CONTIGUOUS = (
    "This time, y isn't contiguous, because it's a slice of a wider tensor. Collectives need contiguous tensors. Which "
    "tensor method returns a contiguous copy? Do you make this copy before the first line that uses y?"
)

QUESTIONS = (
    checks.LATE_QUESTION,
    checks.Question(
        checks.kind_is("out", AS_SHIPPED),
        "Your output contains the right values, but they're in memory order, so all of rank 0's values come before "
        "all of rank 1's. Suppose you view the output as a tensor whose first dimension is the rank. Where does this "
        "dimension have to go before you merge it with the last dimension?",
    ),
    checks.Question(
        checks.kind_is("out", STACKED),
        "You concatenated the ranks' tensors along dimension 0. Along which dimension should you concatenate them?",
    ),
    checks.Question(
        checks.kind_is("out", SUM),
        "You added the ranks' tensors, but you should have concatenated them. Which collective collects tensors "
        "without adding them?",
    ),
    checks.Question(
        lambda d: d.names == {"traffic"},
        "The result is correct, but your function doesn't run the same collective as the original. Can you use a "
        "single all-gather and reorder the elements afterward?",
    ),
    checks.Question(
        "out",
        "Suppose y has the shape [2, 2] on each of two ranks. On paper, write down where each of the eight elements "
        "belongs. Which dimension of your gathered tensor indexes the ranks? Where does this dimension have to go "
        "before you merge it with the last dimension?",
    ),
)
