"""The check of exercise 14.4: the gradient's norm over a mesh, with every parameter counted once."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course.checks import (
    WORLD_SIZES,
    Claim,
    Observed,
    Question,
    Snapshot,
    Verdict,
    by_name,
    called_as,
    changed,
    exercise,
    fresh_generator,
    has_kind,
    kind_is,
    random_tensor,
    run_ranks,
    traffic,
    verify,
)
from tplab.runtime import device, record
from tplab.tensor.sharding import Sharding

SIZES: dict[int, list[tuple[int, int, int]]] = {
    1: [(1, 1, 1)],
    2: [(1, 1, 2), (1, 2, 1), (2, 1, 1)],
    4: [(1, 2, 2), (2, 1, 2), (2, 2, 1)],
}
SMALL = "nothing as large as a gradient is sent"
FLOAT = "the result is a float"

Size = tuple[int, int, int]
Stage = dict[str, Tensor]  # whole gradients of one stage


def whole_model(generator: torch.Generator, pp: int) -> tuple[list[Stage], Tensor]:
    """The whole gradients of each stage, and of the table that the first and the last one share."""
    stages = [
        {
            "up": random_tensor(generator, 8, 3),
            "down": random_tensor(generator, 3, 8),
            "norm": random_tensor(generator, 6),
        }
        for _ in range(pp)
    ]
    return stages, random_tensor(generator, 12, 3)


CUTS = {"up": 0, "down": 1, "table": 0}  # the dimension along which it is cut; norm is whole on every rank


def held_by(stages: list[Stage], table: Tensor, i: int, t: int, size: Size) -> dict[str, tuple[Tensor, bool]]:
    """What the rank of stage i and place t holds: gradient, and whether it is the second copy of the table."""
    _, pp, tp = size
    mine = {name: (part(name, value, t, tp), False) for name, value in stages[i].items()}
    if i in (0, pp - 1):
        mine["table"] = (part("table", table, t, tp), i > 0)
    return mine


def part(name: str, value: Tensor, t: int, tp: int) -> Tensor:
    return value if name not in CUTS else value.chunk(tp, CUTS[name])[t].contiguous()


def groups_of(size: Size) -> dict[str, list[list[int]]]:
    """The groups of tp and of pp."""
    grid = torch.arange(size[0] * size[1] * size[2]).view(size)
    return {"tp": grid.flatten(0, 1).tolist(), "pp": grid.transpose(1, 2).flatten(0, 1).tolist()}


def measure(gradient_norm: Callable[..., Any], sizes: Sequence[Size], data: Sequence[Any]) -> list[Observed]:
    """On a rank: the norm on each mesh."""
    seen = []
    for size, held in zip(sizes, data, strict=True):
        made = {axis: [(ranks, dist.new_group(ranks)) for ranks in groups] for axis, groups in groups_of(size).items()}
        mine = {axis: next(group for ranks, group in made[axis] if dist.get_rank() in ranks) for axis in made}
        given = held[dist.get_rank()]
        named = {name: as_parameter(name, gradient) for name, (gradient, _) in given.items()}
        tied = named.get("table") if size[1] > 1 else None
        params = list(named.values())
        params.insert(1, nn.Parameter(torch.ones(2, dtype=torch.float64, device=device())))  # one without a gradient
        gradients = {f"gradient {n}": param.grad for n, param in enumerate(params)}
        before = Snapshot(**gradients)
        with record() as section, called_as("gradient_norm(parameters, tp_group, pp_group, tied)"):
            norm = gradient_norm(params, mine["tp"], mine["pp"], tied)
        sent = [call for call in traffic(section) if call.numel > 2 * len(call.group)]
        seen.append(
            {
                "norm": torch.tensor(norm, dtype=torch.float64) if type(norm) is float else norm,
                FLOAT: Claim("" if type(norm) is float or norm is None else f"it is a {type(norm).__name__}"),
                SMALL: Claim(f"{sent[0].kind} of {sent[0].numel} elements" if sent else ""),
                "inputs unchanged": before.changed(),
            }
        )
    return seen


def as_parameter(name: str, gradient: Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros_like(gradient, device=device()))
    param.grad = gradient.clone().to(device())
    if name in CUTS:
        param.tensor_parallel = Sharding(CUTS[name])  # type: ignore[attr-defined]
    return param


def root(*squares: float) -> Tensor:
    return torch.tensor(math.sqrt(sum(squares)), dtype=torch.float64)


REPLICATED = "what comes out when replicated parameters count once for each of their ranks"
NO_REPLICATED = "what comes out without the replicated parameters"
OWN_SHARDS = "what comes out with this rank's shards alone"
SHARDS_OF_0 = "what comes out with the shards of the first tensor-parallel rank alone"
OWN_STAGE = "what comes out with this stage alone"
TIED_TWICE = "what comes out when the shared table counts twice"
DP_TOO = "sqrt(dp) times the right one"
NO_ROOT = "the square of the right one"
SUM_OF_NORMS = "the sum of the norms of all ranks"


def lookalikes(stages: list[Stage], table: Tensor, rank: int, size: Size) -> dict[str, Tensor]:
    """What known mistakes give on this rank."""
    dp, pp, tp = size
    i, t = rank // tp % pp, rank % tp
    cut = [float(v.square().sum()) for stage in stages for name, v in stage.items() if name in CUTS]
    whole = [float(stage["norm"].square().sum()) for stage in stages]
    tied = float(table.square().sum())
    right = sum(cut) + sum(whole) + tied

    def of_rank(i: int, t: int, shared: bool = False) -> float:
        mine = held_by(stages, table, i, t, size).items()
        return sum(float(g.square().sum()) for _, (g, second) in mine if shared or not second)

    stage = sum(of_rank(i, other) for other in range(tp)) - (tp - 1) * whole[i]
    own = sum(
        of_rank(other, t) - (0 if t == 0 else whole[other]) for other in range(pp)
    )  # summed over the stages, not over tp
    alike = {
        REPLICATED: root(right, (tp - 1) * sum(whole)),
        f"{REPLICATED} ": root(right, (tp - 1) * sum(whole), tied * (pp > 1)),
        NO_REPLICATED: root(right - sum(whole)),
        OWN_STAGE: root(stage),
        TIED_TWICE: root(right, tied * (pp > 1)),
        OWN_SHARDS: root(own),
        f"{OWN_SHARDS} ": root(sum(of_rank(other, t) for other in range(pp))),
        SHARDS_OF_0: root(sum(of_rank(other, 0) for other in range(pp))),
        f"{OWN_SHARDS}  ": root(of_rank(i, t)),
        DP_TOO: root(dp * right),
        NO_ROOT: torch.tensor(right, dtype=torch.float64),
        SUM_OF_NORMS: torch.tensor(
            sum(math.sqrt(of_rank(a, b) - (whole[a] if b else 0)) for a in range(pp) for b in range(tp)),
            dtype=torch.float64,
        ),
    }
    return {label: value for label, value in alike.items() if not torch.isclose(value, root(right), rtol=1e-12)}


@exercise("14.4", "The norm of the gradient")
def norm_of_the_gradient(gradient_norm: Callable[..., Any]) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        models = [whole_model(generator, size[1]) for size in SIZES[p]]
        data = [
            [held_by(stages, table, rank // size[2] % size[1], rank % size[2], size) for rank in range(p)]
            for size, (stages, table) in zip(SIZES[p], models, strict=True)
        ]
        seen = run_ranks(measure, p, gradient_norm, SIZES[p], data, question=CRASH, stuck=STUCK)
        for place, (size, (stages, table)) in enumerate(zip(SIZES[p], models, strict=True)):
            every = [*(v for stage in stages for v in stage.values()), table]
            right = root(*(float(value.square().sum()) for value in every))
            alike = [{"norm": pad(lookalikes(stages, table, rank, size))} for rank in range(p)]
            verify(
                "14.4",
                p,
                [on_rank[place] for on_rank in seen],
                [{"norm": right}] * p,
                questions=QUESTIONS,
                lookalikes=by_name(alike),
                note="dp = {}, pp = {}, tp = {}".format(*size),
            )
    return Verdict("Every parameter of the model counts once, on every mesh, and all ranks agree.")


LABELS = (
    *(TIED_TWICE, REPLICATED, f"{REPLICATED} ", NO_REPLICATED, OWN_STAGE),
    *(OWN_SHARDS, f"{OWN_SHARDS} ", f"{OWN_SHARDS}  ", SHARDS_OF_0, DP_TOO, NO_ROOT, SUM_OF_NORMS),
)


SHARD_KINDS = (OWN_SHARDS, f"{OWN_SHARDS} ", f"{OWN_SHARDS}  ", SHARDS_OF_0)


def pad(alike: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every rank has every label; one that can't be told from the right answer there has no value."""
    return {label: alike.get(label, torch.tensor(math.nan, dtype=torch.float64)) for label in LABELS}


