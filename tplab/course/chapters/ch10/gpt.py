"""The check of exercise 10.2: the forward pass of a whole GPT, with tied logits and loss."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.course.chapters.ch10 import plain
from tplab.course.chapters.ch10.gpt_cases import (
    BATCH,
    CASES,
    HEADS,
    HIDDEN,
    LAYERS,
    LENGTH,
    PIECES,
    VOCAB,
    Case,
    run_gpt,
    stand_in,
)
from tplab.course.chapters.ch10.gpt_questions import CACHE, CRASH, DROPOUT, QUESTIONS, WHOSE_GROUP
from tplab.course.checks import (
    INPUTS_QUESTION,
    WORLD_SIZES,
    Question,
    Traffic,
    Verdict,
    ask_about_group,
    by_name,
    exercise,
    fresh_generator,
    group_question,
    member_of,
    run_cases,
    verify,
)


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
