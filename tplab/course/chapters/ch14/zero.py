"""The check of exercise 14.2: ZeRO-1, the optimizer's state shared out over the data-parallel ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
    Claim,
    Observed,
    Question,
    Traffic,
    Verdict,
    ask_about_group,
    by_name,
    called_as,
    exercise,
    fresh_generator,
    group_question,
    has_kind,
    make_group,
    member_of,
    portable,
    random_tensor,
    run_cases,
    traffic,
    verify,
)
from tplab.runtime import device, record

SIZES = ((3, 5), (7,), (3, 3))  # 31 numbers: neither 2 nor 4 divides them
NUMBERS = 31
STEPS = 3
NO_OPTIMIZER = "`self.optimizer` is an optimizer"
HELD = "numbers in the optimizer's state"

Flat = list[Tensor]  # one tensor for each parameter


@dataclass(frozen=True)
class Case:
    """An optimizer with its options, and how many tensors of a parameter's size it keeps."""

    optimizer: type[Optimizer]
    options: tuple[tuple[str, float], ...]
    kept: int
    groups: tuple[tuple[int, ...], ...] | None = None

    def note(self) -> str:
        return f"with {self.optimizer.__name__}" + (f", {IN_GROUPS}" if self.groups else "")


MOMENTUM = Case(SGD, (("lr", 0.1), ("momentum", 0.9)), 1)
# Adam hides a factor in the gradients: a large eps shows it
ADAMW = Case(AdamW, (("lr", 0.1), ("eps", 0.3), ("weight_decay", 0.2)), 2)
CASES = (MOMENTUM, ADAMW, Case(SGD, (("lr", 0.1), ("momentum", 0.9)), 1, GROUPS))


def run_steps(zero_class: Callable[..., Any], cases: Sequence[Case], data: Sequence[Any]) -> list[list[Observed]]:
    """On a rank: weights and traffic after each step of each case, and what the optimizer keeps."""
    seen = []
    for case, given in zip(cases, data, strict=True):
        group = make_group(case.groups)
        mine = given[dist.get_rank()]
        params = [nn.Parameter(value.clone().to(device())) for value in mine["weights"]]
        options = dict(case.options)
        with called_as(f"ZeRO1(parameters, {case.optimizer.__name__}, group, **{options})"):
            zero = zero_class(params, case.optimizer, group, **options)
        seen.append([one_step(zero, params, gradients) for gradients in mine["gradients"]])
    return seen


def one_step(zero: Any, params: list[nn.Parameter], gradients: Flat) -> Observed:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone().to(device())
    with record() as section, called_as("step()"):
        zero.step()
    optimizer = getattr(zero, "optimizer", None)
    return {
        "weights": [portable(param) for param in params],
        "traffic": traffic(section),
        HELD: held(optimizer) if isinstance(optimizer, Optimizer) else None,
        NO_OPTIMIZER: Claim("" if isinstance(optimizer, Optimizer) else f"it is a {type(optimizer).__name__}"),
    }


def held(optimizer: Optimizer) -> int:
    """How many numbers the tensors of its state hold; the count of the steps is not one of them."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() for value in values if isinstance(value, Tensor) and value.dim() > 0)


def plain(case: Case, weights: Flat, gradients: Sequence[Flat]) -> list[Flat]:
    """The weights after each step of the optimizer on one process."""
    params = [nn.Parameter(value.clone()) for value in weights]
    options: dict[str, Any] = dict(case.options)
    optimizer = case.optimizer(params, **options)
    after = []
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
        after.append([param.detach().clone() for param in params])
    return after


def summed(parts: Sequence[Sequence[Flat]], factor: float = 1.0) -> list[Flat]:
    """For each step and parameter the sum of the ranks' gradients, times a factor."""
    return [
        [torch.stack([part[step][i] for part in parts]).sum(0) * factor for i in range(len(SIZES))]
        for step in range(STEPS)
    ]


