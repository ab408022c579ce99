"""The checks of exercises S.1 and S.2, which split the matmul Y = X A by the rows or by the columns of A.

Both checks run the answer on 1, 2 and 4 ranks and compare it with X @ A in a single process. An answer may call one
collective, with a message as large as Y.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.course.checks.cases import Case, random_tensor
from tplab.course.checks.observation import Observed, Snapshot
from tplab.course.checks.recorded_traffic import traffic
from tplab.course.checks.trials import OnRanks, exercise
from tplab.runtime import device, record

IN, OUT = 8, 12  # divisible by every p, and different, so that the check notices if they're mixed up


@dataclass(frozen=True)
class Input(Case):
    leading: tuple[int, ...] = (5,)  # all dimensions of x except the last

    def describe(self, name: str) -> str:
        return f"x with {len(self.leading) + 1} dimensions"


class Problem(NamedTuple):
    x: Tensor  # [..., IN]
    a: Tensor  # [IN, OUT]

    def shards(self, size: int, dim_of_x: int | None, dim_of_a: int) -> list["Problem"]:
        """Return the x and the A of each of `size` ranks. If `dim_of_x` is None, every rank has the full x."""
        xs = [self.x] * size if dim_of_x is None else self.x.chunk(size, dim_of_x)
        return [Problem(x.contiguous(), a.contiguous()) for x, a in zip(xs, self.a.chunk(size, dim_of_a), strict=True)]


def draw(case: Input, generator: torch.Generator, size: int) -> Problem:
    return Problem(random_tensor(generator, *case.leading, IN), random_tensor(generator, IN, OUT))


def run(product: Callable[[Tensor, Tensor], Tensor], case: Input, given: Problem, group: Any) -> Observed:
    x, a = (tensor.to(device()) for tensor in given)
    before = Snapshot(**{"the first argument": x, "the second argument": a})
    with record() as section:
        out = product(x, a)
    return {"out": out, "traffic": traffic(section), "inputs unchanged": before.changed()}


def split(dim_of_x: int | None, dim_of_a: int, collective: str) -> OnRanks:
    """Return the trial of a matmul that's split along these dimensions, and whose results a collective combines."""

    def right(case: Input, problem: Problem, place: Any) -> Observed:
        y = problem.x @ problem.a
        return {"out": y, "traffic": place.traffic((collective, y.numel()))}

    return OnRanks(
        cases=(Input(), Input((2, 3))), draw=draw, run=run, right=right,
        give=lambda case, problem, place: problem.shards(place.size, dim_of_x, dim_of_a)[place.index],
        terms=lambda case, problem, size: {"result": [x @ a for x, a in problem.shards(size, dim_of_x, dim_of_a)]},
        world_sizes=(2, 4, 1),  # two ranks come first, as they reveal the most about a mistake
    )  # fmt: skip


exercise(
    "S.1", "A matmul split by rows", takes=["row_product"], trials=[split(-1, 0, "all_reduce")],
    passed="Your code needs just one collective, an all-reduce of a tensor the size of Y. It doesn't send any weights.",
)  # fmt: skip
exercise(
    "S.2", "A matmul split by columns", takes=["column_product"], trials=[split(None, 1, "all_gather")],
    passed="Your code needs just one collective, an all-gather of the columns of Y. It doesn't send any weights.",
)  # fmt: skip
