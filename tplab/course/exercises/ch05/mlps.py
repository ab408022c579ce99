"""The checks of exercises 5.2, ParallelMLP, and 5.4, a gated MLP."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from tplab.course.checks.cases import GROUPS, Case, Place
from tplab.course.checks.describe import describe
from tplab.course.checks.forms.layers import PART, Built, Layer, Problem, Weight
from tplab.course.checks.forms.statements import Statement, statements
from tplab.course.checks.observation import Claim, NotRun, Observed
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.tensor.sharding import Sharding

HIDDEN, FFN = 6, 20  # the inner size isn't a multiple of the outer one
NARROW = 4  # an inner size that's smaller than the outer one
DEFAULT = "without ffn_hidden_size, the inner size is 4 times hidden_size"
KEPT = "an inner size that's smaller than hidden_size is used as it is"
FLOAT32 = "without dtype, the parameters are float32"
INTEGERS = "fused_rows returns a list of integers"

CASES = [
    Built(),
    Built(leading=(2, 3)),
    Built(leading=(2, 3), bias=False),
    Built(leading=(2, 1, 3)),
    Built(groups=GROUPS),
]


def mlp(of: str, blocks: int, activation: Callable[[Tensor], Tensor]) -> Layer:
    """Return an MLP whose first weight consists of this many blocks."""
    inner = Sharding(0, blocks)

    def formula(case: Built, x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
        return linear(activation(linear(x, w["A"], w.get("a"))), w["B"], w.get("c"))

    def partial_sums(case: Built, problem: Problem, size: int) -> dict[str, list[Tensor]]:
        def own(index: int) -> Tensor:
            place = Place(index, tuple(range(size)), size)
            shards = {
                weight.letter: place.part(value, weight.split.dim, weight.split.stride) if weight.split else value
                for value, weight in ((problem.weights[name], weight) for name, weight in layer.present(case).items())
            }
            return formula(case, problem.x, shards)

        return {"partial sum plus the bias" if case.bias else "partial sum": [own(index) for index in range(size)]}

    layer = Layer(
        of=of, sizes=(HIDDEN, FFN), odd=(HIDDEN - 1, FFN), width=HIDDEN, formula=formula, composed=True,
        terms=partial_sums,
        weights={
            "up.weight": Weight("A", (blocks * FFN, HIDDEN), inner), "up.bias": Weight("a", (blocks * FFN,), inner),
            "down.weight": Weight("B", (HIDDEN, FFN), Sharding(1)), "down.bias": Weight("c", (HIDDEN,)),
        },
        forward_traffic=lambda case, x, out: [("all_reduce", out.numel())],
        backward_traffic=lambda case, x, out: [("all_reduce", x.numel())],
    )  # fmt: skip
    return layer


def has_inner(size: int, mlp_class: Any, *given: int) -> str:
    """Return "" if an MLP that's built with these inner sizes, or with none, has this inner size."""
    found = mlp_class(HIDDEN, *given).down.weight.shape[1] * dist.get_world_size()
    return "" if found == size else f"for hidden_size = {HIDDEN}, the inner size is {found}"


def is_float32(mlp_class: Any) -> str:
    """Return "" if an MLP without a dtype is float32, even after one in float64."""
    mlp_class(HIDDEN, FFN, dtype=torch.float64)
    dtypes = {str(param.dtype).removeprefix("torch.") for param in mlp_class(HIDDEN, FFN).parameters()}
    return "" if dtypes == {"float32"} else f"after an MLP in float64, they are {' and '.join(sorted(dtypes))}"


exercise(
    "5.2", "ParallelMLP", takes=["ParallelMLP"],
    trials=[
        *mlp("ParallelMLP", 1, gelu).trials(CASES, refused=(HIDDEN, FFN + 1)),
        statements(
            Statement(DEFAULT, partial(has_inner, 4 * HIDDEN), f"ParallelMLP({HIDDEN})"),
            Statement(KEPT, lambda mlp_class: has_inner(NARROW, mlp_class, NARROW), f"ParallelMLP({HIDDEN}, {NARROW})"),
            Statement(FLOAT32, is_float32, f"ParallelMLP({HIDDEN}, {FFN})"),
            of="ParallelMLP", part=PART,
        ),
    ],
    passed="Your MLP runs one all-reduce in the forward pass and one in the backward pass. Nothing is sent between the "
    "two layers.",
)  # fmt: skip


# 5.4: the rows of a fused weight, and a gated MLP


@dataclass(frozen=True)
class Fused(Case):
    """A fused weight with 2 * ffn rows."""

    ffn: int

    def describe(self, name: str) -> str:
        return f"m = {self.ffn}"


def run_rows(answer: Callable[..., Any], case: Fused, given: None, group: Any) -> Observed:
    rows = answer(dist.get_rank(), dist.get_world_size(), case.ffn)
    if not isinstance(rows, (list, tuple, range)) or not all(isinstance(row, int) for row in rows):
        return {INTEGERS: Claim(f"it returned {describe(rows)}"), "rows": NotRun("there's no list of integers")}
    return {"rows": list(rows)}


def right_rows(case: Fused, given: None, place: Place) -> Observed:
    gate, up = torch.arange(2 * case.ffn).chunk(2)
    return {"rows": [*place.part(gate).tolist(), *place.part(up).tolist()]}


def swiglu(inner: Tensor) -> Tensor:
    gate, value = inner.chunk(2, dim=-1)
    return silu(gate) * value


exercise(
    "5.4", "Fix a gated MLP", takes=["fused_rows", "ParallelSwiGLU"],
    trials=[
        OnRanks(
            of="fused_rows", part="rows", cases=(Fused(8), Fused(4), Fused(12)), run=run_rows, right=right_rows,
            world_sizes=(2, 4, 1), without=tuple(Twin), values_on_cpu=True,
        ),
        *mlp("ParallelSwiGLU", 2, swiglu).trials(CASES, refused=(HIDDEN, FFN + 1)),
    ],
    passed="Each rank holds the rows you listed. The fused layer calls f just once, so your gated MLP runs the same "
    "two all-reduces as an MLP without a gate.",
)  # fmt: skip
