"""The check of exercise 10.2: the forward pass of a whole GPT, with tied logits and loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.checkpoint import load_full_state_dict
from tplab.course.ch10 import plain
from tplab.course.ch10.gpt_questions import CACHE, CRASH, DROPOUT, GETS_CACHE, GETS_RNG, QUESTIONS, WHOSE_GROUP
from tplab.course.checking import (
    WORLD_SIZES,
    Claim,
    Observed,
    Question,
    Traffic,
    Verdict,
    exercise,
    fresh_generator,
    observe,
    run_cases,
    verify,
)
from tplab.course.scenes import (
    GROUPS,
    IN_GROUPS,
    INPUTS_QUESTION,
    ask_about_group,
    by_name,
    group_question,
    make_group,
    member_of,
)
from tplab.gpt_config import GPTConfig
from tplab.rng import seed_all
from tplab.runtime import device

LAYERS, HIDDEN, HEADS, VOCAB, BATCH, LENGTH, RATE = 2, 8, 4, 37, 2, 6, 0.4
PIECES = (3, 1, 2)


@dataclass(frozen=True)
class Case:
    """What is asked of the model: "logits", "loss", "dropout" with a stand-in layer, or "cache"."""

    what: str
    training: bool = True
    groups: tuple[tuple[int, ...], ...] | None = None

    def note(self, name: str) -> str:
        calls = {
            "logits": "model(ids)",
            "loss": "model(ids, targets)",
            "dropout": "model(ids, rng=rng) with dropout, and a layer of the check's",
            "cache": f"model(ids, cache=cache, past=past) with {', '.join(map(str, PIECES))} tokens",
        }
        return calls[self.what] + ("" if self.training else ", in eval mode") + (f" {IN_GROUPS}" if self.groups else "")


CASES = (
    Case("logits"),
    Case("loss"),
    Case("dropout"),
    Case("dropout", training=False),
    Case("cache", training=False),
    Case("loss", groups=GROUPS),
)


class StandIn(nn.Module):
    """In place of a layer: notes what it is called with, and sends nothing."""

    def __init__(self, hidden_size: int, num_heads: int, **options: Any) -> None:
        super().__init__()
        self.given: list[dict[str, Any]] = []

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        self.given.append(options)
        return 2 * x.tanh() + x.roll(1, -1)

    def new_cache(self, batch_size: int, max_length: int) -> None:
        return None


def stand_in(x: Tensor) -> Tensor:
    return 2 * x.tanh() + x.roll(1, -1)


def run_gpt(gpt_class: Any, cases: Sequence[Case], data: Sequence[Sequence[dict[str, Any]]]) -> list[Observed]:
    """On a rank: every case, one after the other."""
    return [run_case(gpt_class, case, mine[dist.get_rank()]) for case, mine in zip(cases, data, strict=True)]


def run_case(gpt_class: Any, case: Case, mine: dict[str, Any]) -> Observed:
    group = make_group(case.groups)
    replaced = case.what == "dropout"
    config = GPTConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_heads=HEADS, vocab_size=VOCAB, seq_length=LENGTH,
        activation="gelu_tanh", dropout=RATE if replaced else 0.0,
    )  # fmt: skip
    place: dict[str, Any] = {"device": device(), "dtype": torch.float64}
    model = gpt_class(config, StandIn if replaced else None, group=group, **place)
    full = {k: v.to(device()) for k, v in mine["full"].items() if not (replaced and k.startswith("layers."))}
    load_full_state_dict(model, full, group)
    model.train(case.training)
    ids, targets = mine["ids"].to(device()), mine["targets"].to(device())
    if case.what == "cache":
        return in_pieces(model, ids)
    tracker, twin = seed_all(mine["seed"], group), seed_all(mine["seed"], group)
    with twin.fork("replicated"):
        mask = F.dropout(torch.ones(BATCH, LENGTH, HIDDEN, **place), RATE)
    torch.manual_seed(dist.get_rank())
    watched = {name: param for name, param in model.named_parameters() if name in full}
    arguments = {"ids": ids, "targets": targets} if case.what == "loss" else {"ids": ids}
    upstream = mine["dloss"] if case.what == "loss" else mine["dlogits"]
    seen = observe(
        lambda *given: model(*given, rng=tracker), upstream.to(device()), inputs=arguments, parameters=watched
    )
    if replaced:
        given = [options for layer in model.layers for options in layer.given]
        missed = any(options.get("rng") is not tracker for options in given)
        seen[GETS_RNG] = Claim("a layer was called without rng=rng" if missed else "")
    return {**seen, "mask": mask}


def in_pieces(model: Any, ids: Tensor) -> Observed:
    """The logits when the text comes in pieces, with a cache."""
    cache, outs, past = model.new_cache(BATCH, LENGTH), [], 0
    with torch.no_grad():
        for piece in ids.split(PIECES, dim=1):
            outs.append(model(piece, cache=cache, past=past))
            past += piece.shape[1]
    kept = [layer.text.length for layer in cache]
    wrong = f"after {LENGTH} tokens the layers' caches hold {kept}" if set(kept) != {LENGTH} else ""
    fits = all(isinstance(out, Tensor) and out.dim() == 3 for out in outs)
    return {"out": torch.cat(outs, 1) if fits else outs[0], GETS_CACHE: Claim(wrong)}


def twin(generator: torch.Generator) -> dict[str, Any]:
    """A text with an ignored target, all weights, and the gradients to send back, for one process."""
    full = plain.gpt_weights(generator, LAYERS, HIDDEN, VOCAB, LENGTH)
    ids, targets = (torch.randint(VOCAB, (BATCH, LENGTH), generator=generator) for _ in range(2))
    ids[0, 0], ids[1, -1], targets[0, 1], targets[1, 2] = 0, VOCAB - 1, VOCAB - 1, -100
    seed = int(torch.randint(10**6, (), generator=generator))
    whole = torch.randn(BATCH, LENGTH, 64, generator=generator, dtype=torch.float64)
    dloss = torch.randn((), generator=generator, dtype=torch.float64)
    return {"full": full, "ids": ids, "targets": targets, "seed": seed, "whole": whole, "dloss": dloss}


def rows(q: int) -> int:
    return -(-VOCAB // (8 * q)) * 8


def given_to(mine: dict[str, Any], index: int, q: int) -> dict[str, Any]:
    """A rank's inputs: of the gradient of the logits its own columns."""
    start = index * rows(q)
    part = F.pad(mine["whole"][..., :VOCAB], (0, 64 - VOCAB))[..., start : start + rows(q)]
    return {**mine, "dlogits": F.pad(part, (0, rows(q) - part.shape[-1]))}


