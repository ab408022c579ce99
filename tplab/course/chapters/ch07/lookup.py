"""The check of exercise 7.2: the masked look-up, on p = 1, 2, 4 ranks and in two groups of two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.chapters.ch07.lookup_questions import (
    BORDER_CRASH,
    CLAMPED,
    CRASH,
    FIRST_ROW_LOST,
    FOREIGN_CRASH,
    FOREIGN_IN_ROW_0,
    MAXIMUM,
    NOT_ZEROED,
    OWN,
    PADDING_TRAINED,
    QUESTIONS,
    WHOSE_GROUP,
    WRAPPED,
)
from tplab.course.chapters.ch07.tables import (
    HIDDEN,
    VOCAB,
    border_ids,
    gradient,
    inner_ids,
    last_ranks_ids,
    padded,
    part,
    random_table,
    rows_per_rank,
)
from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
    Changed,
    Observed,
    Snapshot,
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


@dataclass(frozen=True)
class Case:
    """Which ids are looked up. `padding_idx`: an id whose row gets no gradient."""

    text: str
    draw: Callable[[torch.Generator, int, tuple[int, int]], Tensor]
    shape: tuple[int, int] = (3, 5)
    groups: tuple[tuple[int, ...], ...] | None = None
    padding_idx: int | None = None
    transposed: bool = False

    def note(self) -> str:
        return self.text + (f", {IN_GROUPS}" if self.groups else "")

    def crash(self) -> str:
        """What to ask where the look-up raises."""
        if self.groups:
            return ask_about_group(WHOSE_GROUP)
        if self.draw is flat_last_ranks_ids:
            return FOREIGN_CRASH
        return BORDER_CRASH if self.draw is border_ids else CRASH


def flat_last_ranks_ids(generator: torch.Generator, q: int, shape: tuple[int, int]) -> Tensor:
    return last_ranks_ids(generator, q, (shape[0] * shape[1],))


CASES = (
    Case("ids of every rank, none at the border of a shard", inner_ids),
    Case("the first and the last id of every rank", border_ids),
    Case("ids of the last rank only", flat_last_ranks_ids),
    Case("with a padding_row", border_ids, padding_idx=VOCAB - 1, transposed=True),
    Case("ids of every rank", border_ids, groups=GROUPS),
)


def look_up(function: Callable[..., Any], cases: Sequence[Case], data: Sequence[Any]) -> list[Observed]:
    """On a rank: the learner's look-up in every case."""
    return [_look_up(function, case, data[i][dist.get_rank()]) for i, case in enumerate(cases)]


def _look_up(function: Callable[..., Any], case: Case, mine: dict[str, Any]) -> Observed:
    group = make_group(case.groups)
    ids = mine["ids"].to(device())
    options = {"group": group} if case.groups else {}
    if mine["padding_row"] is not None:
        options["padding_row"] = mine["padding_row"]
    snapshot = Snapshot(ids=ids)

    def run(weight: Tensor) -> Any:
        return function(ids, weight, mine["start"], mine["stop"], **options)

    seen = observe(run, mine["dy"].to(device()), inputs={"weight": mine["weight"].to(device())})
    seen["inputs unchanged"] = Changed((*seen["inputs unchanged"], *snapshot.changed()))
    return seen


def expect(case: Case, generator: torch.Generator, p: int) -> list[tuple[dict, dict, dict]]:
    """For every rank: what it is given, what is right, what known mistakes give."""
    drawn: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    rows = []
    for rank, (number, ranks) in enumerate(member_of(p, case.groups)):
        q = len(ranks)
        if number not in drawn:
            ids = case.draw(generator, q, case.shape)
            ids = ids.T if case.transposed else ids
            drawn[number] = random_table(generator), ids, random_tensor(generator, *ids.shape, HIDDEN)
        rows.append(_expect_on(case, drawn[number], ranks.index(rank), ranks, p))
    return rows


def _expect_on(
    case: Case, drawn: tuple[Tensor, Tensor, Tensor], index: int, ranks: tuple[int, ...], p: int
) -> tuple[dict, dict, dict]:
    (table, ids, dy), q = drawn, len(ranks)
    size = rows_per_rank(q)
    start, stop = index * size, (index + 1) * size
    whole = padded(table, q)
    shards = [part(table, r, q) for r in range(q)]
    mine = (ids >= start) & (ids < stop)
    padding = case.padding_idx
    held = {
        "ids": ids,
        "weight": shards[index],
        "start": start,
        "stop": stop,
        "dy": dy,
        "padding_row": padding - start if padding is not None and start <= padding < stop else None,
    }
    dweight = part(gradient(ids, dy, padding), index, q)
    right = {
        "out": whole[ids],
        "dweight": dweight,
        "forward traffic": Traffic.expected(p, ("all_reduce", dy.numel()), group=ranks),
        "backward traffic": Traffic(),
    }
    leaked = dweight.clone()
    leaked[0] += dy[~mine].reshape(-1, HIDDEN).sum(0)
    lost = whole[ids] * (ids % size != 0).unsqueeze(-1)
    alike: dict[str, dict[str, Tensor]] = {"out": {FIRST_ROW_LOST: lost}, "dweight": {FOREIGN_IN_ROW_0: leaked}}
    if padding is not None:
        alike["dweight"][PADDING_TRAINED] = part(gradient(ids, dy), index, q)
    if q > 1:
        local = [ids - r * size for r in range(q)]
        inside = [(row >= 0) & (row < size) for row in local]
        rows_of = zip(shards, local, inside, strict=True)
        alike["out"] |= {
            MAXIMUM: whole[ids].clamp(min=0),
            OWN: whole[ids] * mine.unsqueeze(-1),
            NOT_ZEROED: torch.stack([s[row * yes] for s, row, yes in rows_of]).sum(0),
            CLAMPED: torch.stack([s[row.clamp(0, size - 1)] for s, row in zip(shards, local, strict=True)]).sum(0),
            WRAPPED: torch.stack([s[row % size] for s, row in zip(shards, local, strict=True)]).sum(0),
        }
    return held, right, alike


@exercise("7.2", "The masked look-up")
def masked_lookup(function: Callable[..., Any]) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        here = [case for case in CASES if case.groups is None or p == 4]
        table = [expect(case, generator, p) for case in here]
        for batch in (slice(0, 1), slice(1, None)):  # the plain case alone first: its message is the clearest
            runs = run_cases(
                look_up,
                p,
                function,
                here[batch],
                [[row[0] for row in rows] for rows in table[batch]],
                note=Case.note,
                question=Case.crash,
                stuck=lambda case: case.crash() if case.groups else None,
            )
            for case, rows, seen in zip(here[batch], table[batch], runs, strict=True):
                asked = [group_question(WHOSE_GROUP), *QUESTIONS] if case.groups else QUESTIONS
                expected = [row[1] for row in rows]
                alike = by_name([row[2] for row in rows])
                verify("7.2", p, seen, expected, questions=asked, lookalikes=alike, note=case.note())
    return Verdict("One all-reduce of b·s·h numbers forward, nothing backward; every row's gradient where the row is.")
