"""The checks for exercises 5.2 (ParallelMLP) and 5.4 (a gated MLP).

Each MLP loads its shards from a full checkpoint, according to the sharding of its parameters. The checks compare the
MLP with a plain PyTorch version that runs in float64 in a single process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.course import checks
from tplab.runtime import device
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.sharding import Sharding, shard

HIDDEN, FFN = 6, 20  # the inner size isn't a multiple of the outer one
NARROW = 4  # an inner size that's smaller than the outer one
NARROW_SHAPES = f"parameters with an inner size of {NARROW}"
# each weight's name in the formula, and its name in the module
WEIGHTS = {"A": "up.weight", "a": "up.bias", "B": "down.weight", "c": "down.bias"}

TANH = "what the tanh approximation of GELU gives"
RELU, SILU = "what comes out with ReLU", "what comes out with SiLU"
NO_ACTIVATION = "what comes out without an activation"
OTHER_GATE = "what comes out with a function other than SiLU"
GELU_GATE = f"{OTHER_GATE} (GELU)"
SWAPPED = "what comes out if gate and up are swapped"
INTERLEAVED = "what comes out if every second column is the gate"
PARTIAL = "this rank's own partial sum, plus the bias"
BIAS_P_TIMES = "the correct output with the final bias added p times"


@dataclass(frozen=True)
class Built(checks.Case):
    """A way to construct an MLP, together with the shape and memory layout of the MLP's input."""

    leading: tuple[int, ...] = (5,)
    bias: bool = True
    transposed: bool = False

    def describe(self, name: str) -> str:
        options = ", bias=False" * (not self.bias) + ", group=group" * bool(self.groups)
        return f"{name}({HIDDEN}, {FFN}{options})" + " on a three-dimensional, non-contiguous x" * self.transposed


CASES = (
    Built(),
    Built(leading=(2, 3), transposed=True),
    Built(leading=(2, 3), bias=False),
    Built(leading=(2, 1, 3)),
    Built(groups=checks.GROUPS),
)


@dataclass(frozen=True)
class Kind:
    """A kind of MLP, plain or gated.

    blocks:     the number of matrices that are fused in `up`
    activation: the function between the two matmuls, which maps [..., blocks·m] to [..., m]
    mistakes:   activations that have the same effect as common mistakes
    """

    blocks: int
    activation: Callable[[Tensor], Tensor]
    mistakes: Mapping[str, Callable[[Tensor], Tensor]]


def gated(gate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def activation(inner: Tensor) -> Tensor:
        first, second = inner.chunk(2, dim=-1)
        return gate(first) * second

    return activation


def swapped(inner: Tensor) -> Tensor:
    first, second = inner.chunk(2, dim=-1)
    return first * F.silu(second)


def interleaved(inner: Tensor) -> Tensor:
    return F.silu(inner[..., 0::2]) * inner[..., 1::2]


PLAIN = Kind(
    1,
    F.gelu,
    {
        TANH: lambda inner: F.gelu(inner, approximate="tanh"),
        NO_ACTIVATION: lambda inner: inner,
        RELU: F.relu,
        SILU: F.silu,
    },
)

GATED = Kind(
    2,
    gated(F.silu),
    {
        SWAPPED: swapped,
        INTERLEAVED: interleaved,
        NO_ACTIVATION: gated(lambda gate: gate),
        OTHER_GATE: gated(torch.sigmoid),
        GELU_GATE: gated(F.gelu),
    },
)


class Problem(NamedTuple):
    """The weights, input, output and gradients of an MLP that runs in a single process."""

    x: Tensor  # [..., h]
    full: dict[str, Tensor]  # the unsharded weights A, a, B and c
    dy: Tensor  # [..., h]
    out: Tensor  # [..., h]
    gradients: dict[str, Tensor]  # gradients of x and the weights


def draw(kind: Kind, case: Built, generator: torch.Generator, size: int) -> Problem:
    random = partial(checks.random_tensor, generator)
    full = {"A": random(kind.blocks * FFN, HIDDEN), "B": random(HIDDEN, FFN)}
    if case.bias:
        full |= {"a": random(kind.blocks * FFN), "c": random(HIDDEN)}
    x = random(HIDDEN, *case.leading).movedim(0, -1) if case.transposed else random(*case.leading, HIDDEN)
    dy = random(*case.leading, HIDDEN)
    leaves = {name: value.clone().requires_grad_() for name, value in {"x": x, **full}.items()}
    out = forward(kind.activation, leaves["x"], leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), dy)
    return Problem(x, full, dy, out.detach(), dict(zip(leaves, gradients, strict=True)))


