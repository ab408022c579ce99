"""The check for exercise 3.4, in which the learner fixes a function that sums a tensor over all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.course.exercises.ch03.operators import laid_out, total
from tplab.runtime import device, record

OWN_X = "this rank's own x"
NOT_WRITTEN = "nothing is written into x, not even for a moment"


@dataclass(frozen=True)
class Layout(checks.Case):
    layout: str = "contiguous"
    shape: tuple[int, ...] = (3, 4)

    def describe(self, name: str) -> str:
        return f"x of shape {list(self.shape)}, {self.layout}"


CASES = (
    Layout(),
    Layout("transposed"),
    Layout("every other column"),
    Layout("expanded"),
    Layout("transposed on rank 0 only"),
    Layout("transposed", (2, 3, 4)),
    Layout(shape=(5,)),
    Layout(shape=()),
)


def draw(case: Layout, generator: torch.Generator, size: int) -> list[Tensor]:
    shape = (1, *case.shape[1:]) if case.layout == "expanded" else case.shape
    return [checks.random_tensor(generator, *shape, 1)[..., 0].expand(case.shape) for _ in range(size)]


def give(case: Layout, problem: list[Tensor], place: checks.Place) -> tuple[Tensor, str]:
    layout = case.layout.removesuffix(" on rank 0 only")
    return problem[place.index].contiguous().clone(), "contiguous" if layout != case.layout and place.index else layout


def run(answer: Callable[[Tensor], Tensor], case: Layout, given: tuple[Tensor, str], group: Any) -> checks.Observed:
    x, layout = given[0].to(device()), given[1]
    x = x[:1].expand(case.shape) if layout == "expanded" else laid_out(x, layout)
    before, version = checks.Snapshot(x=x), x._version
    with record() as section:
        out = answer(x)
    restored = x._version != version and not before.changed()
    seen: checks.Observed = {"out": out, "traffic": checks.traffic(section), "inputs unchanged": before.changed()}
    shares = isinstance(out, Tensor) and checks.same_memory(out, x)
    seen[NOT_WRITTEN] = checks.Claim("x was overwritten, and then its old values were restored" if restored else "")
    return seen | {"the result has memory of its own": checks.Claim("it shares that of x" if shares else "")}


def expect(case: Layout, problem: list[Tensor], place: checks.Place) -> checks.Expected:
    right = total(problem)
    mistakes = {OWN_X: problem[place.index]} if place.size > 1 else {}
    traffic = place.traffic(("all_reduce", right.numel()))
    return checks.Expected({"out": right, "traffic": traffic}, {"out": mistakes})


@checks.exercise("3.4", "Fix a sum")
def repaired_sum(sum_over_ranks: Callable[[Tensor], Tensor]) -> checks.Verdict:
    checks.check_cases(
        "3.4", sum_over_ranks, CASES, draw=draw, give=give, run=run, expect=expect, questions=QUESTIONS,
        ask_instead=_about_report, world_sizes=(2, 4, 1),
    )  # fmt: skip
    return checks.Verdict("The sum is correct for any memory layout, and the caller's tensor is left unchanged.")


def _about_report(failure: checks.CheckFailed) -> str | None:
    return _GAPS if "contiguous" in failure.report or "memory layout" in failure.report else None


_GAPS = (
    "Collectives need contiguous tensors. Is the tensor you pass to the all-reduce always contiguous? Note that "
    "`clone()` without arguments preserves the memory layout of the tensor it copies."
)
QUESTIONS = (
    checks.LATE_QUESTION,
    checks.Question(
        lambda d: "out" in d.names and d.kind("out") == OWN_X,
        "You returned this rank's own x instead of the sum. If your code calls an all-reduce, which tensor "
        "receives the sum?",
    ),
    checks.Question(
        lambda d: any(d.kind(name) == "changed" for name in d.names) or "the result has memory of its own" in d.names,
        "Your caller still needs the original x, but your code either changed x or returned a tensor that shares "
        "memory with x. Is the tensor you pass to the all-reduce really a copy? Note that `.contiguous()` doesn't "
        "copy a tensor that's already contiguous.",
    ),
    checks.Question(
        NOT_WRITTEN,
        "Your code overwrites x and then writes the old values back into x. If autograd has saved x for another "
        "gradient, writing into x makes the backward pass fail. Which other tensor could receive the sum?",
    ),
    checks.Question(
        lambda d: bool({"rounded", "dtype"} & d.kinds()),
        "Your code casts x to a different dtype somewhere, which can lose precision. Which line does that?",
    ),
    checks.Question(
        lambda d: d.names == {"traffic"},
        "The sum is correct, but a single all-reduce of x would be enough. What does your code send instead?",
    ),
    checks.Question(
        lambda d: "out" in d.names and not d.malformed,
        "Your result isn't the sum of x across ranks. What does each rank contribute to the sum? How many times is "
        "each contribution counted?",
    ),
)
