"""The check of exercise 9.5: activation checkpointing whose second run drops what the first has dropped.

The function that is run twice drops in three places, from torch's current state and from both states of a tracker:

    a = dropout_sharded(w * f(x)),   y = dropout_current(dropout_replicated(g(a))),   out = y²

Right are the gradients of the same formula on one process, with the masks that plain torch draws from the same seeds.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course.chapters.ch09.masks import CURRENT, REPLICATED, SHARDED, draw_masks
from tplab.course.checks import (
    WORLD_SIZES,
    Claim,
    Observed,
    Question,
    Traffic,
    Verdict,
    by_name,
    called_as,
    exercise,
    fresh_generator,
    has_kind,
    random_tensor,
    run_cases,
    run_ranks,
    traffic,
    verify,
)
from tplab.runtime import device, record
from tplab.tensor.mappings import copy_to_region, reduce_from_region
from tplab.tensor.rng import RNGTracker, dropout, seed_all

SIZE, RATE = 300, 0.4
TWICE, FREED = "the function runs once forward and once backward", "nothing but the inputs is kept until backward"
AFTERWARDS = "masks drawn afterwards"
LATER = "what comes out when the second run drops other places"
SECOND_RUN = "what comes out when the states stay where the second run left them"
ONE, TWO, NO_DX = "one function", "two functions, one after the other", "an x that needs no gradient"
SCENES = (ONE, TWO, NO_DX)


@dataclass(frozen=True)
class Problem:
    """The inputs of up to two calls, each rank's own weight, and an upstream gradient."""

    xs: tuple[Tensor, Tensor]
    weights: Sequence[Tensor]
    dy: Tensor
    seed: int


class Body:
    """The function that is run twice, with a count of its runs and an eye on what it makes."""

    def __init__(self, weight: Tensor, tracker: RNGTracker) -> None:
        self.weight, self.tracker, self.made = weight, tracker, []  # type: ignore[var-annotated]

    def __call__(self, x: Tensor) -> Tensor:
        a = dropout(self.weight * copy_to_region(x), RATE, sharded=True, rng=self.tracker)
        self.made.append(weakref.ref(a))
        y = dropout(reduce_from_region(a), RATE, sharded=False, rng=self.tracker)
        return F.dropout(y, RATE) ** 2


def run_scenes(checkpoint: Any, scenes: Sequence[str], problems: Sequence[Problem]) -> list[Observed]:
    """On a rank: every scene."""
    return [run_scene(checkpoint, *pair) for pair in zip(scenes, problems, strict=True)]


def run_scene(checkpoint: Callable[..., Any], scene: str, given: Problem) -> Observed:
    tracker = seed_all(given.seed)
    weight = given.weights[dist.get_rank()].to(device()).requires_grad_()
    body = Body(weight, tracker)
    xs = [x.to(device()).requires_grad_(scene != NO_DX) for x in given.xs[: 1 + (scene == TWO)]]
    with record() as forward, called_as("checkpoint(function, x, tracker=tracker)"):
        outs = [checkpoint(body, x, tracker=tracker) for x in xs]
    seen: Observed = {"out": outs[0] if scene != TWO else outs, "forward traffic": traffic(forward)}
    kept = sum(ref() is not None for ref in body.made)
    seen[FREED] = Claim(f"of {len(body.made)} tensors made inside, {kept} are still there" if kept else "")
    runs = len(body.made)
    loss = sum((out * given.dy.to(device())).sum() for out in outs)
    with record() as backward:
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
    seen["backward traffic"] = traffic(backward)
    both = (runs, len(body.made) - runs)
    seen[TWICE] = Claim("" if both == (len(xs), len(xs)) else f"{both[0]} runs forward, {both[1]} backward")
    seen |= {"dw": weight.grad} | {f"dx{i + 1}" if scene == TWO else "dx": x.grad for i, x in enumerate(xs)}
    seen[AFTERWARDS] = next_masks(tracker)
    return seen


def next_masks(tracker: RNGTracker) -> list[Tensor]:
    """The next mask of the current state, of "replicated" and of "sharded"."""
    ones = torch.ones(SIZE, dtype=torch.float64, device=device())
    return [F.dropout(ones, RATE), *(dropout(ones, RATE, sharded=sharded, rng=tracker) for sharded in (False, True))]


def masks_on_rank(problems: Sequence[Problem]) -> list[list[dict[str, Tensor]]]:
    """On a rank: for each scene the masks of one run of the function after the other."""
    names = (SHARDED, REPLICATED, CURRENT)
    scenes = []
    for given in problems:
        drawn = draw_masks([(name, (SIZE,)) for name in names] * 6, given.seed, dist.get_rank(), RATE)
        scenes.append([dict(zip(names, drawn[3 * run : 3 * run + 3], strict=True)) for run in range(6)])
    return scenes


