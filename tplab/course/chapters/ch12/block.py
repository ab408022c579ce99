"""The check of exercise 12.2: a block that holds s/p tokens wherever no matrix needs all of them.

The middle of the block is the check's own: two matrices cut by columns and by rows, without any communication. Right
is the same block on one process, in plain torch, in which each rank's tokens go through a copy of the norm's weights
and of the bias of their own: so the gradient of a copy is what that rank has to hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.course.chapters.ch12.block_questions import (
    ALL_TOKENS,
    CRASH,
    DROPOUT_QUESTIONS,
    GETS_RNG,
    OWN_TOKENS,
    QUESTIONS,
    WHOSE_GROUP,
    dropout_mistakes,
    mistakes,
)
from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
    Claim,
    Observed,
    Traffic,
    Verdict,
    ask_about_group,
    by_name,
    exercise,
    fresh_generator,
    group_question,
    make_group,
    member_of,
    observe,
    random_tensor,
    run_cases,
    verify,
)
from tplab.runtime import device
from tplab.tensor.rng import seed_all

B, S, H, FFN, RATE = 2, 8, 4, 8, 0.4
NORM = ("norm.weight", "norm.bias", "bias")


@dataclass(frozen=True)
class Case:
    """One way to run the block."""

    rate: float = 0.0
    training: bool = True
    groups: tuple[tuple[int, ...], ...] | None = None

    def note(self) -> str:
        note = f"hidden_dropout={self.rate}" if self.rate else "without dropout"
        return note + ("" if self.training else " in eval mode") + (f" {IN_GROUPS}" if self.groups else "")

    def crash(self) -> str:
        return ask_about_group(WHOSE_GROUP) if self.groups else CRASH


class Inner(nn.Module):
    """All tokens [b, s, h] -> this rank's summand [b, s, h]; remembers what it was given."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)  # [f/p, h], [h, f/p]
        self.given: list[int] = []
        self.rng: Any = None

    def forward(self, x: Tensor, rng: Any = None) -> Tensor:
        self.given, self.rng = list(x.shape), rng
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


@dataclass
class Problem:
    """What one group of ranks works on, whole."""

    x: Tensor
    dy: Tensor
    weights: dict[str, Tensor]  # up, down, norm.weight, norm.bias, bias
    seed: int


def problem(generator: torch.Generator) -> Problem:
    weights = {"up": random_tensor(generator, FFN, H), "down": random_tensor(generator, H, FFN)}
    weights |= {"norm.weight": 1 + 0.5 * random_tensor(generator, H), "norm.bias": random_tensor(generator, H)}
    weights["bias"] = random_tensor(generator, H)
    x, dy = (random_tensor(generator, B, S, H) for _ in range(2))
    return Problem(x, dy, weights, int(torch.randint(10**6, (), generator=generator)))


def on_rank(block_class: Any, cases: Sequence[Case], data: Sequence[Sequence[Problem]]) -> list[Observed]:
    """On a rank: every case, one after the other."""
    return [run_case(block_class, case, mine[dist.get_rank()]) for case, mine in zip(cases, data, strict=True)]