def forward(activation: Callable[[Tensor], Tensor], x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    inner = activation(F.linear(x, w["A"], w.get("a")))  # [..., m]
    return F.linear(inner, w["B"], w.get("c"))  # [..., h]


def shards(kind: Kind, values: Mapping[str, Tensor], place: checks.Place) -> dict[str, Tensor]:
    """For the rank at this place in its group, return the shards of the weights or of the weights' gradients."""
    cuts = {"A": Sharding(0, kind.blocks), "a": Sharding(0, kind.blocks), "B": Sharding(1)}

    def mine(value: Tensor, cut: Sharding | None) -> Tensor:
        return value if cut is None else shard(value, cut.dim, place.index, place.size, stride=cut.stride)

    return {name: mine(value, cuts.get(name)) for name, value in values.items() if name in WEIGHTS}


def shapes(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in sorted(params.items()))


def parameters_on(kind: Kind, problem: Problem, place: checks.Place) -> str:
    return shapes({WEIGHTS[name]: value for name, value in shards(kind, problem.full, place).items()})


def give(kind: Kind, case: Built, problem: Problem, place: checks.Place) -> dict[str, Any]:
    return {
        "x": problem.x,
        "dy": problem.dy,
        "full": {WEIGHTS[name]: value for name, value in problem.full.items()},
        "parameters": parameters_on(kind, problem, place),
    }


def run(mlp_class: Any, case: Built, given: dict[str, Any], group: Any) -> checks.Observed:
    mlp = mlp_class(HIDDEN, FFN, bias=case.bias, group=group, device=device(), dtype=case.dtype)
    params = dict(mlp.named_parameters())
    seen: checks.Observed = {
        "parameters": shapes(params),
        "sharding of up.weight": str(getattr(params.get("up.weight"), "tensor_parallel", None)),
    }
    if seen["parameters"] != given["parameters"]:
        names = ("out", "dx", "dA", "da", "dB", "dc", "forward traffic", "backward traffic")
        return seen | dict.fromkeys(names, checks.NotRun("the parameters are different"))
    load_full_state_dict(mlp, {name: value.to(device()) for name, value in given["full"].items()}, group)
    watched = {letter: params.get(name) for letter, name in WEIGHTS.items()}
    return seen | checks.observe(
        mlp, given["dy"].to(device()), inputs={"x": given["x"].to(device())}, parameters=watched, any_size=0
    )


def expect(kind: Kind, case: Built, problem: Problem, place: checks.Place) -> checks.Expected:
    gradients = shards(kind, problem.gradients, place)
    right = {
        "parameters": parameters_on(kind, problem, place),
        "sharding of up.weight": str(Sharding(0, kind.blocks)),
        "out": problem.out,
        "dx": problem.gradients["x"],
        **{f"d{name}": gradients.get(name) for name in WEIGHTS},
        "forward traffic": place.traffic(("all_reduce", problem.out.numel())),
        "backward traffic": place.traffic(("all_reduce", problem.x.numel())),
    }
    mistakes = {label: forward(activation, problem.x, problem.full) for label, activation in kind.mistakes.items()}
    if place.size > 1:
        mistakes[PARTIAL] = forward(kind.activation, problem.x, shards(kind, problem.full, place))
        if case.bias:
            mistakes[BIAS_P_TIMES] = problem.out + (place.size - 1) * problem.full["c"]
    return checks.Expected(right, {"out": mistakes})


def check_mlp(number: str, mlp_class: Any, kind: Kind, questions: Sequence[checks.Question]) -> None:
    checks.check_cases(
        number, mlp_class, CASES, draw=partial(draw, kind), give=partial(give, kind), run=run,
        expect=partial(expect, kind), questions=questions,
        crash=lambda case: CRASH if case.bias else f"{NO_BIAS_CRASH} {CRASH}",
        whose_group=WHOSE_GROUP,
    )  # fmt: skip


def default_size(mlp_class: Any) -> checks.Observed:
    """On every rank, construct a narrow MLP in float64 and then an MLP with default options, and observe both."""
    narrow, usual = mlp_class(HIDDEN, NARROW, dtype=torch.float64), mlp_class(HIDDEN)
    return {
        "parameters": shapes(dict(usual.named_parameters())),
        NARROW_SHAPES: shapes(dict(narrow.named_parameters())),
        "dtype": str(next(usual.parameters()).dtype),
    }


def shapes_with(inner: int) -> str:
    """Return the parameter shapes of an MLP with this inner size on each rank."""
    sizes = {"up.weight": (inner, HIDDEN), "up.bias": (inner,), "down.weight": (HIDDEN, inner), "down.bias": (HIDDEN,)}
    return shapes({name: torch.zeros(size) for name, size in sizes.items()})


@checks.exercise("5.2", "ParallelMLP")
def parallel_mlp(mlp_class: Any) -> checks.Verdict:
    check_mlp("5.2", mlp_class, PLAIN, PLAIN_QUESTIONS)
    seen = checks.run_ranks(default_size, 2, mlp_class)
    right = {"parameters": shapes_with(2 * HIDDEN), NARROW_SHAPES: shapes_with(NARROW // 2), "dtype": "torch.float32"}
    checks.verify("5.2", 2, seen, [right] * 2, questions=DEFAULT_QUESTIONS, note=f"ParallelMLP({HIDDEN})")
    return checks.Verdict(
        "Your MLP runs one all-reduce in the forward pass and one in the backward pass. Nothing is sent between the "
        "two layers."
    )


@checks.exercise("5.4", "Fix a gated MLP")
def parallel_swiglu(mlp_class: Any) -> checks.Verdict:
    check_mlp("5.4", mlp_class, GATED, GATED_QUESTIONS)
    return checks.Verdict(
        "The fused layer calls f just once, so your gated MLP runs the same two all-reduces as an MLP without a gate."
    )


WHOSE_GROUP = (
    "The MLP consists of two layers. Which of these layers was built without `group`, and therefore uses the default "
    "group of all ranks?"
)
NO_BIAS_CRASH = (
    "This time, the MLP was built with `bias=False`. Which line of your code uses a bias that's None? If there's "
    "no such line, look for two tensor shapes that don't match."
)
CRASH = (
    "Next to each line of your code, write down the tensor shapes on one rank. The input of the first layer has the "
    "shape [.., h], the input of the second layer has the shape [.., m/p], and the output has the shape [.., h]. Does "
    "the first layer leave its output sharded? Does the second layer expect a sharded input?"
)


COMMON_QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        checks.has_kind("out", "none", "type", "structure"),
        "What does `forward` return? Your MLP should return a single tensor of shape [.., h], which is the sum across "
        "all ranks plus the bias.",
    ),
    checks.Question(
        checks.has_kind("out", NO_ACTIVATION),
        "Two linear layers with nothing between them collapse into a single linear layer. Where does the activation "
        "go?",
    ),
    checks.Question(
        checks.has_kind("out", PARTIAL),
        "Each rank returns only its own partial sum. Which layer adds up the partial sums of all ranks? Does your code "
        "actually call that layer?",
    ),
    checks.Question(
        checks.has_kind("out", BIAS_P_TIMES),
        "Your code adds the final bias p times. Which line adds the final bias on every rank, before the all-reduce?",
    ),
    checks.Question(
        checks.has_no_gradient("dA", "dB", "da", "dc"),
        "One of the parameters doesn't receive a gradient. Which line of your code is invisible to autograd?",
    ),
    checks.Question(
        lambda d: "dx" in d.names and checks.has_kind("backward traffic", "no traffic")(d),
        "Each rank has only its own contribution to dx, the gradient of the input, so the operator f must be "
        "missing. Which layer contains f? Does your code bypass that layer's `forward`?",
    ),
    checks.Question(
        lambda d: checks.has_kind("dx", "p times")(d) and checks.has_kind("backward traffic", "traffic")(d),
        "The column-parallel layer already contains f, the operator that sums the input's gradient dx across "
        "ranks. Which line of your code sums dx a second time?",
    ),
    checks.Question(
        lambda d: bool({"forward traffic", "backward traffic"} & d.names) and "out" not in d.names,
        "The output is correct, but your MLP doesn't run the expected collectives. One all-reduce in each pass is "
        "enough. Which call gathers, scatters, or sums a tensor unnecessarily?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and bool({"dx", "dA", "dB"} & d.names),
        "The output is correct, but one of the gradients isn't. Which part of your forward pass is invisible to "
        "autograd?",
    ),
)

PLAIN_QUESTIONS = (
    checks.Question(
        lambda d: "parameters" in d.names,
        "`self.up` should map h features to m features, and `self.down` should map m features back to h features. "
        "Both layers should split the m features. Which layer is column-parallel, and which is "
        "row-parallel? Does your MLP create the biases only if `bias` is True?",
    ),
    checks.Question(
        lambda d: "sharding of up.weight" in d.names,
        "Either `self.up` isn't split by columns, or `self.up` isn't a parallel layer at all. Which kind of layer "
        "leaves its output sharded so that you can apply GELU right away?",
    ),
    checks.Question(
        checks.has_kind("out", TANH),
        "Your output matches the tanh approximation of GELU. Which version of GELU does the exercise ask for?",
    ),
    checks.Question(
        checks.has_kind("out", RELU, SILU),
        "The structure of your MLP is correct, but its activation function isn't. Which activation does the exercise "
        "ask for?",
    ),
    *COMMON_QUESTIONS,
    checks.Question(
        lambda d: "out" in d.names and not checks.has_kind("out", "zeros")(d),
        "The output should be Y = GELU(X A + a) B + c, with no other operations before or after. Which step of your "
        "code doesn't match this formula?",
    ),
)

GATED_QUESTIONS = (
    checks.Question(
        lambda d: "parameters" in d.names,
        "Your MLP should have a fused, column-parallel layer `self.up` that maps h features to 2m, and a "
        "row-parallel layer `self.down` that maps m features to h. Which of your parameters has the wrong "
        "name or shape?",
    ),
    checks.Question(
        lambda d: "sharding of up.weight" in d.names,
        "Rank 0 needs some rows of the gate and the matching rows of the up projection, but the rows it gets don't "
        "match. How many matrices are fused in `self.up`? Which argument of `ColumnParallelLinear` specifies that "
        "number?",
    ),
    checks.Question(
        checks.has_kind("out", SWAPPED),
        "The weight is [gate; up], so the first half of the output is the gate. Which half of the output should you "
        "apply SiLU to?",
    ),
    checks.Question(
        checks.has_kind("out", INTERLEAVED),
        "Each shard consists of the rank's gate rows, followed by the matching rows of the up projection. Which "
        "columns of the output hold the gate, and which columns hold the up projection?",
    ),
    checks.Question(
        checks.has_kind("out", OTHER_GATE, GELU_GATE),
        "SiLU is defined as SiLU(u) = u · sigmoid(u). Which function does your code apply to the gate?",
    ),
    *COMMON_QUESTIONS,
    checks.Question(
        lambda d: "out" in d.names and not checks.has_kind("out", "zeros")(d),
        "The output should be Y = (SiLU(X G + g) * (X U + u)) D + d. For p = 1, work out one element of Y by hand. "
        "Which step of your code doesn't match this formula?",
    ),
)

DEFAULT_QUESTIONS = (
    checks.Question(
        "parameters",
        "If `ffn_hidden_size` is None, the inner size should be 4 · hidden_size, and each of the two ranks should keep "
        f"half of the inner features. What inner size does your code choose instead of {4 * HIDDEN}?",
    ),
    checks.Question(
        NARROW_SHAPES,
        "This MLP was built with an inner size that's smaller than its hidden size. The default of 4 · hidden_size "
        "applies only if `ffn_hidden_size` is None. Which line of your code changes the inner size that "
        "the caller passed in?",
    ),
    checks.Question(
        "dtype",
        "This MLP was built without a dtype, right after an MLP with dtype=torch.float64. Which variable in your "
        "code still holds the first MLP's options? Check class attributes and global variables.",
    ),
)
