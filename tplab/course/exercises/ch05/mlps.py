"""The checks of exercises 5.2, ParallelMLP, and 5.4, a gated MLP.

Each MLP loads its shards from a full checkpoint, according to the sharding that its own parameters declare, and is
compared with the formula in a single process.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from tplab.course.checks import GROUPS, Case, Claim, NotRun, Observed, Place, Twin, observe, random_tensor
from tplab.course.checks.trials import OnRanks, exercise
from tplab.runtime import device
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.sharding import Sharding

HIDDEN, FFN = 6, 20  # the inner size isn't a multiple of the outer one
NARROW = 4  # an inner size that's smaller than the outer one
WEIGHTS = {"A": "up.weight", "a": "up.bias", "B": "down.weight", "c": "down.bias"}  # {in the formula: in the module}
DEFAULT_SHAPES = "parameters with the default inner size"
NARROW_SHAPES = f"parameters with an inner size of {NARROW}"
BY_COLUMNS = "self.up is a layer that's split by columns"


@dataclass(frozen=True)
class Built(Case):
    """A way to construct an MLP, together with the shape and memory layout of the MLP's input."""

    leading: tuple[int, ...] = (5,)
    bias: bool = True
    transposed: bool = False

    def describe(self, name: str) -> str:
        options = ", bias=False" * (not self.bias) + ", group=group" * bool(self.groups)
        return f"{name}({HIDDEN}, {FFN}{options})" + " on a three-dimensional, non-contiguous x" * self.transposed


class Default(Case):
    def describe(self, name: str) -> str:
        return f"{name}({HIDDEN})"


class Full(NamedTuple):
    """The input, the upstream gradient and the unsharded weights of an MLP."""

    x: Tensor  # [.., h]
    dy: Tensor  # [.., h]
    weights: dict[str, Tensor]  # by their names in the formula


def swiglu(inner: Tensor) -> Tensor:
    gate, value = inner.chunk(2, dim=-1)
    return silu(gate) * value


def formula(x: Tensor, w: Mapping[str, Tensor], blocks: int) -> Tensor:
    """Return the output of an MLP with one block in `up`, or of a gated MLP with two blocks, [gate; up]."""
    inner = linear(x, w["A"], w.get("a"))  # [.., m], or [.., 2m]
    return linear(gelu(inner) if blocks == 1 else swiglu(inner), w["B"], w.get("c"))  # [.., h]


def draw_mlp(blocks: int, case: Built, generator: torch.Generator, size: int) -> Full:
    random = partial(random_tensor, generator)
    x = random(HIDDEN, *case.leading).movedim(0, -1) if case.transposed else random(*case.leading, HIDDEN)
    weights = {"A": random(blocks * FFN, HIDDEN), "B": random(HIDDEN, FFN)}
    biases = {"a": random(blocks * FFN), "c": random(HIDDEN)} if case.bias else {}
    return Full(x, random(*case.leading, HIDDEN), weights | biases)


def shards(weights: Mapping[str, Tensor], place: Place, stride: int) -> dict[str, Tensor]:
    """Return a rank's shards of the weights, or of their gradients, if `up` is split as `stride` blocks."""
    cut = {
        name: torch.cat([place.part(each) for each in weights[name].chunk(stride)]) for name in "Aa" if name in weights
    }
    return {**weights, **cut, "B": place.part(weights["B"], 1)}


def shapes(params: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in sorted(params.items()))


def give_mlp(blocks: int, case: Built, full: Full, place: Place) -> tuple[Full, str]:
    mine = shards(full.weights, place, blocks)
    return full, shapes({WEIGHTS[name]: value for name, value in mine.items()})


