"""The check for exercise 9.5, activation checkpointing in which the second run drops the same elements as the first.

The function that runs twice applies dropout in three places, using torch's current state and both states of a tracker:

    a = dropout_sharded(w * f(x)),   y = dropout_current(dropout_replicated(g(a))),   out = y²

The right gradients are computed from this formula in a single process, with masks that plain PyTorch draws after the
same seeds.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course import checks
from tplab.course.exercises.ch09.masks import CURRENT, REPLICATED, SHARDED, draw_masks
from tplab.runtime import device, record
from tplab.tensor.mappings import copy_to_region, reduce_from_region
from tplab.tensor.rng import RNGTracker, dropout, seed_all

SIZE, RATE = 300, 0.4
TWICE, FREED = "the function runs once forward and once backward", "nothing but the inputs is kept until backward"
AFTERWARDS = "masks drawn afterwards"
LATER = "what comes out when the second run drops other places"
MASKS = "masks"


@dataclass(frozen=True, kw_only=True)
class Scene(checks.Case):
    """A case that makes `calls` calls before a single backward pass, with an x that may or may not need a gradient."""

    title: str
    calls: int = 1
    x_needs_grad: bool = True
    factor: float | None = None  # a second argument of the function

    def describe(self, name: str) -> str:
        return self.title

    @property
    def dx_names(self) -> list[str]:
        return ["dx"] if self.calls == 1 else [f"dx{call + 1}" for call in range(self.calls)]


SCENES = (
    Scene(title="one function"),
    Scene(title="two functions, one after the other", calls=2),
    Scene(title="an x that needs no gradient", x_needs_grad=False),
    Scene(title="a function of a tensor and a number", factor=-1.5),
)


class Problem(NamedTuple):
    xs: list[Tensor]  # the input [n] of each call
    weights: list[Tensor]  # one weight [n] per rank
    dy: Tensor  # [n], the gradient of every output
    seed: int  # the tracker's seed


class Body:
    """The function that runs twice. It counts its runs and keeps track of the tensors that it creates."""

    def __init__(self, weight: Tensor, tracker: RNGTracker) -> None:
        self.weight, self.tracker = weight, tracker
        self.made: list[weakref.ref[Tensor]] = []

    def __call__(self, x: Tensor, factor: float = 1.0) -> Tensor:
        a = dropout(self.weight * copy_to_region(x), RATE, sharded=True, rng=self.tracker)
        self.made.append(weakref.ref(a))
        y = dropout(reduce_from_region(a), RATE, sharded=False, rng=self.tracker)
        return factor * F.dropout(y, RATE) ** 2


def draw(case: Scene, generator: torch.Generator, size: int) -> Problem:
    dy, *tensors = (checks.random_tensor(generator, SIZE) for _ in range(1 + case.calls + size))
    seed = int(torch.randint(10**6, (), generator=generator))
    return Problem(tensors[: case.calls], tensors[case.calls :], dy, seed)


def run(checkpoint: Callable[..., Any], case: Scene, given: Problem, group: Any) -> checks.Observed:
    tracker = seed_all(given.seed)
    weight = given.weights[dist.get_rank()].to(device()).requires_grad_()
    body = Body(weight, tracker)
    xs = [x.to(device()).requires_grad_(case.x_needs_grad) for x in given.xs]
    more = [] if case.factor is None else [case.factor]
    with record() as forward, checks.called_as(f"checkpoint(function, x,{' factor,' * len(more)} tracker=tracker)"):
        outs = [checkpoint(body, x, *more, tracker=tracker) for x in xs]
    seen: checks.Observed = {"out": outs if case.calls > 1 else outs[0], "forward traffic": checks.traffic(forward)}
    kept = sum(ref() is not None for ref in body.made)
    seen[FREED] = checks.Claim(f"of {len(body.made)} tensors made inside, {kept} are still there" if kept else "")
    runs = len(body.made)
    loss = sum((out * given.dy.to(device())).sum() for out in outs)
    with record() as backward:
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
    seen["backward traffic"] = checks.traffic(backward)
    both = (runs, len(body.made) - runs)
    seen[TWICE] = checks.Claim("" if both == (len(xs), len(xs)) else f"{both[0]} runs forward, {both[1]} backward")
    seen |= {"dw": weight.grad} | {name: x.grad for name, x in zip(case.dx_names, xs, strict=True)}
    seen[AFTERWARDS] = next_masks(tracker, case.dtype)
    return seen | {MASKS: masks(given.seed, runs=2 * case.calls)}


def next_masks(tracker: RNGTracker, dtype: torch.dtype) -> list[Tensor]:
    """Draw the next mask from torch's current state, then from "replicated" and from "sharded"."""
    ones = torch.ones(SIZE, dtype=dtype, device=device())
    return [F.dropout(ones, RATE), *(dropout(ones, RATE, sharded=sharded, rng=tracker) for sharded in (False, True))]


def masks(seed: int, runs: int) -> list[dict[str, Tensor]]:
    """Draw this rank's masks with plain PyTorch, three masks for each run of the function."""
    names = (SHARDED, REPLICATED, CURRENT)
    drawn = draw_masks([(name, (SIZE,)) for name in names] * runs, seed, dist.get_rank(), RATE)
    return [dict(zip(names, drawn[3 * run : 3 * run + 3], strict=True)) for run in range(runs)]