def shard_of(logits: Tensor, index: int, q: int) -> Tensor:
    return F.pad(logits, (0, rows(q) * q - VOCAB))[..., index * rows(q) : (index + 1) * rows(q)]


def expect(case: Case, mine: dict[str, Any], mask: Any, index: int, ranks: tuple[int, ...], p: int) -> tuple:
    """What is right on a rank, and what known mistakes give."""
    q = len(ranks)
    leaves = {name: value.clone().requires_grad_() for name, value in mine["full"].items()}
    ids, targets = mine["ids"], mine["targets"]
    if case.what == "dropout":
        x = leaves["embedding.weight"][ids] + leaves["positions.weight"][:LENGTH]
        x = stand_in(stand_in(x * mask.cpu() if case.training else x))
    else:
        x = plain.features(leaves, ids, LAYERS, HEADS)
    whole = plain.final_norm(leaves, x) @ leaves["embedding.weight"].t()  # [b, s, v]
    logits = shard_of(whole, index, q)
    if case.what == "loss":
        loss = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
        loss.backward(mine["dloss"])
        right: dict[str, Any] = {"out": loss.detach()}
    else:
        whole.backward(mine["whole"][..., :VOCAB])
        right = {"out": logits.detach()}
    if case.what == "cache":
        return right, {"out": logits_mistakes(mine, index, q, cached=True)}
    names = [n for n in leaves if case.what != "dropout" or not n.startswith("layers.")]
    right |= {f"d{name}": plain.cut(name, leaves[name].grad, index, q) for name in names}
    tokens = BATCH * LENGTH
    blocks = [("all_reduce", tokens * HIDDEN)] * (1 if case.what == "dropout" else 1 + 2 * LAYERS)
    loss_calls = [("all_reduce", tokens), ("all_reduce", tokens + 1)] if case.what == "loss" else []
    right["forward traffic"] = Traffic.expected(p, *blocks, *loss_calls, group=ranks)
    right["backward traffic"] = Traffic.expected(p, *blocks, group=ranks)
    if case.what == "dropout":
        return right, {}
    wrong = loss_mistakes(mine, q) if case.what == "loss" else logits_mistakes(mine, index, q)
    return right, {"out": wrong}


