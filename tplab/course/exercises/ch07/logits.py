"""The check for exercise 7.4, which tests split and gathered logits from a table that is sharded by rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.course import checks
from tplab.course.exercises.ch07.tables import HIDDEN, VOCAB, padded, part, random_table, rows_per_rank
from tplab.runtime import device

FEW = 5  # fewer than the rows on any rank
PARTIAL = "this rank's part of dx, through its own columns of the logits"


@dataclass(frozen=True)
class Call(checks.Case):
    """One call to parallel_logits. With `cut`, it gets vocab_size, which removes the padding if `gather` is set."""

    gather: bool = False
    cut: bool = False
    leading: tuple[int, ...] = (2, 5)
    transposed: bool = False

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"gather": True} if self.gather else {}
        return options | ({"vocab_size": VOCAB if self.gather else FEW} if self.cut else {})

    def describe(self, name: str) -> str:
        options = [f"{option}={value}" for option, value in self.options.items()] + ["group=group"] * bool(self.groups)
        return f"parallel_logits({', '.join(['x', 'weight', *options])})" + " with a non-contiguous x" * self.transposed


CASES = (
    Call(),
    Call(leading=(3,), transposed=True),
    Call(cut=True),
    Call(gather=True, cut=True),
    Call(gather=True),
    Call(groups=checks.GROUPS),
    Call(gather=True, cut=True, groups=checks.GROUPS),
)


class Problem(NamedTuple):
    table: Tensor  # [v, h], padded
    x: Tensor  # [..., h]
    dlogits: Tensor  # [..., v], the gradient of every column


def columns(case: Call, problem: Problem, place: checks.Place) -> tuple[slice, slice]:
    """Return which columns of the logits this rank computes, and which ones it returns."""
    count = len(problem.table) // place.size
    own = slice(place.index * count, (place.index + 1) * count)
    return own, slice(VOCAB if case.cut else None) if case.gather else own


def draw(case: Call, generator: torch.Generator, size: int) -> Problem:
    x = checks.random_tensor(generator, HIDDEN, *case.leading).movedim(0, -1)
    dlogits = checks.random_tensor(generator, *case.leading, size * rows_per_rank(size))
    if case.cut and case.gather:
        dlogits[..., VOCAB:] = 0
    return Problem(padded(random_table(generator), size), x if case.transposed else x.contiguous(), dlogits)


def give(case: Call, problem: Problem, place: checks.Place) -> dict[str, Tensor]:
    weight = part(problem.table[:VOCAB], place.index, place.size)
    return {"x": problem.x, "weight": weight, "dy": problem.dlogits[..., columns(case, problem, place)[1]]}


def run(function: Callable[..., Any], case: Call, given: dict[str, Tensor], group: Any) -> checks.Observed:
    options = case.options | ({"group": group} if case.groups else {})
    inputs = {"x": given["x"].to(device()), "weight": given["weight"].to(device())}
    return checks.observe(lambda x, weight: function(x, weight, **options), given["dy"].to(device()), inputs=inputs)


def expect(case: Call, problem: Problem, place: checks.Place) -> checks.Expected:
    table, x, dlogits = problem
    own, returned = columns(case, problem, place)
    logits = x @ table.T
    right = {
        "out": logits[..., returned],
        "dx": dlogits @ table,
        "dweight": dlogits[..., own].flatten(0, -2).T @ x.flatten(0, -2),
        "forward traffic": place.traffic(*[("all_gather", logits.numel())] * case.gather),
        "backward traffic": place.traffic(("all_reduce", x.numel())),
    }
    return checks.Expected(right, {"dx": {PARTIAL: dlogits[..., own] @ table[own]} if place.size > 1 else {}})


@checks.exercise("7.4", "Parallel logits")
def parallel_logits(function: Callable[..., Any]) -> checks.Verdict:
    checks.check_cases(
        "7.4", function, CASES, draw=draw, give=give, run=run, expect=expect, questions=questions, crash=CRASH,
        whose_group=WHOSE_GROUP,
    )  # fmt: skip
    return checks.Verdict(
        "Split, the logits cost nothing forward and b·s·h backward; only the gather sends b·s·v numbers."
    )


WHOSE_GROUP = "Which of the operators was not given `group`, and works in the default group of all ranks?"
CRASH = (
    "x is [..., h] and this rank's rows are [v/p, h]. Which of their dimensions meet in the product, and what is left?"
)


def questions(case: Call, observed: Sequence[checks.Observed]) -> tuple[checks.Question, ...]:
    shape = (
        "Each rank's logits are [..., v/p], those of all its rows, also of the padding. Only with gather they are put "
        "side by side, and what lies behind `vocab_size` is dropped. Which of these shapes do you return here?"
    )
    return (
        checks.INPUTS_QUESTION,
        checks.Question(
            checks.has_kind("out", "none", "type", "structure"),
            "What does the last line return? One tensor, [..., v/p] or, gathered, [..., v].",
        ),
        checks.Question(checks.has_kind("out", "shape", "whole", "part"), shape),
        checks.Question(checks.has_kind("out", "zeros"), "All logits are zeros. Which line makes them, and of what?"),
        checks.Question(
            lambda d: "dx" in d.names and checks.has_kind("dx", PARTIAL)(d),
            "dx is only the part that comes through this rank's columns; the other ranks hold the rest. Which operator "
            "of chapter 03 stands where a replicated x meets sharded columns?",
        ),
        checks.Question(
            checks.has_kind("dx", "p times"),
            "dx is summed over the ranks more than once. f is needed once; does a gather of yours, or a second f, add "
            "up as well?",
        ),
        checks.Question(
            checks.has_no_gradient("dx", "dweight"),
            "No gradient arrives. `dist.all_gather` writes into tensors that autograd knows nothing of; which operator "
            "of chapter 03 does the same with a backward pass? And is `weight` used as it is, not a detached copy?",
        ),
        checks.Question(
            lambda d: {"dx", "dweight"} <= d.names and "out" not in d.names and checks.has_kind("dx", "value")(d),
            "The output is right, both gradients are not: what comes back to the product is no longer this rank's own "
            "part of dlogits. Does an operator stand behind the product that sums it? f belongs to x.",
        ),
        checks.Question(
            lambda d: bool(d.names) and d.names <= {"forward traffic", "backward traffic"},
            "The numbers are right, the communication is not: forward nothing, or with gather one all-gather; backward "
            "one all-reduce of dx. Which call sends more?",
        ),
        checks.Question(
            lambda d: "out" in d.names,
            "A token's logit is the product of x with that token's row, nothing else. "
            + ("And in which order do the ranks' parts stand?" if case.gather else "Which rows does this rank have?"),
        ),
    )
