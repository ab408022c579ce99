"""The check of exercise 7.3: VocabParallelEmbedding, first values, checkpoint, and the ids that it must refuse."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course.chapters.ch07.embedding_questions import (
    CRASH,
    NOT_ZERO_AT_FIRST,
    OTHER_VECTOR,
    PADDING_CRASH,
    PLACE,
    QUESTIONS,
    REFUSES,
    SILENT,
    STUCK,
    WHOSE_GROUP,
)
from tplab.course.chapters.ch07.lookup_questions import PADDING_TRAINED
from tplab.course.chapters.ch07.tables import HIDDEN, VOCAB, border_ids, gradient, part, random_table, rows_per_rank
from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
    Claim,
    NotRun,
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
from tplab.tensor.full_state import full_state_dict, load_full_state_dict


@dataclass(frozen=True)
class Case:
    """One way to build the embedding."""

    multiple: int = 1
    padding_idx: int | None = None
    groups: tuple[tuple[int, ...], ...] | None = None

    def options(self) -> dict[str, Any]:
        padding = {} if self.padding_idx is None else {"padding_idx": self.padding_idx}
        return {"multiple": self.multiple, **padding}

    def note(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options().items())
        where = f", group=group) {IN_GROUPS}" if self.groups else ")"
        return f"VocabParallelEmbedding({VOCAB}, {HIDDEN}, {options}{where}"

    def crash(self) -> str:
        if self.groups:
            return ask_about_group(WHOSE_GROUP)
        return PADDING_CRASH if self.padding_idx is not None else CRASH

    def wrong_ids(self, q: int) -> list[int]:
        """Below the vocabulary, its size, a row of padding if there is one, and far behind all rows."""
        last_row = q * rows_per_rank(q, self.multiple) - 1
        return list(dict.fromkeys([VOCAB, last_row if last_row >= VOCAB else VOCAB + 1, -1, -VOCAB, 10**6]))


CASES = (
    Case(),
    Case(multiple=8),
    Case(padding_idx=VOCAB - 1),
    Case(padding_idx=0),
    Case(multiple=2, padding_idx=3, groups=GROUPS),
)


def look_up(embedding_class: Any, cases: Sequence[Case], data: Sequence[Any]) -> list[Observed]:
    """On a rank: the learner's module in every case."""
    return [_look_up(embedding_class, case, data[i][dist.get_rank()]) for i, case in enumerate(cases)]


def _look_up(embedding_class: Any, case: Case, mine: dict[str, Any]) -> Observed:
    group = make_group(case.groups)
    options = case.options() | ({"group": group} if case.groups else {})
    torch.manual_seed(mine["seed"])
    seen: Observed = {}
    drawn = embedding_class(VOCAB, HIDDEN, **options, dtype=torch.float64)
    seen["parameters"] = ", ".join(f"{name} {list(value.shape)}" for name, value in drawn.named_parameters())
    if seen["parameters"] != mine["parameters"]:
        names = ("first values", "out", "dweight", "forward traffic", "backward traffic", "checkpoint")
        return seen | dict.fromkeys(names, NotRun("the parameters are others"))
    seen["first values"] = drawn.weight.detach().clone()
    module = embedding_class(VOCAB, HIDDEN, **options, device=device(), dtype=torch.float64)
    load_full_state_dict(module, {"weight": mine["table"].to(device())}, group)
    ids = mine["ids"].to(device())
    seen |= observe(
        lambda: module(ids), mine["dy"].to(device()), inputs={}, parameters={"weight": module.weight}
    )  # the ids are whole numbers: nothing to differentiate
    seen["checkpoint"] = full_state_dict(module, group)["weight"]
    seen[REFUSES] = Claim(next(filter(None, (refusal(module, ids, wrong) for wrong in mine["wrong"])), ""))
    return seen