def run_case(block_class: Any, case: Case, whole: Problem) -> Observed:
    group = make_group(case.groups)
    rank, q = dist.get_rank(group), dist.get_world_size(group)
    place: dict[str, Any] = {"device": device(), "dtype": torch.float64}

    def mine(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(q, dim)[rank].contiguous().to(device())

    inner = Inner(mine(whole.weights["up"], 0), mine(whole.weights["down"], 1))
    block = block_class(H, inner, hidden_dropout=case.rate, group=group, **place)
    params = dict(block.named_parameters())
    with torch.no_grad():
        for name in NORM:
            params[name].copy_(whole.weights[name].to(device()))
    block.train(case.training)
    shapes: list[list[int]] = []
    block.norm.register_forward_pre_hook(lambda _, given: shapes.append(list(given[0].shape)))
    tracker, twin = seed_all(whole.seed, group), seed_all(whole.seed, group)
    masks = {}
    for state in ("sharded", "replicated"):
        with twin.fork(state):
            masks[state] = F.dropout(torch.ones(B, S // q, H, **place), RATE)
    torch.manual_seed(dist.get_rank())
    watched = {name: params[name] for name in NORM} | {"up": inner.up, "down": inner.down}
    seen = observe(
        lambda x: block(x, rng=tracker), mine(whole.dy, 1), inputs={"x": mine(whole.x, 1)}, parameters=watched
    )
    right = [[B, S // q, H]]
    seen[OWN_TOKENS] = Claim("" if shapes == right else f"it was given {', '.join(map(str, shapes)) or 'nothing'}")
    seen[ALL_TOKENS] = Claim("" if inner.given == [B, S, H] else f"it was given {inner.given or 'nothing'}")
    seen[GETS_RNG] = Claim("" if inner.rng is tracker else "it was called without rng")
    return {**seen, "masks": masks}


def plain_block(x: Tensor, w: dict[str, Tensor], parts: Sequence[dict[str, Tensor]], mask: Tensor | float) -> Tensor:
    """The block on one process; parts: for each rank's tokens a norm and a bias of their own."""
    tokens = x.chunk(len(parts), 1)
    normed = [F.layer_norm(t, (H,), own["norm.weight"], own["norm.bias"]) for t, own in zip(tokens, parts, strict=True)]
    y = F.linear(F.gelu(F.linear(torch.cat(normed, 1), w["up"])), w["down"])  # [b, s, h]
    y = torch.cat([t + own["bias"] for t, own in zip(y.chunk(len(parts), 1), parts, strict=True)], 1)
    return x + y * mask


def expect(
    case: Case, whole: Problem, masks: Sequence[dict[str, Tensor]], ranks: tuple[int, ...], p: int
) -> list[tuple]:
    """For each rank of a group: what is right, and what known mistakes give."""
    q, drops = len(ranks), case.rate > 0 and case.training
    mask = torch.cat([own["sharded"].cpu() for own in masks], 1) if drops else 1.0
    leaves = {name: whole.weights[name].clone().requires_grad_() for name in ("up", "down")}
    parts = [{name: whole.weights[name].clone().requires_grad_() for name in NORM} for _ in ranks]
    x = whole.x.clone().requires_grad_()
    out = plain_block(x, leaves, parts, mask)
    out.backward(whole.dy)
    if case.rate:
        both = {name: torch.cat([own[name].cpu() for own in masks], 1) for name in ("sharded", "replicated")}
        alike = dropout_mistakes(whole.x, whole.weights, both)
    else:
        alike = mistakes(whole.x, whole.weights, q)
    size = whole.x.numel()
    forward = Traffic.expected(p, ("all_gather", size), ("reduce_scatter", size), group=ranks)
    rows = []
    for rank in range(q):
        right: dict[str, Any] = {"out": out.detach().chunk(q, 1)[rank], "forward traffic": forward}
        right |= {"dx": x.grad.chunk(q, 1)[rank], "backward traffic": forward}  # type: ignore[union-attr]
        right |= {f"d{name}": leaf.grad for name, leaf in parts[rank].items()}
        right |= {"dup": leaves["up"].grad.chunk(q, 0)[rank], "ddown": leaves["down"].grad.chunk(q, 1)[rank]}  # type: ignore[union-attr]
        rows.append((right, {"out": {label: value.chunk(q, 1)[rank] for label, value in alike.items()}}))
    return rows


@exercise("12.2", "A block on s/p tokens")
def sequence_parallel_block(block_class: Any) -> Verdict:
    for p in WORLD_SIZES:
        check_cases(block_class, p, [Case()])  # alone: its message is the clearest
    check_cases(block_class, 4, [Case(groups=GROUPS)])
    for p in (2, 4, 1):  # with several ranks first, where a wrong state of dropout shows
        check_cases(block_class, p, [Case(RATE), Case(RATE, training=False)])
    return Verdict("The same bytes as with f and g, and only what the matrices read is [b, s, h].")


def check_cases(block_class: Any, p: int, cases: Sequence[Case]) -> None:
    generator = fresh_generator()
    members = [member_of(p, case.groups) for case in cases]
    problems = [[problem(generator) for _ in case.groups or (0,)] for case in cases]
    data = [[mine[i] for i, _ in member] for mine, member in zip(problems, members, strict=True)]
    runs = run_cases(
        on_rank, p, block_class, cases, data,
        note=Case.note, question=Case.crash, stuck=lambda case: case.crash() if case.groups else None,
    )  # fmt: skip
    for case, mine, member, seen in zip(cases, problems, members, runs, strict=True):
        rows: list[Any] = [None] * p
        for i, ranks in dict(member).items():
            masks = [seen[rank]["masks"] for rank in ranks]
            for rank, row in zip(ranks, expect(case, mine[i], masks, ranks, p), strict=True):
                rows[rank] = row
        questions = [group_question(WHOSE_GROUP)] if case.groups else list(QUESTIONS)
        verify(
            "12.2", p, seen, [row[0] for row in rows], lookalikes=by_name([row[1] for row in rows]),
            questions=[*QUESTIONS[:1], *DROPOUT_QUESTIONS] if case.rate else questions, note=case.note(),
        )  # fmt: skip
