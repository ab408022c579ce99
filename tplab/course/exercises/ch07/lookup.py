"""The check for exercise 7.2, the masked lookup in a table whose rows are sharded."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.course import checks
from tplab.course.exercises.ch07.tables import (
    HIDDEN,
    PADDING_TRAINED,
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
from tplab.runtime import device

SHAPE = (3, 5)  # shape of the ids
NOT_ZEROED = "what comes out when every rank adds a row for every id: the foreign ones are not zeros"
FIRST_ROW_LOST = "what comes out when the first row of every rank is taken for foreign"
MAXIMUM = "the largest over the ranks, not the sum"
CLAMPED = "what comes out when a foreign id finds the nearest row of the shard"
WRAPPED = "what comes out when a foreign id finds some row of the shard, counted round it"
OWN = "what this rank finds alone, before the sum"
FOREIGN_IN_ROW_0 = "the gradient with those of all foreign ids added to row 0"


@dataclass(frozen=True)
class Lookup(checks.Case):
    """The ids to look up, given by a description and a function that draws them.

    padding_idx: the id whose row gets no gradient
    transposed:  whether ids is the transpose of a contiguous tensor
    broken:      whether the first row of each shard, which none of the ids refers to, is infinite
    uneven:      whether the first rank holds one row more and the last rank one row fewer than in an even split
    """

    text: str
    draw_ids: Callable[[torch.Generator, int, tuple[int, int]], Tensor]
    padding_idx: int | None = None
    transposed: bool = False
    broken: bool = False
    uneven: bool = False

    def describe(self, name: str) -> str:
        return self.text + "," * bool(self.groups)


CASES = (
    Lookup("ids of every rank, none at the border of a shard", inner_ids),
    Lookup("the first and the last id of every rank", border_ids),
    Lookup("ids of the last rank only", last_ranks_ids),
    Lookup("with a padding_row", border_ids, padding_idx=VOCAB - 1, transposed=True),
    Lookup("with a padding_row of 0", border_ids, padding_idx=0),
    Lookup("ids of every rank, beside rows with inf that nobody looks up", inner_ids, broken=True),
    Lookup("ids of every rank, which hold different numbers of rows", border_ids, uneven=True),
    Lookup("ids of every rank", border_ids, groups=checks.GROUPS),
)


class Problem(NamedTuple):
    table: Tensor  # [v, h], without padding
    ids: Tensor  # [...]
    dy: Tensor  # [..., h]


def draw(case: Lookup, generator: torch.Generator, size: int) -> Problem:
    ids = case.draw_ids(generator, size, SHAPE)
    ids = ids.T if case.transposed else ids
    table = random_table(generator)
    if case.broken:
        table[:: rows_per_rank(size)] = math.inf
    return Problem(table, ids, checks.random_tensor(generator, *ids.shape, HIDDEN))


def held(case: Lookup, place: checks.Place) -> tuple[int, int]:
    """Return the range of rows that the rank at this place holds, as (start, stop)."""
    rows, inner = rows_per_rank(place.size), range(1, place.size)
    start, stop = (end * rows + (case.uneven and end in inner) for end in (place.index, place.index + 1))
    return start, stop


def give(case: Lookup, problem: Problem, place: checks.Place) -> dict[str, Any]:
    padding, (start, stop) = case.padding_idx, held(case, place)
    return {
        "ids": problem.ids,
        "weight": padded(problem.table, place.size)[start:stop],
        "start": start,
        "stop": stop,
        "dy": problem.dy,
        "padding_row": padding - start if padding is not None and start <= padding < stop else None,
    }


def run(function: Callable[..., Any], case: Lookup, given: dict[str, Any], group: Any) -> checks.Observed:
    ids = given["ids"].to(device())
    options: dict[str, Any] = {"group": group} if case.groups else {}
    if given["padding_row"] is not None:
        options["padding_row"] = given["padding_row"]
    snapshot = checks.Snapshot(ids=ids)

    def look_up(weight: Tensor) -> Any:
        return function(ids, weight, given["start"], given["stop"], **options)

    seen = checks.observe(look_up, given["dy"].to(device()), inputs={"weight": given["weight"].to(device())})
    return seen | {"inputs unchanged": checks.Changed((*seen["inputs unchanged"], *snapshot.changed()))}


def expect(case: Lookup, problem: Problem, place: checks.Place) -> checks.Expected:
    (table, ids, dy), size, rows = problem, place.size, rows_per_rank(place.size)
    vectors = padded(table, size)[ids]  # [..., h]
    shards = [part(table, rank, size) for rank in range(size)]
    local = [ids - rank * rows for rank in range(size)]  # for each rank, the row in its shard, if it's in range
    inside = [(row >= 0) & (row < rows) for row in local]
    own = inside[place.index].unsqueeze(-1)
    start, stop = held(case, place)
    dweight = padded(gradient(ids, dy, case.padding_idx), size)[start:stop]
    right = {
        "out": vectors,
        "dweight": dweight,
        "forward traffic": place.traffic(("all_reduce", dy.numel())),
        "backward traffic": checks.Traffic(),
    }
    if case.uneven:  # the mistakes below assume shards of equal size
        return checks.Expected(right)
    leaked = dweight.clone()
    leaked[0] += (dy * ~own).flatten(0, -2).sum(0)
    mistakes: dict[str, dict[str, Tensor]] = {
        "out": {FIRST_ROW_LOST: vectors * (ids % rows != 0).unsqueeze(-1)},
        "dweight": {FOREIGN_IN_ROW_0: leaked},
    }
    if case.padding_idx is not None:
        mistakes["dweight"][PADDING_TRAINED] = part(gradient(ids, dy), place.index, size)
    if size > 1:

        def summed(found: list[Tensor]) -> Tensor:
            """Return the sum over the ranks if each rank looks up these rows of its own shard."""
            return torch.stack([shard[row] for shard, row in zip(shards, found, strict=True)]).sum(0)

        mistakes["out"] |= {
            MAXIMUM: vectors.clamp(min=0),
            OWN: vectors * own,
            NOT_ZEROED: summed([row * yes for row, yes in zip(local, inside, strict=True)]),
            CLAMPED: summed([row.clamp(0, rows - 1) for row in local]),
            WRAPPED: summed([row % rows for row in local]),
        }
    return checks.Expected(right, mistakes)


@checks.exercise("7.2", "The masked look-up")
def masked_lookup(function: Callable[..., Any]) -> checks.Verdict:
    checks.check_cases(
        "7.2", function, CASES, draw=draw, give=give, run=run, expect=expect, crash=crash,
        questions=lambda case, observed: [UNEVEN] if case.uneven and not case.twin else QUESTIONS,
        whose_group=WHOSE_GROUP,
    )  # fmt: skip
    return checks.Verdict(
        "One all-reduce of b·s·h numbers forward, nothing backward; every row's gradient where the row is."
    )


def crash(case: Lookup) -> str:
    """Return the question to ask if the lookup raises an error."""
    if case.uneven:
        return UNEVEN.ask
    if case.draw_ids is last_ranks_ids:
        return FOREIGN_CRASH
    return BORDER_CRASH if case.draw_ids is border_ids else CRASH


UNEVEN = checks.Question(
    lambda d: True,
    "Your look-up is right where all ranks hold the same number of rows. Here the first rank holds one row more than "
    "the others. Do you find a rank's ids from `start` and `stop`, or from the number of its rows?",
)
WHOSE_GROUP = "Which call adds up over the default group of all ranks, since it was not given `group`?"
CRASH = (
    "The rows of this rank's shard are numbered from 0, whatever ids they belong to. Which row of it holds the id "
    "`start`? And which row do you ask for where the id is not one of this rank's?"
)
BORDER_CRASH = (
    "With ids inside the shards all went well; here some are the first or the last of a rank. Is the id `stop` one of "
    "this rank's? Try the mask by hand for the ids start - 1, start, stop - 1 and stop."
)
FOREIGN_CRASH = (
    "Here the ids have a single dimension, and all of them are the last rank's: on every other rank all are foreign. "
    "Which of your lines expects two dimensions, or can't do with no id at all?"
)

QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        checks.has_kind("out", "nan"),
        "Some rows of the table are infinite here, but no id asks for them. What is 0 times infinity? Where a vector "
        "has to become zeros, replace it instead of multiplying it.",
    ),
    checks.Question(
        checks.has_kind("out", "none", "type", "structure", "dtype"),
        "What does the last line return? One tensor [..., h] of the table's dtype, the same on every rank.",
    ),
    checks.Question(
        checks.has_kind("out", "shape", "whole"),
        "The vectors of the ranks are to be added, not put beside each other. What shape has one rank's part, and the "
        "result?",
    ),
    checks.Question(
        checks.kind_is("out", OWN),
        "A rank has found its own vectors, with zeros for the others. Who adds up what the ranks have found, and does "
        "your function return that sum?",
    ),
    checks.Question(
        checks.has_kind("out", NOT_ZEROED),
        "For a foreign id any row will do at first, but it must not count. Where do its vectors become zeros, before "
        "the sum?",
    ),
    checks.Question(
        checks.has_kind("out", CLAMPED, WRAPPED),
        "A foreign id has found a row too, one that belongs to another id. Each vector must come from one rank: what "
        "do all others have to add?",
    ),
    checks.Question(
        checks.has_kind("out", FIRST_ROW_LOST),
        "The first row of each rank is never found. Is the id `start` one of this rank's? Try the mask by hand for the "
        "ids start - 1 and start.",
    ),
    checks.Question(
        checks.has_kind("out", MAXIMUM),
        "The others put in zeros, and a zero is larger than a negative number. What has to be done with the ranks' "
        "vectors, so that zeros change nothing?",
    ),
    checks.Question(
        checks.has_kind("out", "1/p"), "Only one rank contributes to each vector. By what is the sum divided, and why?"
    ),
    checks.Question(
        checks.has_kind("out", "zeros"),
        "All vectors are zeros. For which ids is your mask true: for those that are here, or for the foreign ones?",
    ),
    checks.Question(
        lambda d: (
            checks.has_no_gradient("dweight")(d) and not (checks.has_kind("dweight", "zeros")(d) and "out" in d.names)
        ),
        "The table gets no gradient. Which line does autograd not know about: an in-place `dist.all_reduce`, a "
        "`detach`, a `.data`?",
    ),
    checks.Question(
        checks.has_kind("dweight", PADDING_TRAINED),
        "The padding row must not learn. `F.embedding` has an argument for that: does `padding_row` reach it?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and {"dweight", "backward traffic"} <= d.names,
        "Something is summed over the ranks in the backward pass. The gradient is whole already: every rank holds the "
        "same dY, and a row is its own alone. Which line brings that sum? What does the backward of g do?",
    ),
    checks.Question(
        checks.has_kind("dweight", FOREIGN_IN_ROW_0),
        "The output is right, but row 0 learns from ids that are not here. Does the gradient of a foreign place still "
        "reach the row that stood in for it?",
    ),
    checks.Question(
        lambda d: bool(d.names) and d.names <= {"forward traffic", "backward traffic"},
        "The numbers are right, the communication is not: one all-reduce of the vectors [..., h] forward, nothing "
        "backward. Which call sends more, and what for?",
    ),
    checks.Question(
        lambda d: "out" in d.names,
        "Write down for one id: on which rank is its row, which row of that rank's shard is it, what do the others "
        "add, what comes out of the sum?",
    ),
    checks.Question(
        "dweight", "Add by hand: an id that occurs twice gives its row the sum of two gradients. What do you get?"
    ),
)
