"""The check of exercise 9.4: a block with dropout in a sharded and in a replicated place.

Right is the same block on one process, in float64: inside it drops what all ranks drop of their own columns, at the end
what every rank drops alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course.chapters.ch09.block_questions import (
    AFTERWARDS,
    BEFORE_GELU,
    CRASH,
    EVAL,
    NO_INNER,
    NO_OUTER,
    NONE,
    NOT_SCALED,
    OUT,
    QUESTIONS,
    RESIDUAL_TOO,
    SECOND,
    STREAMS,
    WHOSE_GROUP,
)
from tplab.course.chapters.ch09.masks import REPLICATED, SHARDED, draw_masks
from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
    Observed,
    Traffic,
    Verdict,
    ask_about_group,
    by_name,
    called_as,
    exercise,
    fresh_generator,
    group_question,
    make_group,
    member_of,
    observe,
    random_tensor,
    run_ranks,
    verify,
)
from tplab.runtime import device
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.rng import seed_all

HIDDEN, FFN, LEADING, RATE = 8, 16, (4, 5), 0.4
NAMES = {"A": "up.weight", "a": "up.bias", "B": "down.weight", "c": "down.bias"}
CUTS = {"A": 0, "a": 0, "B": 1}


@dataclass(frozen=True)
class Problem:
    """The full weights, inputs and an upstream gradient of one group of ranks, and the seed of its tracker."""

    full: Mapping[str, Tensor]
    xs: tuple[Tensor, Tensor]
    dy: Tensor
    seed: int


def problem(generator: torch.Generator) -> Problem:
    shapes = {"A": (FFN, HIDDEN), "a": (FFN,), "B": (HIDDEN, FFN), "c": (HIDDEN,)}
    full = {name: random_tensor(generator, *shape) for name, shape in shapes.items()}
    x, second, dy = (random_tensor(generator, *LEADING, HIDDEN) for _ in range(3))
    return Problem(full, (x, second), dy, int(torch.randint(10**6, (), generator=generator)))


def run_block(block_class: Any, problems: Sequence[Problem], groups: Sequence[Sequence[int]] | None) -> Observed:
    """On a rank: two passes while training and one in eval mode."""
    group = make_group(groups)
    given = problems[member_of(dist.get_world_size(), groups)[dist.get_rank()][0]]
    tracker = seed_all(given.seed, group)
    state = torch.get_rng_state()
    with called_as(f"ParallelBlock({HIDDEN}, {FFN}, {RATE}, tracker, group=group)"):
        block = block_class(HIDDEN, FFN, RATE, tracker, group=group, device=device(), dtype=torch.float64)
    load_full_state_dict(block, {NAMES[name]: value.to(device()) for name, value in given.full.items()}, group)
    torch.set_rng_state(state)
    x, second = (tensor.to(device()) for tensor in given.xs)
    params = dict(block.named_parameters())
    watched = {letter: params[name] for letter, name in NAMES.items()}
    seen = observe(block, given.dy.to(device()), inputs={"x": x}, parameters=watched)
    block.eval()
    seen[EVAL] = block(x)
    block.train()
    seen[SECOND] = block(second)
    seen[AFTERWARDS] = torch.rand(4)
    return seen


def masks_on_rank(
    problems: Sequence[Problem], groups: Sequence[Sequence[int]] | None
) -> dict[tuple[str, str], list[Tensor]]:
    """On a rank: for each choice of streams the masks inside and at the end, of the first and the second pass."""
    group = make_group(groups)
    index, q = dist.get_rank(group), dist.get_world_size(group)
    given = problems[member_of(dist.get_world_size(), groups)[dist.get_rank()][0]]
    inner, outer = (*LEADING, FFN // q), (*LEADING, HIDDEN)
    return {
        (inside, end): draw_masks([(inside, inner), (end, outer)] * 2, given.seed, index, RATE)
        for inside, end in [(SHARDED, REPLICATED), *STREAMS]
    }


def forward(
    w: Mapping[str, Tensor], x: Tensor, inner: Tensor | float, outer: Tensor | float, before_gelu: bool = False
) -> Tensor:
    """The block on one process: `inner` is the mask of all columns, `outer` that of the output."""
    z = F.linear(x, w["A"], w["a"])  # [b, s, m]
    z = F.gelu(z * inner) if before_gelu else F.gelu(z) * inner
    return x + F.linear(z, w["B"], w["c"]) * outer  # [b, s, h]


def expect(
    given: Problem, drawn: Sequence[Mapping[tuple[str, str], list[Tensor]]], index: int, ranks: tuple[int, ...], p: int
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """What is right on rank `index` of the group, and what known mistakes give there. drawn: the masks of its ranks."""

    def outcome(streams: tuple[str, str], weights: Mapping[str, Tensor], x: Tensor, second: bool = False) -> Tensor:
        inner = torch.cat([mine[streams][2 * second] for mine in drawn], -1)  # [b, s, m]
        return forward(weights, x, inner, drawn[index][streams][2 * second + 1])

    right_streams = (SHARDED, REPLICATED)
    x, second = given.xs
    leaves = {name: value.clone().requires_grad_() for name, value in {"x": x, **given.full}.items()}
    out = outcome(right_streams, leaves, leaves["x"])
    out.backward(given.dy)
    gradients: dict[str, Tensor] = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    right: dict[str, Any] = {OUT: out.detach(), SECOND: outcome(right_streams, given.full, second, second=True)}
    right[EVAL] = forward(given.full, x, 1.0, 1.0)
    right |= {
        f"d{name}": gradients[name].chunk(len(ranks), CUTS[name])[index] if name in CUTS else gradients[name]
        for name in gradients
    }
    right[AFTERWARDS] = torch.rand(4, generator=torch.Generator().manual_seed(given.seed))
    for direction in ("forward", "backward"):
        right[f"{direction} traffic"] = Traffic.expected(p, ("all_reduce", x.numel()), group=ranks)
    inner, outer = (torch.cat([mine[right_streams][0] for mine in drawn], -1), drawn[index][right_streams][1])
    alike = {label: outcome(streams, given.full, x) for streams, label in STREAMS.items()}
    alike |= {
        NONE: forward(given.full, x, 1.0, 1.0),
        NO_INNER: forward(given.full, x, 1.0, outer),
        NO_OUTER: forward(given.full, x, inner, 1.0),
        RESIDUAL_TOO: forward(given.full, x, inner, 1.0) * outer,
        NOT_SCALED: forward(given.full, x, inner * (1 - RATE), outer * (1 - RATE)),
        BEFORE_GELU: forward(given.full, x, inner, outer, before_gelu=True),
    }
    return right, {OUT: alike}


@exercise("9.4", "A block that drops in both kinds of places")
def block(block_class: Any) -> Verdict:
    for p in WORLD_SIZES:
        for groups in (None, GROUPS) if p == 4 else (None,):
            generator = fresh_generator()
            problems = [problem(generator) for _ in groups or (0,)]
            members = member_of(p, groups)
            drawn = run_ranks(masks_on_rank, p, problems, groups)
            table = [
                expect(problems[number], [drawn[other] for other in ranks], ranks.index(rank), ranks, p)
                for rank, (number, ranks) in enumerate(members)
            ]
            whose = ask_about_group(WHOSE_GROUP) if groups else None
            note = IN_GROUPS if groups else ""
            seen = run_ranks(
                run_block, p, block_class, problems, groups, question=whose or CRASH, stuck=whose, note=note
            )
            verify(
                "9.4",
                p,
                seen,
                [right for right, _ in table],
                questions=[group_question(WHOSE_GROUP)] if groups else QUESTIONS,
                lookalikes=by_name([alike for _, alike in table]),
                note=note,
            )
    return Verdict("Inside the MLP each rank drops its own places, at the end all ranks drop the same ones.")
