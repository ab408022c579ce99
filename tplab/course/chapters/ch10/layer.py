"""The check of exercise 10.1: the forward pass of a transformer layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course.chapters.ch10 import plain
from tplab.course.chapters.ch10.layer_questions import (
    CACHE,
    CRASH,
    DROPOUT,
    GETS_CACHE,
    GETS_RNG,
    NO_MASK,
    QUESTIONS,
    RANKS_DISAGREE,
    WHOSE_GROUP,
    before_the_sum,
    dropout_mistakes,
)
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
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.rng import seed_all

HIDDEN, HEADS, BATCH, LENGTH, RATE = 8, 4, 2, 5, 0.4
PIECES = (3, 1, 1)


@dataclass(frozen=True)
class Case:
    """One way to build and run the layer."""

    post: bool = False
    causal: bool = True
    rate: float = 0.0
    training: bool = True
    cached: bool = False
    groups: tuple[tuple[int, ...], ...] | None = None

    def options(self) -> dict[str, Any]:
        made: dict[str, Any] = {"hidden_dropout": self.rate} if self.rate else {}
        made |= {} if self.causal else {"causal": False}
        return made | ({"apply_residual_connection_post_layernorm": True} if self.post else {})

    def note(self, name: str) -> str:
        options = [f"{key}={value}" for key, value in self.options().items()] + ["group=group"] * bool(self.groups)
        call = f"{name}({', '.join([str(HIDDEN), str(HEADS), *options])})"
        extra = "" if self.training else " in eval mode"
        extra += f" with a cache, {' then '.join(map(str, PIECES))} tokens" if self.cached else ""
        return call + extra + (f" {IN_GROUPS}" if self.groups else "")


CASES = (
    Case(),
    Case(post=True),
    Case(causal=False),
    Case(rate=RATE),
    Case(rate=RATE, training=False),
    Case(cached=True, training=False),
    Case(groups=GROUPS, post=True),
)


def run_layer(layer_class: Any, cases: Sequence[Case], data: Sequence[Sequence[dict[str, Any]]]) -> list[Observed]:
    """On a rank: every case, one after the other."""
    return [run_case(layer_class, case, mine[dist.get_rank()]) for case, mine in zip(cases, data, strict=True)]


def run_case(layer_class: Any, case: Case, mine: dict[str, Any]) -> Observed:
    group = make_group(case.groups)
    place: dict[str, Any] = {"device": device(), "dtype": torch.float64}
    layer = layer_class(HIDDEN, HEADS, **case.options(), group=group, **place)
    load_full_state_dict(layer, {name: value.to(device()) for name, value in mine["full"].items()}, group)
    layer.train(case.training)
    tracker, twin = seed_all(mine["seed"], group), seed_all(mine["seed"], group)
    with twin.fork("replicated"):
        masks = [F.dropout(torch.ones(BATCH, LENGTH, HIDDEN, **place), RATE) for _ in range(2)]
    torch.manual_seed(dist.get_rank())  # a rank that draws from the current state draws for itself
    given: list[dict[str, Any]] = []
    layer.attention.register_forward_pre_hook(lambda _, __, options: given.append(dict(options)), with_kwargs=True)
    x = mine["x"].to(device())
    if case.cached:
        seen = in_pieces(layer, x, given)
    else:
        params = dict(layer.named_parameters())
        watched = {name: params.get(name) for name in mine["full"]}
        seen = observe(lambda x: layer(x, rng=tracker), mine["dy"].to(device()), inputs={"x": x}, parameters=watched)
        missed = any(options.get("rng") is not tracker for options in given)
        seen[GETS_RNG] = Claim("self.attention was called without rng=rng" if missed else "")
    return {**seen, "masks": masks}


def in_pieces(layer: Any, x: Tensor, given: list[dict[str, Any]]) -> Observed:
    """The layer's output when the text comes in pieces, with a cache."""
    layer_cache = layer.new_cache(BATCH, LENGTH)
    with torch.no_grad():
        outs = [layer(piece, cache=layer_cache) for piece in x.split(PIECES, dim=1)]
    missed = any(options.get("cache") is not layer_cache for options in given)
    claim = Claim("self.attention was called without cache=cache" if missed else "")
    fits = all(isinstance(out, Tensor) for out in outs)
    return {"out": torch.cat(outs, 1) if fits else outs[0], GETS_CACHE: claim}


@dataclass
class Twin:
    """One process: its inputs, and the layer in plain torch."""

    x: Tensor
    dy: Tensor
    full: dict[str, Tensor]
    seed: int


