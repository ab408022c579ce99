"""The check for exercise 5.1: an MLP on shards of its two weights, right in both directions, with the least traffic.

With the four operators of chapter 03, h elements per token in x and m in the middle, the designs send

    A by columns, B by rows      2 h          f before A, g after B
    A by columns, B by columns   2 h + 2 m    f, gather; f, gather
    A by rows, B by rows         2 h + 2 m    scatter, g; scatter, g
    A by rows, B by columns      2 h + 2 m    scatter, g; f, gather

elements per token in their messages, forward and backward together. No sizes make any of the others cheaper.
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
    gradients: tuple[Tensor, ...]  # of x, a and b


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
    """Return the gradient of x through this rank's columns of A and rows of B alone."""
    x = problem.x.clone().requires_grad_()
    out = F.gelu(x @ place.part(problem.a, 1)) @ place.part(problem.b, 0)
    (dx,) = torch.autograd.grad(out, x, problem.dy)
    return dx


def chosen(choose: Callable[[], Splits]) -> Splits:
    """Return the learner's splits. Fails the check if they aren't two of the two words."""
    with checks.calling("mlp_splits()"):
        answer = choose()
    if not isinstance(answer, (tuple, list)) or len(answer) != 2 or any(word not in DIM for word in answer):
        checks.fail(
            "5.1",
            f"mlp_splits() returned {answer!r}.",
            'It should return two words, one for A and one for B, each "column" or "row". What does yours return?',
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
        "It takes two messages of the size of x, one forward and one backward. It doesn't get any cheaper than that."
    )


def only_traffic(differences: checks.Differences) -> bool:
    return bool(differences.names) and differences.names <= {"forward traffic", "backward traffic"}


CRASH = (
    "Write the shapes next to your lines, for the splits that you've chosen. By columns, a is [h, m/p], and by rows, "
    "it's [h/p, m]. Likewise, b is [m, h/p] or [m/p, h]. Which two tensors don't fit together?"
)
TOO_MUCH = checks.Question(
    only_traffic,
    "Your MLP is right, but it sends more than it has to. Which of your operators undoes what another one did?",
)
OTHER_SPLITS = checks.Question(
    only_traffic,
    "Your MLP is right, but other splits get by with far less traffic. After the first matmul, what does a rank have "
    "with a column split of A, and what with a row split? To which of these may it apply GELU right away?",
)
QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        checks.has_kind("out", NO_GELU),
        "Without the GELU, two matmuls in a row are just one matmul. Where does it belong?",
    ),
    checks.Question(
        checks.has_kind("out", GELU_OF_TERMS),
        "You applied GELU to the terms of a sum, and the GELU of a sum isn't the sum of the GELUs. What has to happen "
        "before it?",
    ),
    checks.Question(
        checks.has_kind("out", OWN_TERM),
        "Every rank returns its own term of the sum, but Y is the sum of them all. Which operator adds them up?",
    ),
    checks.Question(
        checks.has_kind("out", OWN_COLUMNS, "part"),
        "Every rank returns just its own columns of Y, but it should return all of them. Which operator collects them?",
    ),
    checks.Question(
        checks.has_no_gradient("da", "db", "dx"),
        "A gradient is missing. Which line is invisible to autograd? (The four operators aren't, but calls to `dist` "
        "and `.detach()` are.)",
    ),
    checks.Question(
        lambda d: "out" not in d.names and checks.has_kind("dx", OWN_DX)(d),
        "The output is right, but each rank's gradient of x is only its own term of a sum. Which operator adds up "
        "gradients in the backward pass?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and checks.has_kind("dx", "partly zero", "part")(d),
        "The output is right, but each rank only has the gradient of its own slice of x. What's the backward of taking "
        "a slice, and which operator knows that?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and bool({"p times"} & d.kinds()),
        "The output is right, but a gradient is p times too large. Which operator adds up gradients that are already "
        "complete and equal on every rank?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and bool({"dx", "da", "db"} & d.names),
        "The output is right, but a gradient isn't. Go backward from Y. Before and after each operator, "
        "does every rank have the full gradient, a slice of it, or one term of a sum?",
    ),
)
