"""The check of exercise 10.4: the best token of a split vocabulary, and greedy generation with a cache."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.chapters.ch10.generation_questions import (
    CRASH,
    GENERATE_CRASH,
    GENERATE_QUESTIONS,
    LITTLE,
    best_questions,
)
from tplab.course.chapters.ch10.scripted import CALLS, Scripted, greedy, text_mistakes
from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
    Claim,
    Observed,
    Snapshot,
    Verdict,
    ask_about_group,
    by_name,
    exercise,
    fresh_generator,
    group_question,
    make_group,
    member_of,
    run_ranks,
    traffic,
    verify,
)
from tplab.runtime import device, record

BATCH, WIDTH = 3, 320  # ids a rank
Groups = Sequence[Sequence[int]] | None


def scenes(q: int, generator: torch.Generator) -> dict[str, tuple[Tensor, int]]:
    """Whole logits [b, v] with their padding, and the true vocabulary, by what is special about them."""
    whole = q * WIDTH
    plain = torch.randn(BATCH, whole, generator=generator, dtype=torch.float64)
    first, last = plain.clone(), plain.clone()
    for row, (left, right) in enumerate(((0, WIDTH - 1), (WIDTH // 2, WIDTH - 5), (7, 9))):
        first[row, left] = 9.0
        last[row, whole - WIDTH + right] = 9.0
    ties = plain.clamp(max=4.0)
    ties[0, [3, WIDTH - 1, whole - 1]] = 5.0
    ties[1, [whole - WIDTH, whole - 2]] = 5.0
    ties[2] = -1.0
    low = -1e4 - plain.abs()  # lower than any number that one might put in their place
    low[:, whole - WIDTH // 2 :] = 0.0  # the padding
    few = -1 - plain.abs()
    few[:, WIDTH // 4 :] = 50.0
    return {
        "the largest logit on rank 0": (first, whole),
        "the largest logit on the last rank": (last, whole),
        "random logits": (plain, whole),
        "equal logits": (ties, whole),
        "negative logits, and zeros in the padding": (low, whole - WIDTH // 2),
        "a vocabulary so small that rank 0 holds all of it": (few, WIDTH // 4),
        "logits in bfloat16": (last.to(torch.bfloat16), whole),
    }


def run_best(best_token: Callable[..., Any], groups: Groups, data: Sequence[Any]) -> list[Observed]:
    """On a rank: its choice in every scene."""
    group = make_group(groups)
    rank, q = dist.get_rank(group), dist.get_world_size(group)
    seen = []
    for whole, vocab_size in data[dist.get_rank()]:
        logits = whole.chunk(q, -1)[rank].contiguous().to(device())
        snapshot = Snapshot(logits=logits)
        with record() as section:
            ids = best_token(logits, vocab_size, group)
        numbers = sum(call.numel for call in traffic(section))
        much = f"messages of {numbers} numbers for {BATCH} texts" if numbers > 4 * q * BATCH else ""
        seen.append({"ids": ids, LITTLE: Claim(much), "inputs unchanged": snapshot.changed()})
    return seen


def id_mistakes(whole: Tensor, vocab_size: int, rank: int, q: int) -> dict[str, Tensor]:
    """What well-known mistakes choose on a rank."""
    real = whole.masked_fill(torch.arange(whole.shape[-1]) >= vocab_size, -torch.inf)
    parts = real.chunk(q, -1)
    value, place = torch.stack([part.max(-1).values for part in parts]), [part.argmax(-1) for part in parts]
    winner = value.argmax(0)  # [b]
    local = torch.stack(place).gather(0, winner[None])[0]
    backwards = real.shape[-1] - 1 - real.flip(-1).argmax(-1)
    made = {"the id of the largest logit, the padding included": whole.argmax(-1)}
    made["the highest of the ids with the largest logit"] = backwards
    if q > 1:
        made["this rank's own best, as an id of the whole vocabulary"] = place[rank] + rank * WIDTH
        made["this rank's own best, as a place in its shard"] = place[rank]
        made["the right place, but in the shard: the ids of the ranks before are not counted"] = local
        made["every rank's best id, the largest of them"] = torch.stack(
            [p + i * WIDTH for i, p in enumerate(place)]
        ).amax(0)
        made["the sum of the ranks' choices"] = torch.stack([p + i * WIDTH for i, p in enumerate(place)]).sum(0)
    return made


def run_generate(generate: Callable[..., Any], groups: Groups, data: Sequence[Any]) -> list[Observed]:
    """On a rank: the texts that a scripted model is made to write."""
    group = make_group(groups)
    seen = []
    for prompt, new, script in data[dist.get_rank()]:
        model = Scripted(script, group)
        ids = prompt.to(device())
        snapshot = Snapshot(prompt=ids)
        with record() as section:
            text = generate(model, ids, new)
        numbers = sum(call.numel for call in traffic(section))
        much = f"messages of {numbers} numbers for {new} tokens of {len(prompt)} texts"
        limit = 4 * dist.get_world_size(group) * len(prompt) * max(new, 1)
        claims = {CALLS: Claim(model.wrong_calls(prompt.shape[1], new)), LITTLE: Claim(much if numbers > limit else "")}
        seen.append({"text": text, **claims, "inputs unchanged": snapshot.changed()})
    return seen


@exercise("10.4", "Greedy generation on p ranks")
def greedy_generation(best_token: Callable[..., Any], generate: Callable[..., Any]) -> Verdict:
    for p in WORLD_SIZES:
        for groups in (None, GROUPS) if p == 4 else (None,):
            check_best(best_token, p, groups)
            check_generate(generate, p, groups)
    return Verdict("Each rank offers its best: a few numbers for each token travel, and all ranks write the same text.")


def check_best(best_token: Callable[..., Any], p: int, groups: Groups) -> None:
    generator = fresh_generator()
    members = member_of(p, groups)
    made = [scenes(len(ranks), generator) for ranks in groups or (range(p),)]
    data = [list(made[i].values()) for i, _ in members]
    special = {"question": ask_about_group(WHOSE_GROUP), "stuck": ask_about_group(WHOSE_GROUP), "note": IN_GROUPS}
    options = special if groups else {"question": CRASH, "note": "best_token"}
    seen = run_ranks(run_best, p, best_token, groups, data, **options)
    for index, note in enumerate(made[0]):
        rows, alike = [], []
        for rank, (i, ranks) in enumerate(members):
            whole, vocab_size = made[i][note]
            rows.append({"ids": whole[:, :vocab_size].argmax(-1)})
            alike.append({"ids": id_mistakes(whole, vocab_size, ranks.index(rank), len(ranks))})
        verify(
            "10.4", p, [mine[index] for mine in seen], rows, lookalikes=by_name(alike),
            questions=[group_question(WHOSE_GROUP)] if groups else best_questions(note),
            note=f"best_token, {note}" + (f" {IN_GROUPS}" if groups else ""),
        )  # fmt: skip


def check_generate(generate: Callable[..., Any], p: int, groups: Groups) -> None:
    generator = fresh_generator()
    members = member_of(p, groups)
    runs = []
    for batch, length, new in ((1, 4, 5), (2, 1, 4), (2, 3, 0)):
        for _ in groups or (0,):
            vocab_size = int(torch.randint(17, 23, (), generator=generator))
            prompt = torch.randint(vocab_size, (batch, length), generator=generator)
            runs.append((prompt, new, (int(torch.randint(10**6, (), generator=generator)), vocab_size)))
    count = len(groups or (0,))
    data = [runs[i::count] for i, _ in members]
    special = {"question": ask_about_group(WHOSE_GROUP), "stuck": ask_about_group(WHOSE_GROUP), "note": IN_GROUPS}
    options = special if groups else {"question": GENERATE_CRASH, "stuck": GENERATE_STUCK, "note": "generate"}
    seen = run_ranks(run_generate, p, generate, groups, data, **options)
    for index in range(len(data[0])):
        rows = [{"text": greedy(*mine[index])} for mine in data]
        alike = [{"text": text_mistakes(*mine[index])} for mine in data]
        prompt, new, _ = data[0][index]
        verify(
            "10.4", p, [mine[index] for mine in seen], rows, lookalikes=by_name(alike),
            questions=[group_question(WHOSE_GROUP)] if groups else GENERATE_QUESTIONS,
            note=f"generate, prompt {list(prompt.shape)}, {new} new tokens" + (f" {IN_GROUPS}" if groups else ""),
        )  # fmt: skip


WHOSE_GROUP = (
    "Which collective, or which call for a rank or a size, was not given `group`, so that it works in the default "
    "group of all ranks? And does generate hand `model.group` on?"
)
GENERATE_STUCK = (
    "Do all ranks run the same number of steps? A rank that stops, or chooses, by itself leaves the others waiting."
)
