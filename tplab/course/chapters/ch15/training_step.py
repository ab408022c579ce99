"""The check of exercise 15.3: one training step on a grid of ranks, against the same step on one process in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.chapters.ch15.small_model import (
    CUTS,
    PARAMETERS,
    Case,
    SmallModel,
    messages_of_model,
    reduced,
    whole_loss,
)
from tplab.course.chapters.ch15.step_questions import (
    BY_DP,
    BY_M,
    CRASH,
    DP_ONCE,
    LAST_OF_M,
    LOSS_OF_LAST,
    LOSS_OF_OWN,
    LOSS_SUM,
    LOSS_WORLD,
    MARKED_ONCE,
    NORM_AFTER,
    NORM_OF_RANK,
    NOT_CLIPPED,
    QUESTIONS,
    REPLICATED,
    STUCK,
    SUM_OF_DP,
    SUM_OF_M,
    TENSORS,
    TWO,
    TWO_STEPS,
    UNCHANGED,
    WITHOUT_DP,
)
from tplab.course.checks import (
    WORLD_SIZES,
    Claim,
    NotRun,
    Observed,
    Snapshot,
    Verdict,
    by_name,
    called_as,
    exercise,
    fresh_generator,
    portable,
    random_tensor,
    run_cases,
    verify,
)
from tplab.course.checks.describe import describe
from tplab.data.grid import Grid, mesh
from tplab.runtime import device, record

LR = 0.2  # of plain SGD, which hides no factor
STEPS = 2
FEW = 8  # numbers besides the gradients: norm, loss
CASES: dict[int, list[Case]] = {
    1: [Case(1, 1, 3, 1e3), Case(1, 1, 1, 0.05)],
    2: [Case(1, 2, 3, 1e3), Case(2, 1, 3, 1e3, True), Case(2, 1, 1, 0.05, True)],
    4: [Case(2, 2, 3, 0.05, True), Case(4, 1, 1, 1e3)],
}

Weights = dict[str, Tensor]
Batch = list[list[tuple[Tensor, Tensor]]]  # for each replica its micro-batches


def run_steps(step: Callable[..., Any], cases: Sequence[Case], data: Sequence[Any]) -> list[list[Observed]]:
    """On a rank: loss, norm and weights after each step of each case."""
    seen = []
    for case, (weights, batches) in zip(cases, data, strict=True):
        grid = mesh(dp=case.dp, tp=case.tp)
        model = SmallModel(weights, case, grid.get_group("tp"))
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        replica = Grid(dp=case.dp, tp=case.tp).place(dist.get_rank()).dp
        seen.append([one_step(step, model, optimizer, batch[replica], grid, case) for batch in batches])
    return seen


def one_step(step: Callable[..., Any], model: Any, optimizer: Any, own: Any, grid: Any, case: Case) -> Observed:
    own = [(x.to(device()), y.to(device())) for x, y in own]
    before = Snapshot(**{f"micro-batch {k}": x for k, (x, _) in enumerate(own)})
    call = f"training_step(model, optimizer, {case.m} micro-batches, mesh, max_norm={case.max_norm})"
    with record() as section, called_as(call):
        said = step(model, optimizer, own, grid, case.max_norm)
    pair = isinstance(said, (tuple, list)) and len(said) == 2
    loss, norm = said if pair else [NotRun("no two numbers came out")] * 2
    sent = {axis: reduced(section, grid.get_group(axis)) for axis in ("tp", "dp")}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    marked = sum(p.numel() for p in model.parameters() if getattr(p, "sequence_parallel", False))
    over = {"dp": sent["dp"] - numbers, "tp": sent["tp"] - messages_of_model(case) - marked}
    return {
        "loss": number(loss),
        "norm": number(norm),
        TWO: Claim("" if pair else f"it returned {describe(portable(said))}"),
        TENSORS: Claim(
            " and ".join(f"{n} is a tensor" for n, v in {"loss": loss, "norm": norm}.items() if _is_tensor(v))
        ),
        **{name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        DP_ONCE: Claim(f"{sent['dp']} numbers, of {numbers} parameters" if case.dp > 1 and over["dp"] > FEW else ""),
        MARKED_ONCE: Claim(f"{over['tp']} numbers too many" if case.tp > 1 and over["tp"] > FEW else ""),
        "inputs unchanged": before.changed(),
    }


def number(said: Any) -> Any:
    """A float64 tensor; anything that is no number as it is."""
    if isinstance(said, bool) or not isinstance(said, (int, float, Tensor)):
        return said
    return torch.as_tensor(said, dtype=torch.float64).detach().cpu().reshape(()) if _is_one(said) else said


def _is_tensor(said: Any) -> bool:
    return isinstance(said, Tensor)


def _is_one(said: Any) -> bool:
    return not isinstance(said, Tensor) or said.numel() == 1


def gradients(weights: Weights, x: Tensor, y: Tensor) -> tuple[float, Weights]:
    """Loss of a micro-batch and its gradients, on one process."""
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    loss = whole_loss(leaves, x, y)
    values = torch.autograd.grad(loss, list(leaves.values()))
    return loss.item(), dict(zip(leaves, values, strict=True))


def combined(parts: Sequence[Weights], factor: float) -> Weights:
    return {name: factor * torch.stack([part[name] for part in parts]).sum(0) for name in PARAMETERS}


def norm_of(gradient: Weights) -> float:
    return float(torch.cat([value.flatten() for value in gradient.values()]).norm())


def after(weights: Weights, gradient: Weights, max_norm: float) -> Weights:
    factor = min(1.0, max_norm / (norm_of(gradient) + 1e-6))
    return {name: weights[name] - LR * factor * gradient[name] for name in weights}


def shard_of(weights: Weights, t: int, tp: int) -> Weights:
    """What tensor-parallel rank t holds."""
    return {n: v.chunk(tp, CUTS[n])[t].contiguous() if n in CUTS else v for n, v in weights.items()}


def rank_norm(gradient: Weights, case: Case, t: int) -> dict[str, float]:
    """Norms that known mistakes give on tensor-parallel rank t."""
    squares = {name: float(value.square().sum()) for name, value in gradient.items()}
    whole = sum(size for name, size in squares.items() if name not in CUTS)
    return {
        NORM_OF_RANK: norm_of(shard_of(gradient, t, case.tp)),
        REPLICATED: (sum(squares.values()) + (case.tp - 1) * whole) ** 0.5,
        NORM_AFTER: min(norm_of(gradient), case.max_norm),
        f"{NORM_AFTER} ": norm_of(gradient) * min(1.0, case.max_norm / (norm_of(gradient) + 1e-6)),
    }


def expected(case: Case, weights: Weights, batch: Batch, place: Any) -> tuple[Observed, dict[str, Any], Weights]:
    """What is right on a rank after a step, what known mistakes give there, and the whole new weights."""
    of_all = [[gradients(weights, x, y) for x, y in micro] for micro in batch]
    losses = [[loss for loss, _ in own] for own in of_all]
    grads = [[g for _, g in own] for own in of_all]
    flat = [g for own in grads for g in own]
    right, mine = combined(flat, 1 / len(flat)), grads[place.dp]
    new = after(weights, right, case.max_norm)
    wrong = {
        SUM_OF_M: combined(flat, 1 / case.dp),
        SUM_OF_DP: combined(flat, 1 / case.m),
        BY_M: combined(flat, 1 / case.m / len(flat)),
        BY_DP: combined(flat, 1 / case.dp / len(flat)),
        WITHOUT_DP: combined(mine, 1 / case.m),
        LAST_OF_M: combined([own[-1] for own in grads], 1 / case.dp),
        f"{LAST_OF_M} ": combined([own[-1] for own in grads], 1 / len(flat)),
    }
    stepped = {label: after(weights, g, case.max_norm) for label, g in wrong.items()}
    stepped[NOT_CLIPPED], stepped[UNCHANGED] = after(weights, right, 1e9), weights
    stepped[TWO_STEPS] = micro_steps(case, weights, batch)
    mean = sum(map(sum, losses)) / len(flat)
    alike: dict[str, dict[str, float]] = {
        "norm": {label: norm_of(g) for label, g in wrong.items()} | rank_norm(right, case, place.tp),
        "loss": {
            LOSS_SUM: mean * case.m,
            LOSS_OF_LAST: losses[place.dp][-1],
            f"{LOSS_OF_LAST} ": losses[place.dp][-1] / case.m,
            LOSS_OF_OWN: sum(losses[place.dp]) / case.m,
            SUM_OF_DP: mean * case.dp,
            LOSS_WORLD: mean * case.tp,
        },
    }
    scalars = {"loss": tensor(mean), "norm": tensor(norm_of(right))}
    looks: dict[str, Any] = {
        name: {k: tensor(v) if abs(v - float(scalars[name])) > 1e-9 else NOWHERE for k, v in of.items()}
        for name, of in alike.items()
    }
    held, labels = shard_of(new, place.tp, case.tp), {k: shard_of(v, place.tp, case.tp) for k, v in stepped.items()}
    for name in PARAMETERS:
        looks[name] = {k: v[name] if not torch.allclose(v[name], held[name]) else NOWHERE for k, v in labels.items()}
    return {**scalars, **held}, looks, new


def micro_steps(case: Case, weights: Weights, batch: Batch) -> Weights:
    """A step of the optimizer after each micro-batch."""
    for k in range(case.m):
        parts = [gradients(weights, *own[k])[1] for own in batch]
        weights = after(weights, combined(parts, 1 / len(parts) / case.m), case.max_norm)
    return weights


NOWHERE = torch.tensor(float("nan"), dtype=torch.float64)  # equals nothing


def tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def scene(case: Case, generator: torch.Generator) -> tuple[Any, list[list[Any]]]:
    """What the ranks are given, and for each step what is right on each rank."""
    weights = {name: random_tensor(generator, *shape) for name, shape in PARAMETERS.items()}
    batches = [
        [[case.micro_batch(generator) for _ in range(case.m)] for _ in range(case.dp)] for _ in range(STEPS)
    ]  # step, replica, micro-batch
    rows, now = [], weights
    for batch in batches:
        places = [Grid(dp=case.dp, tp=case.tp).place(rank) for rank in range(case.dp * case.tp)]
        found = [expected(case, now, batch, place) for place in places]
        rows.append([row[:2] for row in found])
        now = found[0][2]
    return (weights, batches), rows


@exercise("15.3", "A training step")
def a_training_step(step: Callable[..., Any]) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        scenes = [scene(case, generator) for case in CASES[p]]
        given = [data for data, _ in scenes]
        runs = run_cases(
            run_steps, p, step, CASES[p], given, note=Case.note, question=lambda case: CRASH, stuck=lambda case: STUCK
        )
        for case, (_, rows), seen in zip(CASES[p], scenes, runs, strict=True):
            for number, row in enumerate(rows):
                verify(
                    "15.3", p, [on_rank[number] for on_rank in seen], [right for right, _ in row],
                    questions=QUESTIONS(number), lookalikes=by_name([alike for _, alike in row]),
                    note=f"{case.note()}, step {number + 1}",
                )  # fmt: skip
    return Verdict("The same step as on one process, and every gradient travelled once.")