def gradients(given: Problem, masks: Sequence[dict[str, Tensor]], x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, dx and the dw of every rank, on one process. masks: those of each rank."""
    leaf, weights = x.clone().requires_grad_(), [weight.clone().requires_grad_() for weight in given.weights]
    a = torch.stack([mine[SHARDED] * weight * leaf for mine, weight in zip(masks, weights, strict=True)])  # [p, n]
    out = (a.sum(0) * masks[0][REPLICATED] * masks[0][CURRENT]) ** 2
    out.backward(given.dy)
    return out.detach(), leaf.grad, [weight.grad for weight in weights]  # type: ignore[return-value,misc]


def expect(scene: str, given: Problem, drawn: Sequence[list[dict[str, Tensor]]]) -> tuple[list[dict], list[dict]]:
    """What is right on every rank, and what known mistakes give. drawn: each rank's masks, run by run."""
    p, calls = len(drawn), 1 + (scene == TWO)

    def run(call: int, second_run: bool = False) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The function's values and gradients; `second_run`: backward meets the tracker's next masks, not the same."""
        masks = [mine[call] for mine in drawn]
        if second_run:  # torch lays its own current state back, the tracker's states go on
            place = calls + (calls - 1 - call)
            masks = [drawn[r][place] | {CURRENT: drawn[r][call][CURRENT]} for r in range(p)]
        return gradients(given, masks, given.xs[call])

    right_runs, later = [run(call) for call in range(calls)], [run(call, second_run=True) for call in range(calls)]
    outs = [out for out, _, _ in right_runs]
    forward = Traffic.expected(p, *[("all_reduce", SIZE)] * calls)
    backward = Traffic.expected(p, *[("all_reduce", SIZE)] * calls * (1 if scene == NO_DX else 2))
    rights, alikes = [], []
    for rank in range(p):
        right: dict[str, Any] = {"out": outs if scene == TWO else outs[0], "forward traffic": forward}
        right["backward traffic"] = backward
        alike = {"dw": {LATER: torch.stack([dws[rank] for _, _, dws in later]).sum(0)}}
        right["dw"] = torch.stack([dws[rank] for _, _, dws in right_runs]).sum(0)
        for call in range(calls):
            name = f"dx{call + 1}" if scene == TWO else "dx"
            right[name] = right_runs[call][1] if scene != NO_DX else None
            alike[name] = {LATER: later[call][1]}
        right[AFTERWARDS] = [drawn[rank][calls][name] for name in (CURRENT, REPLICATED, SHARDED)]
        rights.append(right)
        alikes.append(alike)
    return rights, alikes


@exercise("9.5", "Run again with the same dropout")
def replay(checkpoint: Callable[..., Any]) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        problems = []
        for _ in SCENES:
            x, second, dy, *weights = (random_tensor(generator, SIZE) for _ in range(3 + p))
            problems.append(Problem((x, second), weights, dy, int(torch.randint(10**6, (), generator=generator))))
        drawn = run_ranks(masks_on_rank, p, problems)
        runs = run_cases(run_scenes, p, checkpoint, SCENES, problems, note=str, question=lambda scene: CRASH)
        for number, (scene, seen) in enumerate(zip(SCENES, runs, strict=True)):
            rights, alikes = expect(scene, problems[number], [rank[number] for rank in drawn])
            verify("9.5", p, seen, rights, questions=QUESTIONS, lookalikes=by_name(alikes), note=scene)
    return Verdict("The second run drops what the first has dropped, and leaves no trace in any state.")


CRASH = (
    "`checkpoint(function, x, tracker=tracker)` returns what `function(x)` returns. Which states have to be kept "
    "before the first run, put in place before the second, and put back after it?"
)
QUESTIONS = (
    Question(
        lambda d: bool(d.names) and d.names <= {TWICE, FREED, "backward traffic"},
        "The numbers are right, but this is not checkpointing: what the function makes inside is kept, or it is not "
        "run again. Who runs it a second time, and when?",
    ),
    Question(
        lambda d: (
            bool(d.names & {"dw", "dx", "dx1", "dx2"})
            and any(has_kind(name, LATER)(d) for name in ("dw", "dx", "dx1", "dx2"))
        ),
        "The gradients belong to other masks than the output: in the second run the tracker's states stood further on. "
        "Torch puts its own current state back before it runs the function again. Who puts back those of the "
        "tracker, and when were they noted down?",
    ),
    Question(
        lambda d: "out" in d.names and not d.malformed,
        "Already the output is another one. The first run draws from the states as they are, and they go on from "
        "there. What have you changed before it, which of the two contexts stands around it, and how often is the "
        "function run?",
    ),
    Question(
        lambda d: any(d.kind(name) in ("none", "zeros") for name in ("dw", "dx", "dx1", "dx2")),
        "A gradient does not arrive. The function has a weight that needs one, also where x needs none. Which way of "
        "running it again knows about that? (`use_reentrant=False` does.)",
    ),
    Question(
        lambda d: d.names == {AFTERWARDS},
        "All gradients are right, but the next masks are not the ones that come next. After the second run every state "
        "has to be where it was before it: which did you not put back?",
    ),
    Question(
        lambda d: bool(d.names & {"dw", "dx", "dx1", "dx2"}),
        "The output is right, a gradient is not: the second run drops other places than the first. There are three "
        "states here: torch's current one, and two in the tracker. In which one does the second run start somewhere "
        "else? With two calls, has each call states of its own to go back to?",
    ),
)