def own_part_only(start: Flat, after: Flat, index: int, q: int) -> Flat:
    """The new values in this rank's part of the flat parameters, the old ones elsewhere."""
    length = -(-NUMBERS // q)
    old, new = (torch.cat([value.flatten() for value in values]) for values in (start, after))
    place = torch.arange(NUMBERS)
    mixed = torch.where((place >= index * length) & (place < (index + 1) * length), new, old)
    pieces = mixed.split([value.numel() for value in start])
    return [piece.view_as(value) for piece, value in zip(pieces, start, strict=True)]


AVERAGED = "what comes out when the gradients are averaged, not added up"
ALONE = "what comes out with this rank's gradients alone"
OWN_PART = "the new weights in this rank's part only, the old ones elsewhere"
UNCHANGED = "the weights before the first step"


def scene(case: Case, p: int, generator: torch.Generator) -> tuple[list[Observed], list[list[Any]]]:
    """For every rank: weights and gradients; and for each step what is right, and what mistakes give."""
    members = member_of(p, case.groups)
    starts = [[random_tensor(generator, *size) for size in SIZES] for _ in case.groups or (0,)]
    gradients = [[[random_tensor(generator, *s) for s in SIZES] for _ in range(STEPS)] for _ in range(p)]
    given: list[Observed] = []
    rights: list[list[Any]] = []
    for rank, (number, ranks) in enumerate(members):
        start, q, index = starts[number], len(ranks), ranks.index(rank)
        given.append({"weights": start, "gradients": gradients[rank]})
        parts = [gradients[other] for other in ranks]
        right = plain(case, start, summed(parts))
        averaged, alone = plain(case, start, summed(parts, 1 / q)), plain(case, start, gradients[rank])
        length = -(-NUMBERS // q)
        sent = (("reduce_scatter", q * length), ("all_gather", q * length))
        rows = []
        for step in range(STEPS):
            expected = {
                "weights": right[step],
                HELD: case.kept * length,
                "traffic": Traffic.expected(q, *sent, group=ranks),
            }
            alike = {UNCHANGED: start}
            if q > 1:
                alike |= {AVERAGED: averaged[step], ALONE: alone[step]}
                alike |= {OWN_PART: own_part_only(start, right[step], index, q)}
            rows.append((expected, {"weights": alike}))
        rights.append(rows)
    return given, rights


@exercise("14.2", "A step of ZeRO-1")
def zero_one(zero_class: Callable[..., Any]) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        here = [case for case in CASES if case.groups is None or p == 4]
        scenes = [scene(case, p, generator) for case in here]
        runs = run_cases(
            run_steps,
            p,
            zero_class,
            here,
            [given for given, _ in scenes],
            note=Case.note,
            question=lambda case: ask_about_group(WHOSE_GROUP) if case.groups else CRASH,
            stuck=lambda case: ask_about_group(WHOSE_GROUP) if case.groups else None,
        )
        for case, (_, rights), seen in zip(here, scenes, runs, strict=True):
            for step in range(STEPS):
                verify(
                    "14.2",
                    p,
                    [on_rank[step] for on_rank in seen],
                    [row[step][0] for row in rights],
                    questions=[*([group_question(WHOSE_GROUP)] if case.groups else []), *questions(step)],
                    lookalikes=by_name([row[step][1] for row in rights]),
                    note=f"{case.note()}, step {step + 1}",
                )
    return Verdict("The weights of the plain optimizer, with 1/p of its state on each rank.")


WHOSE_GROUP = "Which collective, or which call for a rank or a size, was not given `group`?"
CRASH = (
    f"The parameters have {NUMBERS} numbers here, which neither 2 nor 4 divides. Write the length beside each flat "
    "tensor: all numbers, all numbers with the zeros behind them, one rank's part. Which line expects another one?"
)


def questions(step: int) -> list[Question]:
    return [
        Question(
            lambda d: NO_OPTIMIZER in d.names,
            "`self.optimizer` should be an `optimizer_class([self.shard], **options)`. Where do you make it?",
        ),
        Question(
            lambda d: HELD in d.names and "weights" not in d.names,
            "The weights are right, but the optimizer does not keep what it should for this rank's part, and for "
            "nothing else. Which parameters did you give it, and did the options reach it?",
        ),
        Question(
            lambda d: "traffic" in d.names and "weights" not in d.names,
            "The weights are right. One reduce-scatter brings each rank the sum of its part of the gradients, one "
            "all-gather all parts of the new weights. What else do you send, or in how many pieces?",
        ),
        Question(
            has_kind("weights", OWN_PART),
            "Each rank has new weights in its own part, and old ones in the parts of the others. Who tells it theirs?",
        ),
        Question(
            has_kind("weights", UNCHANGED) if not step else lambda d: False,
            "The weights are what they were. The optimizer changes `self.shard`: who brings the new values back into "
            "the parameters of the model?",
        ),
        Question(
            has_kind("weights", AVERAGED),
            "The losses of the ranks are parts of one mean already: their gradients add up. Where do you divide?",
        ),
        Question(
            has_kind("weights", ALONE),
            "These weights come from this rank's gradients. Which collective adds up those of all ranks?",
        ),
        Question(
            lambda d: "weights" in d.names and step > 0,
            "The first step was right. What does the second one start from: the weights of the first, and the state "
            "that the optimizer kept?",
        ),
        Question(
            lambda d: "weights" in d.names,
            "Follow one number: its place among all flat gradients, the rank it goes to, its place in that rank's "
            "part, and its way back into the parameter. Where does it end up somewhere else?",
        ),
    ]
