"""The checks of exercises 12.2, gather and reduce-scatter, and 12.4, a row-parallel matmul to fix."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.course.checks.cases import Case, Place, random_tensor
from tplab.course.checks.forms.operators import ADD_AND_SPLIT, GATHER, Input, operator
from tplab.course.checks.observation import Observed, observe
from tplab.course.checks.trials import OnRanks, exercise
from tplab.runtime import device

# 12.2: gather and reduce-scatter, along dimension 1

INPUTS = (
    Input("x with 3 dimensions", (3, 8, 2)),
    Input("x with 4 dimensions", (2, 8, 3, 2)),
    Input("x with a single sequence", (1, 8, 2)),
    Input("x with 2 dimensions", (3, 8)),
    Input("x after exp, whose output autograd has saved", (3, 8, 2), exp=True),
    Input("x, transposed in memory, like the gradient", (3, 8, 2), spread=True),
    Input("x, which is every other column of a larger tensor, like the gradient", (3, 8), spread=True),
    Input("x, with the gradient of .sum(), which has strides of 0", (3, 8, 2), expanded=True),
    Input("x, used twice, in y(x) + 2 y(x)", (3, 8, 2), twice=True),
)

exercise(
    "12.2", "Gather and reduce-scatter", takes=["GatherFromSequence", "ReduceScatterToSequence"],
    trials=[
        operator("gather", GATHER, ADD_AND_SPLIT, of="GatherFromSequence", part="gather", dim=1, cases=INPUTS),
        operator(
            "reduce-scatter", ADD_AND_SPLIT, GATHER, of="ReduceScatterToSequence", part="reduce-scatter", dim=1,
            cases=INPUTS,
        ),
    ],
    passed="Both operators send something in both passes. In a ring, the two of them together send exactly as much as "
    "an all-reduce.",
)  # fmt: skip

# 12.4: a row-parallel matmul, whose backward pass gathered too late


@dataclass(frozen=True)
class Sizes(Case):
    leading: tuple[int, int] = (2, 8)  # b, s
    inner: int = 8
    out: int = 3

    def describe(self, name: str) -> str:
        return f"b = {self.leading[0]}, s = {self.leading[1]}, {self.inner} columns of x and {self.out} of the output"


class Matmul(NamedTuple):
    x: Tensor  # [b, s, i]
    weight: Tensor  # [o, i]
    dy: Tensor  # [b, s, o]


def draw_matmul(case: Sizes, generator: torch.Generator, size: int) -> Matmul:
    shapes = (*case.leading, case.inner), (case.out, case.inner), (*case.leading, case.out)
    return Matmul(*(random_tensor(generator, *shape) for shape in shapes))


def give_matmul(case: Sizes, full: Matmul, place: Place) -> Matmul:
    return Matmul(place.part(full.x, -1), place.part(full.weight, -1), place.part(full.dy, 1))


def run_matmul(answer: Any, case: Sizes, given: Matmul, group: Any) -> Observed:
    x, weight, dy = (tensor.contiguous().to(device()) for tensor in given)
    return observe(answer.apply, dy, inputs={"x": x, "weight": weight})


def right_matmul(case: Sizes, full: Matmul, place: Place) -> Observed:
    sent = full.dy.numel()
    return {
        "out": place.part(full.x @ full.weight.T, 1),
        "dx": place.part(full.dy @ full.weight, -1),
        "dweight": place.part(full.dy.flatten(0, 1).T @ full.x.flatten(0, 1), -1),
        "forward traffic": place.traffic(("reduce_scatter", sent)),
        "backward traffic": place.traffic(("all_gather", sent)),
    }


exercise(
    "12.4", "Gathered too late", takes=["RowParallelMatmul"],
    trials=[
        OnRanks(
            of="RowParallelMatmul", cases=(Sizes(), Sizes((1, 4), 4, 6), Sizes((3, 8), 12, 2)), draw=draw_matmul,
            give=give_matmul, run=run_matmul, right=right_matmul, world_sizes=(4, 2, 1), layouts_differ=True,
        )
    ],
    passed="Both gradients are those of a single process, and a single message serves both matmuls.",
)  # fmt: skip
