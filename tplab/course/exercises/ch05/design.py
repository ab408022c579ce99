"""The check for exercise 5.1, in which the learner writes a sharded MLP with the least traffic.

A token has h elements in x and m elements between the two matmuls. This table shows how many elements per token each
design sends in the forward and backward passes together, if it uses the four operators of chapter 03:

    A by columns, B by rows      2 h          f before A, g after B
    A by columns, B by columns   2 h + 2 m    f, gather; f, gather
    A by rows, B by rows         2 h + 2 m    scatter, g; scatter, g
    A by rows, B by columns      2 h + 2 m    scatter, g; f, gather

The first design is the cheapest for all h and m.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.course import checks
from tplab.runtime import device

DIM = {"column": 1, "row": 0}
Splits = tuple[str, str]

OWN_TERM = "this rank's own term of the sum"
OWN_COLUMNS = "this rank's own columns"
NO_GELU = "what comes out without the GELU"
GELU_OF_TERMS = "what comes out if GELU is applied to each rank's terms"
OWN_DX = "this rank's own term of the gradient"


@dataclass(frozen=True)
class Sizes(checks.Case):
    hidden: int = 8
    ffn: int = 20
    leading: tuple[int, ...] = (5,)

    def describe(self, name: str) -> str:
        return f"h = {self.hidden}, m = {self.ffn}, x with {len(self.leading) + 1} dimensions"


CASES = (Sizes(), Sizes(leading=(2, 3)), Sizes(12, 4), Sizes(4, 8, (2, 1, 3)))


class Problem(NamedTuple):
    x: Tensor  # [.., h]
    a: Tensor  # [h, m]
    b: Tensor  # [m, h]
    dy: Tensor  # [.., h]
    out: Tensor  # [.., h]
    gradients: tuple[Tensor, ...]  # the gradients of x, a and b


def draw(case: Sizes, generator: torch.Generator, size: int) -> Problem:
    random = partial(checks.random_tensor, generator)
    x, dy = random(*case.leading, case.hidden), random(*case.leading, case.hidden)
    a, b = random(case.hidden, case.ffn), random(case.ffn, case.hidden)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
    out = F.gelu(leaves[0] @ leaves[1]) @ leaves[2]
    return Problem(x, a, b, dy, out.detach(), torch.autograd.grad(out, leaves, dy))


def give(splits: Splits, case: Sizes, problem: Problem, place: checks.Place) -> dict[str, Tensor]:
    a, b = (place.part(full, DIM[split]) for full, split in zip((problem.a, problem.b), splits, strict=True))
    return {"x": problem.x, "a": a.contiguous(), "b": b.contiguous(), "dy": problem.dy}


def run(mlp: Callable[..., Any], case: Sizes, given: dict[str, Tensor], group: Any) -> checks.Observed:
    inputs = {name: given[name].to(device()) for name in ("x", "a", "b")}
    return checks.observe(mlp, given["dy"].to(device()), inputs=inputs)


def expect(splits: Splits, case: Sizes, problem: Problem, place: checks.Place) -> checks.Expected:
    dx, da, db = problem.gradients
    right = {
        "out": problem.out,
        "dx": dx,
        "da": place.part(da, DIM[splits[0]]),
        "db": place.part(db, DIM[splits[1]]),
        "forward traffic": place.traffic(("all_reduce", problem.out.numel())),
        "backward traffic": place.traffic(("all_reduce", problem.x.numel())),
    }
    mistakes: dict[str, dict[str, Tensor]] = {"out": {NO_GELU: problem.x @ problem.a @ problem.b}, "dx": {}}
    if place.size > 1:
        x, z = problem.x, F.gelu(problem.x @ problem.a)
        own = place.part(z, -1) @ place.part(problem.b, 0)
        terms = torch.stack([F.gelu(each) for each in _terms(x, problem.a, place.size)]).sum(0)
        mistakes["out"] |= {OWN_TERM: own, GELU_OF_TERMS: terms @ problem.b}
        mistakes["out"][OWN_COLUMNS] = place.part(problem.out, -1)
        mistakes["dx"][OWN_DX] = _own_dx(problem, place)
    return checks.Expected(right, mistakes)


def _terms(x: Tensor, a: Tensor, size: int) -> list[Tensor]:
    return [part @ rows for part, rows in zip(x.chunk(size, -1), a.chunk(size, 0), strict=True)]


def _own_dx(problem: Problem, place: checks.Place) -> Tensor:
    """Return the part of x's gradient that flows through this rank's columns of A and this rank's rows of B."""
    x = problem.x.clone().requires_grad_()
    out = F.gelu(x @ place.part(problem.a, 1)) @ place.part(problem.b, 0)
    (dx,) = torch.autograd.grad(out, x, problem.dy)
    return dx