def gradients(
    problem: Problem, call: int, masks: Sequence[Mapping[str, Tensor]], rank: int, factor: float = 1.0
) -> tuple[Tensor, ...]:
    """Return a call's out and dx and a rank's dw (each [n]), computed in a single process from all ranks' `masks`."""
    x = problem.xs[call].clone().requires_grad_()
    weights = [weight.clone().requires_grad_() for weight in problem.weights]
    a = torch.stack([mine[SHARDED] * weight * x for mine, weight in zip(masks, weights, strict=True)])  # [p, n]
    out = factor * (a.sum(0) * masks[0][REPLICATED] * masks[0][CURRENT]) ** 2
    return out.detach(), *torch.autograd.grad(out, (x, weights[rank]), problem.dy)


def expect(case: Scene, problem: Problem, place: checks.Place) -> checks.Expected:
    drawn = [seen[MASKS] for seen in place.observed]  # each rank's masks, run by run

    def of_second_run(call: int) -> list[dict[str, Tensor]]:
        """Return the masks of a call's second run if only torch's state is reset. The last call goes backward first."""
        return [mine[2 * case.calls - 1 - call] | {CURRENT: mine[call][CURRENT]} for mine in drawn]

    calls, factor = range(case.calls), 1.0 if case.factor is None else case.factor
    same = [gradients(problem, call, [mine[call] for mine in drawn], place.index, factor) for call in calls]
    later = [gradients(problem, call, of_second_run(call), place.index, factor) for call in calls]
    outs, dxs, dws = zip(*same, strict=True)
    _, later_dxs, later_dws = zip(*later, strict=True)
    all_reduces = [("all_reduce", SIZE)] * case.calls
    right: checks.Observed = {
        "out": list(outs) if case.calls > 1 else outs[0],
        "forward traffic": place.traffic(*all_reduces),
        "backward traffic": place.traffic(*all_reduces * (2 if case.x_needs_grad else 1)),
        "dw": sum(dws),
        **{name: dx if case.x_needs_grad else None for name, dx in zip(case.dx_names, dxs, strict=True)},
        AFTERWARDS: [drawn[place.index][case.calls][name] for name in (CURRENT, REPLICATED, SHARDED)],
    }
    mistakes = {name: {LATER: dx} for name, dx in zip(case.dx_names, later_dxs, strict=True)}
    return checks.Expected(right, {"dw": {LATER: sum(later_dws)}, **mistakes})


@checks.exercise("9.5", "Run again with the same dropout")
def replay(checkpoint: Callable[..., Any]) -> checks.Verdict:
    checks.check_cases(
        "9.5",
        checkpoint,
        SCENES,
        values_on_cpu=True,
        draw=draw,
        run=run,
        expect=expect,
        questions=lambda case, observed: QUESTIONS if case.factor is None else (TWO_ARGUMENTS, *QUESTIONS),
        crash=CRASH,
    )
    return checks.Verdict("The second run drops what the first has dropped, and leaves no trace in any state.")


CRASH = (
    "`checkpoint(function, x, tracker=tracker)` returns what `function(x)` returns. Which states have to be kept "
    "before the first run, put in place before the second, and put back after it?"
)
TWO_ARGUMENTS = checks.Question(
    lambda d: "out" in d.names or d.malformed,
    "Here the function has two arguments, a tensor and a number. Do both reach it, in both of its runs?",
)
QUESTIONS = (
    checks.Question(
        lambda d: bool(d.names) and d.names <= {TWICE, FREED, "backward traffic"},
        "The numbers are right, but this is not checkpointing: what the function makes inside is kept, or it is not "
        "run again. Who runs it a second time, and when?",
    ),
    checks.Question(
        lambda d: (
            bool(d.names & {"dw", "dx", "dx1", "dx2"})
            and any(checks.has_kind(name, LATER)(d) for name in ("dw", "dx", "dx1", "dx2"))
        ),
        "The gradients belong to other masks than the output: in the second run the tracker's states stood further on. "
        "Torch puts its own current state back before it runs the function again. Who puts back those of the "
        "tracker, and when were they noted down?",
    ),
    checks.Question(
        lambda d: "out" in d.names and not d.malformed,
        "Already the output is another one. The first run draws from the states as they are, and they go on from "
        "there. What have you changed before it, which of the two contexts stands around it, and how often is the "
        "function run?",
    ),
    checks.Question(
        lambda d: any(d.kind(name) in ("none", "zeros") for name in ("dw", "dx", "dx1", "dx2")),
        "A gradient does not arrive. The function has a weight that needs one, also where x needs none. Which way of "
        "running it again knows about that? (`use_reentrant=False` does.)",
    ),
    checks.Question(
        lambda d: d.names == {AFTERWARDS},
        "All gradients are right, but the next masks are not the ones that come next. After the second run every state "
        "has to be where it was before it: which did you not put back?",
    ),
    checks.Question(
        lambda d: bool(d.names & {"dw", "dx", "dx1", "dx2"}),
        "The output is right, a gradient is not: the second run drops other places than the first. There are three "
        "states here: torch's current one, and two in the tracker. In which one does the second run start somewhere "
        "else? With two calls, has each call states of its own to go back to?",
    ),
)
