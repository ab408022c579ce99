"""The checks of chapter 04: parallel layers (4.1, 4.2), shards (4.3), initial values (4.4) and checkpoints (4.5)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tplab.course.checks import GROUPS
from tplab.course.checks.forms.layers import Built, Layer, Problem, Weight
from tplab.course.checks.trials import exercise
from tplab.tensor.sharding import Sharding

# 4.1 and 4.2: two parallel layers

IN, OUT = 12, 8  # divisible by every p, and different, so that the check notices if an answer mixes them up
FIRST, LAST = Sharding(0), Sharding(-1)


def linear(case: Built, x: Tensor, w: Mapping[str, Tensor]) -> Any:
    """Return the output of a linear layer, or with skip_bias_add the output without the bias, and the bias."""
    bias = w.get("b")
    return (F.linear(x, w["W"]), bias) if case.options.get("skip_bias_add") else F.linear(x, w["W"], bias)


def outputs(case: Built, split: Sharding | None, bias_split: Sharding | None) -> list[Sharding | None]:
    return [split, bias_split] if case.options.get("skip_bias_add") else [split]


def cases(name: str, value: bool) -> list[Built]:
    """Return the cases of a layer that has the option `name`, whose default isn't this value."""
    return [
        Built(),
        Built(leading=(2, 3), transposed=True),
        Built(leading=(2, 3), options={name: value}),
        Built(bias=False),
        Built(zero_bias=True, options={"stride": 2}),
        Built(leading=(2, 3), options={"skip_bias_add": True}),
        Built(bias=False, options={"skip_bias_add": True}),
        Built(leading=(2, 3), options={name: value, "skip_bias_add": True}),
        Built(options={name: value}, groups=GROUPS),
    ]


def gathered(case: Built) -> bool:
    return bool(case.options.get("gather_output"))


def terms_of_dx(case: Built, problem: Problem, size: int) -> dict[str, list[Tensor]]:
    assert problem.upstream[0] is not None
    pairs = zip(problem.upstream[0].chunk(size, -1), problem.weights["weight"].chunk(size), strict=True)
    return {"term of dx": [dy @ weight for dy, weight in pairs]}


COLUMN = Layer(
    of="ColumnParallelLinear", sizes=(IN, OUT), width=IN, formula=linear,
    weights={"weight": Weight("W", (OUT, IN), FIRST), "bias": Weight("b", (OUT,), FIRST)},
    out_split=lambda case: outputs(case, None if gathered(case) else LAST, FIRST),
    forward_traffic=lambda case, x, out: [("all_gather", out.numel())] * gathered(case),
    backward_traffic=lambda case, x, out: [("all_reduce", x.numel())],
    terms=terms_of_dx,
)  # fmt: skip

exercise(
    "4.1", "ColumnParallelLinear", takes=["ColumnParallelLinear"],
    trials=COLUMN.trials(cases("gather_output", True), refused=(IN, OUT + 1), accepted=(IN + 1, OUT)),
    passed="Each rank holds out/p of the output features. The backward pass needs one all-reduce, and the forward pass "
    "doesn't communicate at all unless you gather the output.",
)  # fmt: skip


def sliced(case: Built) -> bool:
    """Return whether each rank receives only its slice of x."""
    return bool(case.options.get("input_is_parallel", True))


def partial_sums(case: Built, problem: Problem, size: int) -> dict[str, list[Tensor]]:
    pairs = zip(problem.x.chunk(size, -1), problem.weights["weight"].chunk(size, 1), strict=True)
    return {"partial sum": [x @ weight.T for x, weight in pairs]}


ROW = Layer(
    of="RowParallelLinear", sizes=(IN, OUT), width=IN, formula=linear,
    weights={"weight": Weight("W", (OUT, IN), Sharding(1)), "bias": Weight("b", (OUT,))},
    x_split=lambda case: LAST if sliced(case) else None,
    out_split=lambda case: outputs(case, None, None),
    forward_traffic=lambda case, x, out: [("all_reduce", out.numel())],
    backward_traffic=lambda case, x, out: [("all_gather", x.numel())] * (not sliced(case)),
    terms=partial_sums,
)  # fmt: skip

exercise(
    "4.2", "RowParallelLinear", takes=["RowParallelLinear"],
    trials=ROW.trials(cases("input_is_parallel", False), refused=(IN + 1, OUT), accepted=(IN, OUT + 1)),
    passed="Each rank holds in/p of the input features. The forward pass needs one all-reduce, and the bias is added "
    "only once, after that all-reduce.",
)  # fmt: skip