def chosen(choose: Callable[[], Splits]) -> Splits:
    """Return the learner's splits. The check fails unless each of the two splits is one of the two allowed words."""
    with checks.calling("mlp_splits()"):
        answer = choose()
    if not isinstance(answer, (tuple, list)) or len(answer) != 2 or any(word not in DIM for word in answer):
        checks.fail(
            "5.1",
            f"mlp_splits() returned {answer!r}.",
            '`mlp_splits` should return two strings, one for A and one for B. Each string is either "column" or "row". '
            "What does your function return?",
        )
    return answer[0], answer[1]


@checks.exercise("5.1", "Split an MLP with the least traffic")
def cheapest_mlp(mlp_splits: Callable[[], Splits], sharded_mlp: Callable[..., Any]) -> checks.Verdict:
    splits = chosen(mlp_splits)
    checks.check_cases(
        "5.1", sharded_mlp, CASES, draw=draw, give=partial(give, splits), run=run, expect=partial(expect, splits),
        questions=[*QUESTIONS, TOO_MUCH if splits == ("column", "row") else OTHER_SPLITS], crash=CRASH,
        world_sizes=(2, 4, 1),
    )  # fmt: skip
    return checks.Verdict(
        "Your MLP sends one message in the forward pass and one in the backward pass, and each message is the size of "
        "x. No other design needs fewer bytes."
    )


def only_traffic(differences: checks.Differences) -> bool:
    return bool(differences.names) and differences.names <= {"forward traffic", "backward traffic"}


CRASH = (
    "Next to each line of your code, write down the tensor shapes on one rank. If you split A by columns, the "
    "shard `a` has the shape [h, m/p], and if you split A by rows, it has the shape [h/p, m]. If you split "
    "B by columns, the shard `b` has the shape [m, h/p], and if you split B by rows, it has the shape "
    "[m/p, h]. Which two shapes in your code don't match?"
)
TOO_MUCH = checks.Question(
    only_traffic,
    "Your MLP is correct, but it sends more bytes than necessary. Which operator in your code undoes what another "
    "operator did?",
)
OTHER_SPLITS = checks.Question(
    only_traffic,
    "Your MLP is correct, but the way you split the weights causes far more traffic than necessary. If you split A by "
    "columns, each rank has some columns of X A after the first matmul. If you split A by rows, each rank has only a "
    "partial sum of X A. Which of these two splits lets a rank apply GELU right away?",
)
QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        checks.has_kind("out", NO_GELU),
        "Without the GELU, two matmuls in a row collapse into a single matmul. Where does the GELU go?",
    ),
    checks.Question(
        checks.has_kind("out", GELU_OF_TERMS),
        "You applied GELU to the terms of a sum, but the GELU of a sum isn't the sum of the GELUs. What has to happen "
        "before you apply GELU?",
    ),
    checks.Question(
        checks.has_kind("out", OWN_TERM),
        "Each rank returns only its own partial sum, but Y is the total over all ranks. Which operator computes the "
        "total?",
    ),
    checks.Question(
        checks.has_kind("out", OWN_COLUMNS, "part"),
        "Each rank returns only its own columns of Y, but it should return all of Y. Which operator collects "
        "the columns from all ranks?",
    ),
    checks.Question(
        checks.has_no_gradient("da", "db", "dx"),
        "A gradient is missing, so one line of your code must be invisible to autograd. Which line is it? (Autograd "
        "can follow the four operators, but not calls to `dist` or `.detach()`.)",
    ),
    checks.Question(
        lambda d: "out" not in d.names and checks.has_kind("dx", OWN_DX)(d),
        "The output is correct, but each rank has only its own contribution to the gradient of x. Which operator sums "
        "gradients across ranks in the backward pass?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and checks.has_kind("dx", "partly zero", "part")(d),
        "The output is correct, but each rank has only the gradient of its own slice of x. Which operator takes a "
        "slice in the forward pass and gathers the gradient in the backward pass?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and bool({"p times"} & d.kinds()),
        "The output is correct, but one of the gradients is p times too large. Which operator sums gradients that "
        "are already complete on every rank?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and bool({"dx", "da", "db"} & d.names),
        "The output is correct, but one of the gradients isn't. Follow the gradient backward from Y. Before and after "
        "each operator, does each rank hold the full gradient, a slice of the gradient, or only a contribution to the "
        "gradient?",
    ),
)
