"""The check of exercise 13.4: one stage of a pipeline, run on real ranks, against the whole chain on one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.course.chapters.ch13.lists import Item, Lists, actions, peak
from tplab.course.chapters.ch13.stage_questions import (
    IN_ORDER,
    KEPT,
    LAST_LOSS,
    LAST_ONLY,
    LAST_ONLY_OVER_M,
    MANY_TIMES,
    QUESTIONS,
    STUCK,
    SUM_OF_LOSSES,
    UNWAITED,
)
from tplab.course.chapters.ch13.watched_stage import WatchedStage
from tplab.course.checks import (
    WORLD_SIZES,
    Call,
    Claim,
    Lookalikes,
    Observed,
    Snapshot,
    Traffic,
    Verdict,
    called_as,
    exercise,
    fresh_generator,
    random_tensor,
    run_cases,
    traffic,
    verify,
)
from tplab.pipeline.p2p import Lanes
from tplab.runtime import device, record

BATCH, HIDDEN = 3, 5


@dataclass(frozen=True)
class Case:
    """A schedule of m micro-batches on all ranks."""

    name: str
    lists: Lists
    m: int


@dataclass(frozen=True)
class Data:
    """Weights of all stages [p, h, h + 1], the bias in the last column; micro-batches [m, b, h]."""

    weights: Tensor
    inputs: Tensor
    targets: Tensor


def all_forwards_first(p: int, m: int, order: Sequence[int]) -> Lists:
    return [[(kind, k) for kind in "FB" for k in order]] * p


def in_turn(p: int, m: int) -> Lists:
    """1F1B, by what a rank may hold: forward while fewer than p - rank are live, else backward."""
    rows: list[list[Item]] = []
    for rank in range(p):
        row: list[Item] = []
        forward = backward = 0
        while backward < m:
            if forward < m and forward - backward < p - rank:
                row.append(("F", forward))
                forward += 1
            else:
                row.append(("B", backward))
                backward += 1
        rows.append(row)
    return rows


def cases(p: int) -> list[Case]:
    m = {1: 3, 2: 5, 4: 7}[p]
    return [
        Case(f"GPipe's lists, m = {p + 1}", all_forwards_first(p, p + 1, range(p + 1)), p + 1),
        Case(f"1F1B's lists, m = {m}", in_turn(p, m), m),
        Case("lists that go from the last micro-batch to the first, m = 3", all_forwards_first(p, 3, (2, 1, 0)), 3),
    ]


@exercise("13.4", "A stage at work")
def stage_at_work(run_stage: Callable[..., Any]) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        asked = cases(p)
        data = [_draw(p, case.m, generator) for case in asked]
        runs = run_cases(
            _run,
            p,
            run_stage,
            asked,
            data,
            note=lambda case: case.name,
            stuck=lambda case: STUCK,
        )
        for case, mine, seen in zip(asked, data, runs, strict=True):
            right, lookalikes = _right(p, case, mine)
            verify("13.4", p, seen, right, questions=QUESTIONS, lookalikes=lookalikes, note=case.name)
    return Verdict("Loss and gradients of one process, whatever the order, and no more is kept than the lists ask for.")


def _draw(p: int, m: int, generator: torch.Generator) -> Data:
    return Data(
        random_tensor(generator, p, HIDDEN, HIDDEN + 1),
        random_tensor(generator, m, BATCH, HIDDEN),
        random_tensor(generator, m, BATCH, HIDDEN),
    )


# On a rank


def _run(run_stage: Callable[..., Any], asked: Sequence[Case], data: Sequence[Data]) -> list[Observed]:
    lanes = Lanes()
    seen = []
    for case, mine in zip(asked, data, strict=True):
        seen.append(_run_case(run_stage, lanes, case, mine))
        if seen[-1][UNWAITED]:
            break  # what comes next might wait for it for ever
    return seen + [seen[-1]] * (len(asked) - len(seen))


def _run_case(run_stage: Callable[..., Any], lanes: Lanes, case: Case, data: Data) -> Observed:
    rank, p = lanes.rank, lanes.world_size
    stage = WatchedStage(data.weights[rank].to(device()), _flow(data, rank).to(device()))
    inputs = list(data.inputs.to(device()).clone()) if rank == 0 else None
    targets = list(data.targets.to(device()).clone()) if rank == p - 1 else None
    template = torch.zeros(BATCH, HIDDEN, dtype=torch.float64, device=device())
    row = actions(case.lists)[rank]
    given = {"inputs": inputs, "targets": targets}
    watched = {f"{name}[{k}]": x for name, xs in given.items() for k, x in enumerate(xs or ())}
    before = Snapshot(weight=stage.weight, bias=stage.bias, **watched)
    with record() as section, called_as(f"run_stage(stage, actions, lanes, template, loss, ...) with {case.name}"):
        loss = run_stage(stage, row, lanes, template, F.mse_loss, inputs, targets)
    sent = traffic(section)
    most, allowed = stage.most_live, peak(case.lists[rank]) + 1  # one may be on its way in while one goes out
    return {
        "loss": _loss(loss),
        "dW": stage.weight.grad,
        "db": stage.bias.grad,
        IN_ORDER: Claim(stage.out_of_step([f"{kind}{k}" for kind, k in case.lists[rank]])),
        "messages": sent,
        UNWAITED: Claim("" if all(call.waited for call in sent) else "nobody waited for some of them"),
        KEPT: Claim("" if most <= allowed else f"{most} micro-batches at once; {allowed - 1} are enough"),
        "the actions are as they were": Claim("" if row == actions(case.lists)[rank] else "the list was changed"),
        "inputs unchanged": before.changed(),
    }


def _flow(data: Data, stop: int) -> Tensor:
    """What goes into stage `stop`, [m, b, h]: the micro-batches, taken through the stages before it."""
    x = data.inputs
    for weight in data.weights[:stop]:
        x = torch.tanh(F.linear(x, weight[:, :-1], weight[:, -1]))
    return x


def _loss(loss: Any) -> Any:
    if isinstance(loss, float):
        return torch.tensor(loss, dtype=torch.float64)
    return loss.reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 else loss


# What is right, and what known mistakes give


def _right(p: int, case: Case, data: Data) -> tuple[list[dict[str, Any]], Lookalikes]:
    weights = data.weights.clone().requires_grad_()
    parts = []
    for k in range(case.m):
        y = _flow(Data(weights, data.inputs[k], data.targets[k]), p)
        parts.append(F.mse_loss(y, data.targets[k]))
    (gradient,) = torch.autograd.grad(torch.stack(parts).mean(), weights, retain_graph=True)
    (of_last,) = torch.autograd.grad(parts[case.lists[-1][-1][1]], weights)
    losses = torch.stack(parts).detach()
    right = [
        {
            "loss": losses.mean() if rank == p - 1 else None,
            "dW": gradient[rank, :, :-1],
            "db": gradient[rank, :, -1],
            "messages": _messages(p, rank, case.m),
        }
        for rank in range(p)
    ]
    return right, {
        "loss": {SUM_OF_LOSSES: [losses.sum()] * p, LAST_LOSS: [losses[case.lists[-1][-1][1]]] * p},
        "dW": _alike(gradient, of_last, case.m, slice(None, -1)),
        "db": _alike(gradient, of_last, case.m, -1),
    }


def _alike(gradient: Tensor, of_last: Tensor, m: int, columns: Any) -> dict[str, list[Tensor]]:
    return {
        MANY_TIMES: list(m * gradient[..., columns]),
        LAST_ONLY: list(of_last[..., columns]),
        LAST_ONLY_OVER_M: list(of_last[..., columns] / m),
    }


def _messages(p: int, rank: int, m: int) -> Traffic:
    """The next rank gets m outputs and gives m gradients; the one before gives m outputs and gets m gradients."""
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < p]
    calls = [call for other in neighbours for call in (("send", (rank, other)), ("recv", (other, rank)))] * m
    return Traffic(Call(kind, BATCH * HIDDEN, "float64", pair) for kind, pair in calls)
