"""The checks for exercises 5.1, ParallelMLP, and 5.3, SwiGLU.

Each MLP loads its weights from a full checkpoint, as its parameters' sharding says. The reference is plain PyTorch in
float64 in a single process.
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

HIDDEN, FFN = 4, 24
WEIGHTS = {"A": "up.weight", "a": "up.bias", "B": "down.weight", "c": "down.bias"}  # name in the formula: in the module

TANH = "what the tanh approximation of GELU gives"
RELU, SILU = "what comes out with ReLU", "what comes out with SiLU"
NO_ACTIVATION = "what comes out without an activation"
OTHER_GATE = "what comes out with another gate than SiLU"
GELU_GATE = f"{OTHER_GATE} (GELU)"
SWAPPED = "what comes out when gate and up change places"
INTERLEAVED = "what comes out when gate and up are taken from every second column"
PARTIAL = "this rank's partial sum plus the bias"
BIAS_P_TIMES = "the right one with the last bias added p times"


@dataclass(frozen=True)
class Built(checks.Case):
    """One way to build an MLP, and the shape and layout of its input."""

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
    Built(groups=checks.GROUPS),
)


@dataclass(frozen=True)
class Kind:
    """A kind of MLP, plain or gated.

    blocks:     number of matrices fused in `up`
    activation: applied between the two matmuls, from [..., blocks·m] to [..., m]
    mistakes:   activations that have the same effect as known mistakes
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
    """An MLP in a single process, with its input and gradients."""

    x: Tensor  # [..., h]
    full: dict[str, Tensor]  # its weights A, a, B and c, unsharded
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
    """Return the shards of the weights, or of their gradients, that belong on the rank at this place."""
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
        return seen | dict.fromkeys(names, checks.NotRun("the parameters are others"))
    load_full_state_dict(mlp, {name: value.to(device()) for name, value in given["full"].items()}, group)
    watched = {letter: params.get(name) for letter, name in WEIGHTS.items()}
    return seen | checks.observe(
        mlp, given["dy"].to(device()), inputs={"x": given["x"].to(device())}, parameters=watched
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
        crash=lambda case: CRASH if case.bias else f"{NO_BIAS_CRASH} If it is not about that: {CRASH}",
        whose_group=WHOSE_GROUP,
    )  # fmt: skip


def default_size(mlp_class: Any) -> checks.Observed:
    """Observe the parameter shapes of an MLP with the default inner size. Runs on every rank."""
    return {"parameters": shapes(dict(mlp_class(HIDDEN).named_parameters()))}


@checks.exercise("5.1", "ParallelMLP")
def parallel_mlp(mlp_class: Any) -> checks.Verdict:
    check_mlp("5.1", mlp_class, PLAIN, PLAIN_QUESTIONS)
    seen = checks.run_ranks(default_size, 2, mlp_class)
    sizes = {"up.weight": (2 * HIDDEN, HIDDEN), "up.bias": (2 * HIDDEN,), "down.weight": (HIDDEN, 2 * HIDDEN)}
    zeros = {name: torch.zeros(size) for name, size in {**sizes, "down.bias": (HIDDEN,)}.items()}
    expected = [{"parameters": shapes(zeros)}] * 2
    checks.verify("5.1", 2, seen, expected, questions=[DEFAULT_SIZE_QUESTION], note=f"ParallelMLP({HIDDEN})")
    return checks.Verdict("One all-reduce of b·s·h numbers forward and one backward; nothing between the two layers.")


@checks.exercise("5.3", "SwiGLU")
def parallel_swiglu(mlp_class: Any) -> checks.Verdict:
    check_mlp("5.3", mlp_class, GATED, GATED_QUESTIONS)
    return checks.Verdict("One fused product, one f, one g: the same two all-reduces as without the gate.")


WHOSE_GROUP = (
    "The MLP is built from two layers. Which of them was not given `group`, and so works in the default group of all "
    "ranks?"
)
NO_BIAS_CRASH = "Here the MLP was built with bias=False. Which line needs a bias that is None?"
CRASH = (
    "Write the shape of one rank's tensor next to each line: [..., h], [..., m/p], [..., m/p], [..., h]. Does the "
    "first layer keep its output split, and does the second take it so?"
)