CRASH = (
    "A parameter may have no gradient and no attribute `tensor_parallel`, and `tied` may be None. Which line expects "
    "one of them?"
)
STUCK = "Every rank must enter the same all-reduces, also one that has nothing of its own to add. Which rank does not?"
QUESTIONS = (
    Question(changed, "The gradients are still to be used. Which line of yours writes into one?"),
    Question(
        lambda d: FLOAT in d.names,
        "The result is a plain float, the same on every rank. What turns a tensor with one element into a number?",
    ),
    Question(kind_is("norm", NO_ROOT), "These are the squares, added up. What is still to be done with the sum?"),
    Question(
        kind_is("norm", REPLICATED, f"{REPLICATED} "),
        "A parameter that is whole on every tensor-parallel rank counts tp times. Which of these ranks should count "
        "it?",
    ),
    Question(
        kind_is("norm", NO_REPLICATED),
        "The parameters that are whole on every rank belong to the model too. Which one of the ranks counts them?",
    ),
    Question(
        kind_is("norm", TIED_TWICE),
        "The table stands on the first and on the last stage, and both copies have the same gradient. On which of the "
        "two stages does it count, and how does a rank know its stage?",
    ),
    Question(
        kind_is("norm", DP_TOO),
        "The gradients are the same on every data-parallel rank by now. Over which ranks do you add up?",
    ),
    Question(
        kind_is("norm", SUM_OF_NORMS),
        "The norm of the whole is not the sum of the norms of its parts. What can be added up, and when is the root "
        "taken?",
    ),
    Question(
        lambda d: kind_is("norm", OWN_STAGE)(d),
        "Each stage knows its own layers only. Over which group do the other stages' parts come in?",
    ),
    Question(
        lambda d: any(has_kind("norm", kind)(d) for kind in SHARD_KINDS),
        "This is made of one rank's shards. Over which group do the parts of the others come in?",
    ),
    Question(
        lambda d: SMALL in d.names,
        "One number from each rank is enough: the sum of the squares of what it counts. What do you send instead?",
    ),
    Question(
        lambda d: "norm" in d.names,
        "Go through the parameters of one rank: a shard, a whole one, the second copy of the table, one without a "
        "gradient. Which ranks count each of them, and over which groups are the squares added up?",
    ),
)
