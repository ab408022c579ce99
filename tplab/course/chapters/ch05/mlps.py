"""Run one of the two parallel MLPs of exercises 5.1 and 5.3 and compare it with the MLP on one process.

Each is run in several cases on p = 1, 2, 4 ranks and, at p = 4, in two groups of two ranks with data of their own. Its
weights are loaded from a full checkpoint, by the parameters' own sharding. Right is plain torch in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
    NotRun,
    Observed,
    Question,
    Traffic,
    ask_about_group,
    by_name,
    fresh_generator,
    group_question,
    make_group,
    member_of,
    observe,
    run_cases,
    verify,
)
from tplab.runtime import device
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.sharding import Sharding, shard

HIDDEN, FFN = 4, 24
WEIGHTS = {"A": "up.weight", "a": "up.bias", "B": "down.weight", "c": "down.bias"}  # in the formula, in the module


@dataclass(frozen=True)
class Case:
    """One way to build and run an MLP. `ffn` None: the default."""

    leading: tuple[int, ...] = (5,)
    ffn: int | None = FFN
    bias: bool = True
    groups: tuple[tuple[int, ...], ...] | None = None
    transposed: bool = False

    def note(self, mlp_class: Any) -> str:
        """The case as a learner would write it: "ParallelMLP(4, 24, bias=False)"."""
        options = ["bias=False"] * (not self.bias) + ["group=group"] * bool(self.groups)
        call = f"{getattr(mlp_class, '__name__', 'MLP')}({', '.join([str(HIDDEN), str(self.ffn), *options])})"
        extra = " on a three-dimensional, non-contiguous x" if self.transposed else ""
        return call + extra + (f" {IN_GROUPS}" if self.groups else "")

    def crash(self) -> str:
        """What to ask where the MLP raises."""
        if self.groups:
            return ask_about_group(WHOSE_GROUP)
        return CRASH if self.bias else f"{NO_BIAS_CRASH} If it is not about that: {CRASH}"


CASES = (
    Case(),
    Case(leading=(2, 3), transposed=True),
    Case(leading=(2, 3), bias=False),
    Case(groups=GROUPS),
)


@dataclass(frozen=True)
class Kind:
    """One of the two MLPs: how many matrices are fused in `up`, what stands between the products, known mistakes."""

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


TANH = "what the tanh approximation of GELU gives"
NO_ACTIVATION = "what comes out without an activation"
OTHER_GATE = "what comes out with another gate than SiLU"
SWAPPED = "what comes out when gate and up change places"
INTERLEAVED = "what comes out when gate and up are taken from every second column"
PARTIAL = "this rank's partial sum plus the bias"
BIAS_P_TIMES = "the right one with the last bias added p times"

PLAIN = Kind(
    1,
    F.gelu,
    {
        TANH: lambda inner: F.gelu(inner, approximate="tanh"),
        NO_ACTIVATION: lambda inner: inner,
        "what comes out with ReLU": F.relu,
        "what comes out with SiLU": F.silu,
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
        f"{OTHER_GATE} (GELU)": gated(F.gelu),
    },
)


def run_mlp(mlp_class: Any, cases: Sequence[Case], data: Sequence[Sequence[dict[str, Any]]]) -> list[Observed]:
    """On a rank: every case, one after the other."""
    return [run_case(mlp_class, case, mine[dist.get_rank()]) for case, mine in zip(cases, data, strict=True)]


def run_case(mlp_class: Any, case: Case, mine: dict[str, Any]) -> Observed:
    group = make_group(case.groups)
    mlp = mlp_class(HIDDEN, case.ffn, bias=case.bias, group=group, device=device(), dtype=torch.float64)
    params = dict(mlp.named_parameters())
    seen: Observed = {
        "parameters": shapes(params),
        "sharding of up.weight": str(getattr(params.get("up.weight"), "tensor_parallel", None)),
    }
    if seen["parameters"] != mine["parameters"]:
        names = ("out", "dx", "dA", "da", "dB", "dc", "forward traffic", "backward traffic")
        return seen | dict.fromkeys(names, NotRun("the parameters are others"))
    full = {name: value.to(device()) for name, value in mine["full"].items()}
    load_full_state_dict(mlp, full, group)
    watched = {letter: params.get(name) for letter, name in WEIGHTS.items()}
    return seen | observe(mlp, mine["dy"].to(device()), inputs={"x": mine["x"].to(device())}, parameters=watched)


def default_size(mlp_class: Any) -> Observed:
    """On a rank: the parameters of an MLP that was not told its inner size."""
    return {"parameters": shapes(dict(mlp_class(HIDDEN).named_parameters()))}


def shapes(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in sorted(params.items()))


@dataclass(frozen=True)
class Reference:
    """The MLP on one process: its full weights, an input, an output, and all gradients for a random dy."""

    x: Tensor
    full: dict[str, Tensor]
    dy: Tensor
    out: Tensor
    gradients: dict[str, Tensor]  # of x, A, a, B, c


def reference(kind: Kind, case: Case, generator: torch.Generator) -> Reference:
    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    ffn = case.ffn or 4 * HIDDEN
    full = {"A": random(kind.blocks * ffn, HIDDEN), "B": random(HIDDEN, ffn)}
    if case.bias:
        full |= {"a": random(kind.blocks * ffn), "c": random(HIDDEN)}
    x = random(HIDDEN, *case.leading).movedim(0, -1) if case.transposed else random(*case.leading, HIDDEN)
    dy = random(*case.leading, HIDDEN)
    leaves = {name: value.clone().requires_grad_() for name, value in {"x": x, **full}.items()}
    out = forward(kind.activation, leaves["x"], leaves)
    out.backward(dy)
    return Reference(x, full, dy, out.detach(), {name: leaf.grad for name, leaf in leaves.items()})  # type: ignore[misc]


def forward(activation: Callable[[Tensor], Tensor], x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    inner = activation(F.linear(x, w["A"], w.get("a")))  # [..., m]
    return F.linear(inner, w["B"], w.get("c"))  # [..., h]


def expect(kind: Kind, case: Case, plain: Reference, rank: int, ranks: tuple[int, ...]) -> tuple[dict, dict, dict]:
    """What a rank is given, what is right there, and what known mistakes give."""
    index, q, p = ranks.index(rank), len(ranks), len(ranks) * len(case.groups or (0,))
    cuts = {"A": Sharding(0, kind.blocks), "a": Sharding(0, kind.blocks), "B": Sharding(1)}

    def mine(name: str, value: Tensor) -> Tensor:
        cut = cuts.get(name)
        return value if cut is None else shard(value, cut.dim, index, q, stride=cut.stride)

    own = {name: mine(name, value) for name, value in plain.full.items()}
    parameters = shapes({WEIGHTS[name]: value for name, value in own.items()})
    held = {
        "x": plain.x,
        "dy": plain.dy,
        "full": {WEIGHTS[name]: value for name, value in plain.full.items()},
        "parameters": parameters,
    }
    right: dict[str, Any] = {
        "parameters": parameters,
        "sharding of up.weight": str(cuts["A"]),
        "out": plain.out,
        "dx": plain.gradients["x"],
        **{f"d{name}": mine(name, plain.gradients[name]) if name in plain.full else None for name in WEIGHTS},
        "forward traffic": Traffic.expected(p, ("all_reduce", plain.out.numel()), group=ranks),
        "backward traffic": Traffic.expected(p, ("all_reduce", plain.x.numel()), group=ranks),
    }
    alike = {label: forward(activation, plain.x, plain.full) for label, activation in kind.mistakes.items()}
    if q > 1:
        alike[PARTIAL] = forward(kind.activation, plain.x, own)
        if case.bias:
            alike[BIAS_P_TIMES] = plain.out + (q - 1) * plain.full["c"]
    return held, right, {"out": alike}


def check_mlp(number: str, mlp_class: Any, kind: Kind, questions: Sequence[Question]) -> None:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        here = [case for case in CASES if case.groups is None or p == 4]
        table = []
        for case in here:
            references = [reference(kind, case, generator) for _ in case.groups or (0,)]
            members = member_of(p, case.groups)
            table.append([expect(kind, case, references[i], rank, ranks) for rank, (i, ranks) in enumerate(members)])
        for batch in (slice(0, 1), slice(1, None)):  # the plain case alone first: its message is the clearest
            held = [[row[0] for row in rows] for rows in table[batch]]
            runs = run_cases(
                run_mlp,
                p,
                mlp_class,
                here[batch],
                held,
                note=lambda case: case.note(mlp_class),
                question=lambda case: case.crash(),
                stuck=lambda case: case.crash() if case.groups else None,
            )
            for case, rows, seen in zip(here[batch], table[batch], runs, strict=True):
                verify(
                    number,
                    p,
                    seen,
                    [row[1] for row in rows],
                    questions=[group_question(WHOSE_GROUP), *questions] if case.groups else questions,
                    lookalikes=by_name([row[2] for row in rows]),
                    note=case.note(mlp_class),
                )


WHOSE_GROUP = (
    "The MLP is built from two layers. Which of them was not given `group`, and so works in the default group of all "
    "ranks?"
)
NO_BIAS_CRASH = "Here the MLP was built with bias=False. Which line needs a bias that is None?"
CRASH = (
    "Write the shape of one rank's tensor next to each line: [..., h], [..., m/p], [..., m/p], [..., h]. Does the "
    "first layer keep its output split, and does the second take it so?"
)