def refusal(module: Any, ids: Tensor, wrong: int) -> str:
    """What is wrong with what the module does with ids of which one is wrong, in words; empty if nothing is."""
    ids, what = ids.clone(), f"id {wrong} at {PLACE} of {list(ids.shape)}"
    ids[tuple(PLACE)] = wrong
    try:
        out = module(ids)
    except IndexError as error:
        numbers = [int(text) for text in re.findall(r"-?\d+", str(error))]
        pairs = [numbers[i : i + len(PLACE)] for i in range(len(numbers))]
        if wrong in numbers and PLACE in pairs:
            return ""
        unsaid = f"its position {PLACE}" if wrong in numbers else "the id"
        return f"{what} gives an IndexError without {unsaid}: {error}"
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{what} gives {type(error).__name__}: {error}"
    vector = out[tuple(PLACE)] if isinstance(out, Tensor) and out.dim() == 3 else torch.ones(1)
    return f"{what} {OTHER_VECTOR if vector.any() else SILENT}"


def expect(case: Case, generator: torch.Generator, p: int) -> list[tuple[dict, dict, dict]]:
    """For every rank: what it is given, what is right, what known mistakes give."""
    seed = int(torch.randint(10**6, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = nn.Embedding(VOCAB, HIDDEN, case.padding_idx, dtype=torch.float64).weight.detach()
        torch.manual_seed(seed)
        unpadded = nn.Embedding(VOCAB, HIDDEN, dtype=torch.float64).weight.detach()
    drawn: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    rows = []
    for rank, (number, ranks) in enumerate(member_of(p, case.groups)):
        q, index = len(ranks), ranks.index(rank)
        if number not in drawn:
            table, ids = random_table(generator), border_ids(generator, q, (3, 8))
            if case.padding_idx is not None:
                ids[0, 0] = ids[2, 1] = case.padding_idx
            drawn[number] = table, ids, random_tensor(generator, 3, 8, HIDDEN)
        table, ids, dy = drawn[number]

        def mine(whole: Tensor, index: int = index, q: int = q) -> Tensor:
            return part(whole, index, q, case.multiple)

        parameters = f"weight {list(mine(table).shape)}"
        held = {
            "table": table,
            "ids": ids,
            "dy": dy,
            "seed": seed,
            "wrong": case.wrong_ids(q),
            "parameters": parameters,
        }
        right = {
            "parameters": parameters,
            "first values": mine(first),
            "out": table[ids],
            "dweight": mine(gradient(ids, dy, case.padding_idx)),
            "forward traffic": Traffic.expected(p, ("all_reduce", dy.numel()), group=ranks),
            "backward traffic": Traffic(),
            "checkpoint": table,
        }
        alike: dict[str, dict[str, Tensor]] = {"first values": {}, "dweight": {}}
        if case.padding_idx is not None:
            alike["first values"][NOT_ZERO_AT_FIRST] = mine(unpadded)
            alike["dweight"][PADDING_TRAINED] = mine(gradient(ids, dy))
        rows.append((held, right, alike))
    return rows


@exercise("7.3", "VocabParallelEmbedding")
def vocab_parallel_embedding(embedding_class: Any) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        here = [case for case in CASES if case.groups is None or p == 4]
        table = [expect(case, generator, p) for case in here]
        for batch in (slice(0, 1), slice(1, None)):
            runs = run_cases(
                look_up,
                p,
                embedding_class,
                here[batch],
                [[row[0] for row in rows] for rows in table[batch]],
                note=Case.note,
                question=Case.crash,
                stuck=lambda case: ask_about_group(WHOSE_GROUP) if case.groups else STUCK,
            )
            for case, rows, seen in zip(here[batch], table[batch], runs, strict=True):
                asked = [group_question(WHOSE_GROUP), *QUESTIONS] if case.groups else QUESTIONS
                expected = [row[1] for row in rows]
                alike = by_name([row[2] for row in rows])
                verify("7.3", p, seen, expected, questions=asked, lookalikes=alike, note=case.note())
    return Verdict("Padding stays zeros and is in no checkpoint; an id that no rank has is an error on every rank.")