def logits_mistakes(mine: dict[str, Any], index: int, q: int, cached: bool = False) -> dict[str, Tensor]:
    w, ids = mine["full"], mine["ids"]
    x = plain.features(w, ids, LAYERS, HEADS)
    table = w["embedding.weight"].t()
    made = {
        "what comes out without the final norm": x @ table,
        "what comes out without the positions": plain.final_norm(
            w, plain.features(w, ids, LAYERS, HEADS, positions=False)
        )
        @ table,
    }
    if cached:
        again = {**w, "positions.weight": torch.cat([w["positions.weight"][:n] for n in PIECES])}
        made["what comes out when the positions begin at 0 again in every call"] = plain.logits(
            again, ids, LAYERS, HEADS
        )
        parts = [plain.logits(w, piece, LAYERS, HEADS) for piece in ids.split(PIECES, 1)]
        made["what comes out when no call knows of those before"] = torch.cat(parts, 1)
    return {label: shard_of(value, index, q) for label, value in made.items()}


def loss_mistakes(mine: dict[str, Any], q: int) -> dict[str, Tensor]:
    logits, targets = plain.logits(mine["full"], mine["ids"], LAYERS, HEADS).flatten(0, 1), mine["targets"].flatten()
    padded = F.pad(logits, (0, rows(q) * q - VOCAB))
    return {
        "what comes out when the padding enters the softmax": F.cross_entropy(padded, targets),
        "the sum of the losses, not their mean": F.cross_entropy(logits, targets, reduction="sum"),
        "what comes out when the ignored token counts in the mean": F.cross_entropy(logits, targets, reduction="sum")
        / len(targets),
    }


@exercise("10.2", "ParallelGPT")
def gpt(gpt_class: Any) -> Verdict:
    name = getattr(gpt_class, "__name__", "the model")
    for p in WORLD_SIZES:
        generator = fresh_generator()
        here = [case for case in CASES if case.groups is None or p == 4]
        members = [member_of(p, case.groups) for case in here]
        twins = [[twin(generator) for _ in case.groups or (0,)] for case in here]
        data = [
            [given_to(t[i], ranks.index(rank), len(ranks)) for rank, (i, ranks) in enumerate(member)]
            for t, member in zip(twins, members, strict=True)
        ]
        for batch in (slice(0, 1), slice(1, None)):  # the plain case alone first: its message is the clearest
            runs = run_cases(
                run_gpt, p, gpt_class, here[batch], data[batch],
                note=lambda case: case.note(name), question=crash,
                stuck=lambda case: crash(case) if case.groups else None,
            )  # fmt: skip
            for case, mine, member, seen in zip(here[batch], twins[batch], members[batch], runs, strict=True):
                made = [
                    expect(case, mine[i], seen[rank].get("mask"), ranks.index(rank), ranks, p)
                    for rank, (i, ranks) in enumerate(member)
                ]
                verify(
                    "10.2", p, seen, [row[0] for row in made], lookalikes=by_name([row[1] for row in made]),
                    questions=questions(case), note=case.note(name),
                )  # fmt: skip
    return Verdict(
        "One all-reduce for the embedding, one for the logits' backward, four a layer, two small ones for the loss."
    )


def crash(case: Case) -> str:
    if case.groups:
        return ask_about_group(WHOSE_GROUP)
    return CACHE if case.what == "cache" else CRASH


def questions(case: Case) -> list[Question]:
    if case.groups:
        return [group_question(WHOSE_GROUP)]
    special = {"dropout": DROPOUT, "cache": CACHE}.get(case.what)
    return [INPUTS_QUESTION, Question(lambda d: True, special)] if special else list(QUESTIONS)
