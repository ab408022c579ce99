"""The check of an operator that is a single autograd function, with a forward and a backward pass.

Each operator runs alone, on 2, 4 and 1 ranks. Every rank has a different x and a different upstream gradient, even
where the exercise's docstring says that they are replicated, so that a wrong sum, a wrong slice or an unnecessary
broadcast can't go unnoticed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from tplab.course.checks.cases import Case, Place, random_tensor
from tplab.course.checks.layouts import spread_out
from tplab.course.checks.observation import Observed, observe
from tplab.course.checks.trials import OnRanks
from tplab.runtime import device


class Half(NamedTuple):
    """The forward or backward pass of an operator.

    right:      computes the correct result on one rank, given the tensors of all ranks, the index of that rank, and the
                dimension along which the operator works
    collective: the collective that this pass calls, or "" for none. Its message is as large as the full tensor
    """

    right: Callable[[Sequence[Tensor], int, int], Tensor]
    collective: str = ""


COPY = Half(lambda tensors, rank, dim: tensors[rank])
ADD = Half(lambda tensors, rank, dim: total(tensors), "all_reduce")
SPLIT = Half(lambda tensors, rank, dim: tensors[rank].chunk(len(tensors), dim)[rank])
GATHER = Half(lambda tensors, rank, dim: torch.cat(list(tensors), dim), "all_gather")
ADD_AND_SPLIT = Half(lambda tensors, rank, dim: total(tensors).chunk(len(tensors), dim)[rank], "reduce_scatter")


def total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


@dataclass(frozen=True)
class Input(Case):
    """The input of one call of an operator.

    shape:    the shape of the full tensor. Along the operator's dimension, it has to be divisible by 4
    spread:   whether x and the upstream gradient aren't contiguous (see `layouts.spread_out`)
    expanded: whether the upstream gradient is the expanded gradient of out.sum()
    zero:     whether the upstream gradient is zero on rank 0
    twice:    whether x goes through the operator twice, so that out is one result plus two times the other
    exp:      whether x is the output of exp, which autograd has saved
    """

    note: str
    shape: tuple[int, ...] = (5, 8)
    spread: bool = False
    expanded: bool = False
    exp: bool = False
    zero: bool = False
    twice: bool = False

    def describe(self, name: str) -> str:
        return self.note


CASES = (
    Input("x with 2 dimensions"),
    Input("x with 3 dimensions", (2, 3, 8)),
    Input("x with 1 dimension", (8,)),
    Input("x after exp, whose output autograd has saved", exp=True),
    Input("x, transposed in memory, like the gradient", (2, 3, 8), spread=True),
    Input("x, which is every other column of a larger tensor, like the gradient", spread=True),
    Input("x, with the gradient of .sum(), which has strides of 0", (2, 3, 8), expanded=True),
    Input("x, with a gradient that's zero on rank 0", zero=True),
    Input("x, used twice, in y(x) + 2 y(x)", twice=True),
)
SCALAR = Input("x, which is a scalar", ())  # for operators that don't work along a dimension


class Problem(NamedTuple):
    """Each rank's x and upstream gradient."""

    xs: list[Tensor]
    upstream: list[Tensor]


def operator(
    name: str, forward: Half, backward: Half, *, of: str, part: str = "", dim: int = -1, cases: Sequence[Input] = CASES
) -> OnRanks:
    """Return the trial of an operator, which has to be a subclass of `torch.autograd.Function`.

    name:  what the exercise calls the operator, for headlines
    of:    the name of the answer
    dim:   the dimension along which the operator splits or gathers
    """
    anywhere = {forward, backward} <= {COPY, ADD}
    tried = [replace(case, note=f"{name} of {case.note}") for case in (*cases, *[SCALAR] * anywhere)]
    return OnRanks(
        of=of, part=part, cases=tried,
        draw=partial(draw, forward == GATHER, forward in (SPLIT, ADD_AND_SPLIT), dim), run=run,
        give=lambda case, problem, place: (problem.xs[place.index], problem.upstream[place.index]),
        right=partial(right, forward, backward, dim), terms=terms,
        world_sizes=(2, 4, 1),  # two ranks come first, as they reveal the most about a mistake
        layouts_differ=True,
    )  # fmt: skip


def draw(x_is_split: bool, out_is_split: bool, dim: int, case: Input, generator: torch.Generator, size: int) -> Problem:
    def tensors(split: bool) -> list[Tensor]:
        shape = list(case.shape)
        if split:
            shape[dim] //= size
        return [random_tensor(generator, *shape, 1)[..., 0] for _ in range(size)]

    xs, upstream = tensors(x_is_split), tensors(out_is_split)
    if case.zero:
        upstream[0].zero_()
    return Problem(xs, [torch.ones_like(gradient) for gradient in upstream] if case.expanded else upstream)


def run(answer: Any, case: Input, given: tuple[Tensor, Tensor], group: Any) -> Observed:
    x, upstream = (spread_out(tensor) if case.spread else tensor for tensor in (each.to(device()) for each in given))
    if not (isinstance(answer, type) and issubclass(answer, Function)):
        raise TypeError("your answer isn't a subclass of torch.autograd.Function: keep the line `class ...(Function):`")

    def apply(x: Tensor) -> Any:
        x = x.exp() if case.exp else x
        return answer.apply(x) + 2 * answer.apply(x) if case.twice else answer.apply(x)

    return observe(apply, None if case.expanded else upstream, inputs={"x": x}, any_size=-1)


def right(forward: Half, backward: Half, dim: int, case: Input, problem: Problem, place: Place) -> Observed:
    rank, upstream = place.index, problem.upstream
    xs = [x.exp() if case.exp else x for x in problem.xs]
    size = max(xs[0].numel(), upstream[0].numel())
    times, calls = (3, 2) if case.twice else (1, 1)
    sent = [[(half.collective, size)] * (calls if half.collective else 0) for half in (forward, backward)]
    return {
        "out": times * forward.right(xs, rank, dim),
        "forward traffic": place.traffic(*sent[0]),
        "dx": times * backward.right(upstream, rank, dim) * (xs[rank] if case.exp else 1),
        "backward traffic": place.traffic(*sent[1]),
    }


def terms(case: Input, problem: Problem, size: int) -> dict[str, list[Tensor]]:
    return {} if case.exp or case.twice or case.zero else {"x": problem.xs, "upstream gradient": problem.upstream}
