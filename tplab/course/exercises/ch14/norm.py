"""The check for exercise 14.4, the norm of the gradient over a mesh, which counts every parameter once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tplab.course import checks
from tplab.runtime import device, record
from tplab.tensor.sharding import Sharding

SMALL = "nothing as large as a gradient is sent"
FLOAT = "the result is a float"

REPLICATED = "what comes out when replicated parameters count once for each of their ranks"
NO_REPLICATED = "what comes out without the replicated parameters"
OWN_SHARDS = "what comes out with this rank's shards alone"
SHARDS_OF_0 = "what comes out with the shards of the first tensor-parallel rank alone"
OWN_STAGE = "what comes out with this stage alone"
TIED_LEFT_OUT = "what comes out without the shared table"
TIED_TWICE = "what comes out when the shared table counts twice"
DP_TOO = "sqrt(dp) times the right one"
NO_ROOT = "the square of the right one"
SUM_OF_NORMS = "the sum of the norms of all ranks"
BY_SHAPE = "what comes out without a weight that has the shape of the table"
SHARD_KINDS = (OWN_SHARDS, f"{OWN_SHARDS} ", f"{OWN_SHARDS}  ", SHARDS_OF_0)


@dataclass(frozen=True)
class Mesh(checks.Case):
    """A mesh, given by the number of ranks along each axis.

    half:    whether the gradients are in float16, which can't hold their squares
    frozen:  whether a later stage has no gradients (apart from the shared table's if that stage is the last one)
    copied:  whether the shared table is replicated over tp instead of split
    single:  whether the only stage, which is both the first and the last one, gets the table as `tied`
    """

    dp: int
    pp: int
    tp: int
    half: bool = False
    frozen: bool = False
    copied: bool = False
    single: bool = False

    def describe(self, name: str) -> str:
        how = ", gradients in float16" * self.half + ", a stage without gradients of its own" * self.frozen
        how += ", every tensor-parallel rank has the whole table" * self.copied
        how += ", the only stage has a tied table" * self.single
        return f"dp = {self.dp}, pp = {self.pp}, tp = {self.tp}{how}"

    @property
    def cuts(self) -> dict[str, int]:
        """The dimension along which each sharded parameter is split. Parameters that aren't listed are replicated."""
        return {"up": 0, "down": 1} | ({} if self.copied else {"table": 0})

    def stage_and_shard(self, rank: int) -> tuple[int, int]:
        """Return a rank's positions along the pp and tp axes."""
        return rank // self.tp % self.pp, rank % self.tp

    def groups_of(self, axis: str) -> list[list[int]]:
        """Return the ranks of every "tp" group or every "pp" group."""
        grid = torch.arange(self.dp * self.pp * self.tp).view(self.dp, self.pp, self.tp)
        return (grid if axis == "tp" else grid.transpose(1, 2)).flatten(0, 1).tolist()


MESHES = {
    1: (Mesh(1, 1, 1), Mesh(1, 1, 1, half=True), Mesh(1, 1, 1, single=True)),
    2: (Mesh(1, 1, 2), Mesh(1, 1, 2, single=True), Mesh(1, 2, 1), Mesh(2, 1, 1), Mesh(1, 2, 1, frozen=True)),
    4: (
        Mesh(1, 2, 2),
        Mesh(2, 1, 2),
        Mesh(2, 2, 1),
        Mesh(1, 2, 2, half=True),
        Mesh(1, 4, 1, frozen=True),
        Mesh(1, 2, 2, copied=True),
    ),
}


class Problem(NamedTuple):
    """The unsharded gradients, which are the same for all replicas."""

    stages: list[dict[str, Tensor]]
    table: Tensor  # shared by the first and the last stage


class Held(NamedTuple):
    """A gradient that one rank holds."""

    gradient: Tensor
    second_copy: bool = False  # whether this is the table's second copy


def draw(case: Mesh, generator: torch.Generator, size: int) -> Problem:
    shapes = {"up": (12, 3), "down": (3, 8), "norm": (6,)}  # `up` has the shape of the table, but isn't tied

    def gradient(*shape: int) -> Tensor:
        if case.half:
            return torch.randint(-400, 401, shape, generator=generator).double()
        return checks.random_tensor(generator, *shape)

    stages = [{name: gradient(*shape) for name, shape in shapes.items()} for _ in range(case.pp)]
    if case.frozen:
        stages[case.pp // 2] = {}
    return Problem(stages, gradient(12, 3))


def held_by(case: Mesh, problem: Problem, i: int, t: int) -> dict[str, Held]:
    """Return the gradients that tensor-parallel rank t of stage i holds."""

    def shard(name: str, value: Tensor) -> Tensor:
        return value.chunk(case.tp, case.cuts[name])[t].contiguous() if name in case.cuts else value

    mine = {name: Held(shard(name, value)) for name, value in problem.stages[i].items()}
    if i in (0, case.pp - 1):
        mine["table"] = Held(shard("table", problem.table), second_copy=i > 0)
    return mine


def give(case: Mesh, problem: Problem, place: checks.Place) -> dict[str, Tensor]:
    mine = held_by(case, problem, *case.stage_and_shard(place.index))
    return {name: held.gradient for name, held in mine.items()}


def run(gradient_norm: Callable[..., Any], case: Mesh, given: dict[str, Tensor], group: Any) -> checks.Observed:
    tp_group, pp_group = (checks.make_group(case.groups_of(axis)) for axis in ("tp", "pp"))
    gradients = {name: gradient.half() if case.half else gradient for name, gradient in given.items()}
    named = {name: as_parameter(gradient, case.cuts.get(name)) for name, gradient in gradients.items()}
    tied = named.get("table") if case.pp > 1 or case.single else None
    params = list(named.values())
    params.insert(1, nn.Parameter(torch.ones(2, dtype=case.dtype, device=device())))  # it has no gradient
    before = checks.Snapshot(parameters=params, **{f"gradient {n}": param.grad for n, param in enumerate(params)})
    with record() as section, checks.called_as("gradient_norm(parameters, tp_group, pp_group, tied)"):
        norm = gradient_norm(iter(params) if case.frozen else params, tp_group, pp_group, tied)
    sent = [call for call in checks.traffic(section) if call.numel > 2 * len(call.group)]
    return {
        "norm": torch.tensor(norm, dtype=case.dtype) if type(norm) is float else norm,
        FLOAT: checks.Claim("" if type(norm) is float or norm is None else f"it is a {type(norm).__name__}"),
        SMALL: checks.Claim(f"{sent[0].kind} of {sent[0].numel} elements" if sent else ""),
        "inputs unchanged": before.changed(),
    }


def as_parameter(gradient: Tensor, dim: int | None) -> nn.Parameter:
    """Return a parameter with this gradient. It's split along `dim`, or replicated if `dim` is None."""
    param = nn.Parameter(torch.zeros_like(gradient, device=device()))
    param.grad = gradient.clone().to(device())
    if dim is not None:
        param.tensor_parallel = Sharding(dim)  # type: ignore[attr-defined]
    return param


def expect(case: Mesh, problem: Problem, place: checks.Place) -> checks.Expected:
    stages, table = problem
    right = root(*(square(value) for stage in stages for value in stage.values()), square(table))
    return checks.Expected({"norm": right}, {"norm": known_mistakes(case, problem, place, right)})


def known_mistakes(case: Mesh, problem: Problem, place: checks.Place, right: Tensor) -> dict[str, Tensor]:
    """Return the norms that common mistakes would produce on this rank, or NaN where a mistake has no effect."""
    dp, pp, tp = case.dp, case.pp, case.tp
    i, t = case.stage_and_shard(place.index)
    whole, tied = float(right) ** 2, square(problem.table)
    replicated = [square(stage["norm"]) if stage else 0.0 for stage in problem.stages]
    replicated[0] += tied * case.copied

    def of_rank(i: int, t: int) -> float:
        held = held_by(case, problem, i, t).values()
        return sum(square(gradient) for gradient, second_copy in held if not second_copy)

    def counted(i: int, t: int) -> float:
        """Return a rank's squared norm, counting replicated parameters on the first tensor-parallel rank only."""
        return of_rank(i, t) - (replicated[i] if t else 0)

    mistakes = {
        TIED_TWICE: root(whole, tied * (pp > 1)),
        TIED_LEFT_OUT: root(whole, -tied),
        REPLICATED: root(whole, (tp - 1) * sum(replicated)),
        f"{REPLICATED} ": root(whole, (tp - 1) * sum(replicated), tied * (pp > 1)),
        NO_REPLICATED: root(whole - sum(replicated)),
        OWN_STAGE: root(*(counted(i, other) for other in range(tp))),
        OWN_SHARDS: root(*(counted(other, t) for other in range(pp))),  # summed over the stages, not over tp
        f"{OWN_SHARDS} ": root(*(of_rank(other, t) for other in range(pp))),
        f"{OWN_SHARDS}  ": root(of_rank(i, t)),
        SHARDS_OF_0: root(*(of_rank(other, 0) for other in range(pp))),
        DP_TOO: root(dp * whole),
        NO_ROOT: right**2,
        BY_SHAPE: root(whole, -square(problem.stages[-1].get("up", torch.zeros(1))) * (pp > 1)),
        SUM_OF_NORMS: sum((root(counted(a, b)) for a in range(pp) for b in range(tp)), torch.zeros_like(right)),
    }
    return {
        label: value.masked_fill(torch.isclose(value, right, rtol=1e-12), torch.nan)
        for label, value in mistakes.items()
    }


def square(value: Tensor) -> float:
    return float(value.square().sum())


def root(*squares: float) -> Tensor:
    return torch.tensor(math.sqrt(sum(squares)), dtype=torch.float64)


@checks.exercise("14.4", "The norm of the gradient")
def norm_of_the_gradient(gradient_norm: Callable[..., Any]) -> checks.Verdict:
    checks.check_cases(
        "14.4", gradient_norm, lambda world_size: MESHES[world_size], draw=draw, give=give, run=run, expect=expect,
        questions=lambda case, observed: (*[ONCE] * case.frozen, *[COPIED] * case.copied, *QUESTIONS),
        crash=CRASH, stuck=STUCK, values_on_cpu=True,
    )  # fmt: skip
    return checks.Verdict("Every parameter of the model counts once, on every mesh, and all ranks agree.")


CRASH = (
    "A parameter may have no gradient and no attribute `tensor_parallel`, and `tied` may be None. Which line expects "
    "one of them?"
)
STUCK = "Every rank must enter the same all-reduces, also one that has nothing of its own to add. Which rank does not?"
ONCE = checks.Question(
    checks.kind_is("norm", "zeros"),
    "`parameters` may be `model.parameters()`, which can be gone through only once. Which line of yours goes through "
    "it before your sum begins?",
)
COPIED = checks.Question(
    checks.kind_is("norm", TIED_TWICE),
    "The shared table counts twice. Both of its stages have a copy, and here each copy is replicated on both "
    "tensor-parallel ranks, because the table has no `tensor_parallel`. Which one of these four ranks should count it?",
)
QUESTIONS = (
    checks.Question(checks.changed, "The gradients are still to be used. Which line of yours writes into one?"),
    checks.Question(
        lambda d: FLOAT in d.names,
        "The result is a plain float, the same on every rank. What turns a tensor with one element into a number?",
    ),
    checks.Question(
        checks.kind_is("norm", NO_ROOT), "These are the squares, added up. What is still to be done with the sum?"
    ),
    checks.Question(
        lambda d: "infinity" in d.text("norm"),
        "Gradients may be float16, whose largest number is 65,504, so the square of 300 is already infinite in it. In "
        "which dtype do you square?",
    ),
    checks.Question(
        checks.kind_is("norm", BY_SHAPE),
        "Another weight has the shape of the shared table and belongs to this stage alone. How do you find out whether "
        "a parameter is `tied` itself?",
    ),
    checks.Question(
        checks.kind_is("norm", REPLICATED, f"{REPLICATED} "),
        "A parameter that is whole on every tensor-parallel rank counts tp times. Which of these ranks should count "
        "it?",
    ),
    checks.Question(
        checks.kind_is("norm", NO_REPLICATED),
        "The parameters that are whole on every rank belong to the model too. Which one of the ranks counts them?",
    ),
    checks.Question(
        checks.kind_is("norm", TIED_TWICE),
        "The table stands on the first and on the last stage, and both copies have the same gradient. On which of the "
        "two stages does it count, and how does a rank know its stage?",
    ),
    checks.Question(
        checks.kind_is("norm", TIED_LEFT_OUT),
        "No rank counts the shared table. The first stage should count the table, even if that stage is also the last "
        "one. Which ranks skip the table in your code?",
    ),
    checks.Question(
        checks.kind_is("norm", DP_TOO),
        "The gradients are the same on every data-parallel rank by now. Over which ranks do you add up?",
    ),
    checks.Question(
        checks.kind_is("norm", SUM_OF_NORMS),
        "The norm of the whole is not the sum of the norms of its parts. What can be added up, and when is the root "
        "taken?",
    ),
    checks.Question(
        checks.kind_is("norm", OWN_STAGE),
        "Each stage knows its own layers only. Over which group do the other stages' parts come in?",
    ),
    checks.Question(
        checks.has_kind("norm", *SHARD_KINDS),
        "This is made of one rank's shards. Over which group do the parts of the others come in?",
    ),
    checks.Question(
        lambda d: SMALL in d.names,
        "One number from each rank is enough: the sum of the squares of what it counts. What do you send instead?",
    ),
    checks.Question(
        lambda d: "norm" in d.names,
        "Go through the parameters of one rank: a shard, a whole one, the second copy of the table, one without a "
        "gradient. Which ranks count each of them, and over which groups are the squares added up?",
    ),
)