def twin(generator: torch.Generator) -> Twin:
    x, dy = (random_tensor(generator, BATCH, LENGTH, HIDDEN) for _ in range(2))
    seed = int(torch.randint(10**6, (), generator=generator))
    return Twin(x, dy, plain.layer_weights(generator, HIDDEN), seed)


def expect(case: Case, mine: Twin, masks: Sequence[Tensor], index: int, ranks: tuple[int, ...], p: int) -> tuple:
    """What is right on a rank, and what known mistakes give."""
    q = len(ranks)
    used = tuple(mask.cpu() for mask in masks) if case.rate and case.training else (1.0, 1.0)
    leaves = {name: value.clone().requires_grad_() for name, value in {"x": mine.x, **mine.full}.items()}
    right_layer = plain.Layer(leaves, HEADS, case.causal, case.post, used)  # type: ignore[arg-type]
    out = right_layer(leaves["x"])
    out.backward(mine.dy)
    right: dict[str, Any] = {"out": out.detach()}
    if not case.cached:
        right |= {f"d{name}": plain.cut(name, leaf.grad, index, q) for name, leaf in leaves.items()}  # type: ignore[arg-type]
        calls = [("all_reduce", mine.x.numel())] * 2
        right["forward traffic"] = right["backward traffic"] = Traffic.expected(p, *calls, group=ranks)
    fixed: dict[str, Any] = {"w": mine.full, "heads": HEADS, "causal": case.causal, "post": case.post, "masks": used}
    wrong = plain.Layer(**fixed)
    alike = {label: mistake(wrong, mine.x) for label, mistake in plain.MISTAKES.items()}
    for label, times in (("without the blocks' last biases", 0.0), ("with the blocks' last biases added twice", 2.0)):
        alike[f"what comes out {label}"] = plain.Layer(**fixed, bias=times)(mine.x)
    if q > 1:
        alike |= before_the_sum(fixed, mine.x, q)
    if case.rate:
        alike |= dropout_mistakes(fixed, mine.x, masks)
    return right, {"out": alike}


@exercise("10.1", "ParallelTransformerLayer")
def transformer_layer(layer_class: Any) -> Verdict:
    dropping = [case for case in CASES if case.rate]
    plain_ones = [case for case in CASES if not case.rate]
    for p in WORLD_SIZES:
        check_cases(layer_class, p, [case for case in plain_ones if case.groups is None or p == 4])
    for p in (2, 4, 1):  # with several ranks first, where a wrong state shows as ranks that disagree
        check_cases(layer_class, p, dropping)
    return Verdict("Two all-reduces of b·s·h numbers forward and two backward; norms, biases and dropout send nothing.")


def check_cases(layer_class: Any, p: int, here: Sequence[Case]) -> None:
    name = getattr(layer_class, "__name__", "the layer")
    generator = fresh_generator()
    members = [member_of(p, case.groups) for case in here]
    twins = [[twin(generator) for _ in case.groups or (0,)] for case in here]
    data = [[vars(t[i]) for i, _ in member] for t, member in zip(twins, members, strict=True)]
    for batch in (slice(0, 1), slice(1, None)):  # the plain case alone first: its message is the clearest
        runs = run_cases(
            run_layer, p, layer_class, here[batch], data[batch],
            note=lambda case: case.note(name), question=crash,
            stuck=lambda case: crash(case) if case.groups else None,
        )  # fmt: skip
        for case, mine, member, seen in zip(here[batch], twins[batch], members[batch], runs, strict=True):
            rows = [
                expect(case, mine[i], seen[rank]["masks"], ranks.index(rank), ranks, p)
                for rank, (i, ranks) in enumerate(member)
            ]
            verify(
                "10.1", p, seen, [row[0] for row in rows], lookalikes=by_name([row[1] for row in rows]),
                questions=questions(case, seen), note=case.note(name),
            )  # fmt: skip


def crash(case: Case) -> str:
    if case.groups:
        return ask_about_group(WHOSE_GROUP)
    return CACHE if case.cached else CRASH


def questions(case: Case, seen: Sequence[Observed]) -> list[Question]:
    if case.groups:
        return [group_question(WHOSE_GROUP)]
    if case.cached:
        return [*QUESTIONS[:1], CACHE_QUESTION]
    if case.rate:
        outs = [rank["out"] for rank in seen]
        alike = all(isinstance(out, Tensor) and torch.equal(out, outs[0]) for out in outs)
        return [
            *QUESTIONS[:1],
            *([NO_MASK] if not case.training else []),
            *([] if alike else [RANKS_DISAGREE]),
            DROPOUT,
        ]
    return list(QUESTIONS)


CACHE_QUESTION = Question(lambda d: True, CACHE)