COMMON_QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        checks.has_kind("out", "none", "type", "structure"),
        "What does forward return? One tensor [..., h], the sum over all ranks with its bias.",
    ),
    checks.Question(
        checks.has_kind("out", NO_ACTIVATION),
        "Two linear maps with nothing between them are one linear map. Where does the activation stand?",
    ),
    checks.Question(
        checks.has_kind("out", PARTIAL),
        "Each rank has one term of the sum. Which layer adds up the terms, and is it that layer you use for `down`?",
    ),
    checks.Question(checks.has_kind("out", BIAS_P_TIMES), "How many times is the last bias added?"),
    checks.Question(
        checks.has_no_gradient("dA", "dB", "da", "dc"),
        "A parameter gets no gradient. Which line does autograd not know about?",
    ),
    checks.Question(
        lambda d: "dx" in d.names and checks.has_kind("backward traffic", "no traffic")(d),
        "dx is only this rank's part: f is missing. Which layer brings f with it, and do you go round its forward?",
    ),
    checks.Question(
        lambda d: checks.has_kind("dx", "p times")(d) and checks.has_kind("backward traffic", "traffic")(d),
        "f is in the column-parallel layer already. Which line of yours sums dx over the ranks a second time?",
    ),
    checks.Question(
        lambda d: bool({"forward traffic", "backward traffic"} & d.names) and "out" not in d.names,
        "The output is right, the communication is not: one all-reduce forward and one backward are enough. Which call "
        "gathers, scatters or sums what could stay where it is?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and bool({"dx", "dA", "dB"} & d.names),
        "The output is right, a gradient is not. Which part of the forward pass is cut off from autograd?",
    ),
)

PLAIN_QUESTIONS = (
    checks.Question(
        lambda d: "parameters" in d.names,
        "Which layer is cut by columns and which by rows? `self.up` goes from h to m and splits m, `self.down` "
        "goes from m to h and splits m too; both are parallel layers, with a bias only if `bias`.",
    ),
    checks.Question(
        lambda d: "sharding of up.weight" in d.names,
        "`self.up` is not cut by columns, or not parallel at all. Which layer keeps its output split, so that GELU "
        "can work on it?",
    ),
    checks.Question(
        checks.has_kind("out", TANH),
        "This is GELU by its tanh approximation. Which of the two does the exercise ask for?",
    ),
    checks.Question(
        checks.has_kind("out", RELU, SILU),
        "The right structure with another activation. Which one does the exercise ask for?",
    ),
    *COMMON_QUESTIONS,
    checks.Question(
        lambda d: "out" in d.names and not checks.has_kind("out", "zeros")(d),
        "Y = GELU(X A + a) B + c, nothing before it and nothing after it. Where does your order of steps differ?",
    ),
)

GATED_QUESTIONS = (
    checks.Question(
        lambda d: "parameters" in d.names,
        "The parameters should be those of one fused `self.up`, column-parallel from h to 2m, and of `self.down`, "
        "row-parallel from m to h. Which of them has another name or shape?",
    ),
    checks.Question(
        lambda d: "sharding of up.weight" in d.names,
        "Rank 0 must hold its rows of the gate and its rows of up. How many matrices are fused in `up`, and which "
        "argument of ColumnParallelLinear says so? Without it a rank gets rows that don't belong together.",
    ),
    checks.Question(
        checks.has_kind("out", SWAPPED),
        "The weight is [gate; up]: the first half of the output is the gate. On which half does SiLU go?",
    ),
    checks.Question(
        checks.has_kind("out", INTERLEAVED),
        "The shard is this rank's rows of the gate, then its rows of up. Which columns of the output are the gate?",
    ),
    checks.Question(
        checks.has_kind("out", OTHER_GATE, GELU_GATE),
        "SiLU(u) = u · sigmoid(u). Which function did you put on the gate?",
    ),
    *COMMON_QUESTIONS,
    checks.Question(
        lambda d: "out" in d.names and not checks.has_kind("out", "zeros")(d),
        "Y = (SiLU(X G + g) * (X U + u)) D + d. Compute one number by hand with p = 1: where does it differ?",
    ),
)

DEFAULT_SIZE_QUESTION = checks.Question(
    "parameters",
    f"When ffn_hidden_size is None it is 4 · hidden_size: here {4 * HIDDEN}, of which each of two ranks keeps half.",
)