def run_mlp(any_stride: bool, mlp_class: Any, case: Built, given: tuple[Full, str], group: Any) -> Observed:
    full, right_shapes = given
    mlp = mlp_class(HIDDEN, FFN, bias=case.bias, group=group, device=device(), dtype=case.dtype)
    params = dict(mlp.named_parameters())
    mark = getattr(params.get("up.weight"), "tensor_parallel", None)
    split = mark if isinstance(mark, Sharding) else None
    fits = "up.weight" not in params or (split and split.dim == 0 and (any_stride or split.stride == 1))
    seen: Observed = {
        BY_COLUMNS: Claim("" if fits else f"up.weight.tensor_parallel is {mark}"), "parameters": shapes(params)
    }  # fmt: skip
    if seen["parameters"] != right_shapes:
        names = ("out", "dx", *(f"d{name}" for name in WEIGHTS), "forward traffic", "backward traffic")
        return seen | dict.fromkeys(names, NotRun("the parameters are different"))
    state = {WEIGHTS[name]: value.to(device()) for name, value in full.weights.items()}
    load_full_state_dict(mlp, state, group)
    watched = {name: params.get(long) for name, long in WEIGHTS.items()}
    inputs = {"x": full.x.to(device())}
    seen |= observe(mlp, full.dy.to(device()), inputs=inputs, parameters=watched, any_size=0)
    return seen | {"stride": split.stride if split else 1}


def right_mlp(blocks: int, case: Built, full: Full, place: Place) -> Observed:
    names = ["x", *full.weights]
    leaves = [tensor.clone().requires_grad_() for tensor in (full.x, *full.weights.values())]
    out = formula(leaves[0], dict(zip(names, leaves, strict=True)), blocks)
    dx, *grads = torch.autograd.grad(out, leaves, full.dy)
    stride = place.observed[place.index].get("stride", blocks)  # gradients are compared in the layout of the parameters
    gradients = shards(dict(zip(full.weights, grads, strict=True)), place, stride)
    return {
        "parameters": give_mlp(blocks, case, full, place)[1],
        "out": out.detach(),
        "dx": dx,
        **{f"d{name}": gradients.get(name) for name in WEIGHTS},
        "forward traffic": place.traffic(("all_reduce", out.numel())),
        "backward traffic": place.traffic(("all_reduce", dx.numel())),
    }


def partial_sums(blocks: int, case: Built, full: Full, size: int) -> dict[str, list[Tensor]]:
    places = [Place(index, tuple(range(size)), size) for index in range(size)]
    sums = [formula(full.x, shards(full.weights, place, blocks), blocks) for place in places]
    return {"partial sum plus the bias" if case.bias else "partial sum": sums}


def mlp_trial(blocks: int) -> OnRanks:
    return OnRanks(
        cases=(
            Built(), Built(leading=(2, 3), transposed=True), Built(leading=(2, 3), bias=False),
            Built(leading=(2, 1, 3)), Built(groups=GROUPS),
        ),
        draw=partial(draw_mlp, blocks), give=partial(give_mlp, blocks), run=partial(run_mlp, blocks == 2),
        right=partial(right_mlp, blocks), terms=partial(partial_sums, blocks), world_sizes=(2, 4, 1),
    )  # fmt: skip


def run_default(mlp_class: Any, case: Default, given: None, group: Any) -> Observed:
    """Construct a narrow MLP in float64 and then an MLP with default options, and observe both."""
    narrow, usual = mlp_class(HIDDEN, NARROW, dtype=torch.float64), mlp_class(HIDDEN)
    return {
        DEFAULT_SHAPES: shapes(dict(usual.named_parameters())),
        NARROW_SHAPES: shapes(dict(narrow.named_parameters())),
        "dtype": str(next(usual.parameters()).dtype),
    }


def right_default(case: Default, given: None, place: Place) -> Observed:
    def with_inner(size: int) -> str:
        return f"down.bias [{HIDDEN}], down.weight [{HIDDEN}, {size}], up.bias [{size}], up.weight [{size}, {HIDDEN}]"

    inner = 4 * HIDDEN // place.size
    return {
        DEFAULT_SHAPES: with_inner(inner), NARROW_SHAPES: with_inner(NARROW // place.size), "dtype": "torch.float32"
    }  # fmt: skip


exercise(
    "5.2", "ParallelMLP", takes=["ParallelMLP"],
    trials=[
        mlp_trial(blocks=1),
        OnRanks(cases=(Default(),), run=run_default, right=right_default, world_sizes=(2,), without=tuple(Twin)),
    ],
    passed="Your MLP runs one all-reduce in the forward pass and one in the backward pass. Nothing is sent between the "
    "two layers.",
)  # fmt: skip
exercise(
    "5.4", "Fix a gated MLP", takes=["ParallelSwiGLU"], trials=[mlp_trial(blocks=2)],
    passed="The fused layer calls f just once, so your gated MLP runs the same two all-reduces as an MLP without a "
    "gate.",
)  # fmt: skip
