"""The checks of exercises 7.1, one table with two jobs, 7.2, the masked look-up, and 7.4, the logits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.observation import Changed, Claim, Observed, Snapshot, observe
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.exercises.ch07.tables import (
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
from tplab.runtime import device

# 7.1: one table, two jobs. A token has h elements in X and in Y, and v logits. With the four operators of chapter 03,
# the two splits send these elements per token, in the forward and backward passes together:
#
#     rows       look-up: scatter, g            h          logits: f                2 h in total
#     columns    look-up: gather                h          logits: scatter, g       2 h + v
#
# In a ring, an all-gather sends half as much as an all-reduce of the same tensor. Even so, rows are cheaper if v > h.

DIM = {"rows": 0, "columns": 1}
CHEAPEST = "rows"
ONE_WORD = 'table_split returns "rows" or "columns"'
LOOK_UP, SCORES = "look_up", "scores"


@dataclass(frozen=True)
class Sizes(Case):
    vocab: int = 24
    hidden: int = 4
    leading: tuple[int, int] = (2, 3)  # b and s

    def describe(self, name: str) -> str:
        return f"v = {self.vocab}, h = {self.hidden}, b = {self.leading[0]}, s = {self.leading[1]}"


class BothEnds(NamedTuple):
    one_hot: Tensor  # [b, s, v]
    table: Tensor  # [v, h]
    y: Tensor  # [b, s, h]
    dx: Tensor  # [b, s, h], the upstream gradient of the vectors
    dlogits: Tensor  # [b, s, v], the upstream gradient of the logits


def draw_ends(case: Sizes, generator: torch.Generator, size: int) -> BothEnds:
    random = partial(random_tensor, generator)
    ids = torch.randint(case.vocab, case.leading, generator=generator)
    vectors = *case.leading, case.hidden
    return BothEnds(
        torch.eye(case.vocab, dtype=torch.float64)[ids], random(case.vocab, case.hidden), random(*vectors),
        random(*vectors), random(*case.leading, case.vocab),
    )  # fmt: skip


def give_ends(case: Sizes, full: BothEnds, place: Place) -> dict[str, Any]:
    """Return everything but the table, this rank's shard of the table for each split, and its part of dlogits."""
    shards = {split: place.part(full.table, dim).contiguous() for split, dim in DIM.items()}
    return full._asdict() | {"shards": shards, "own dlogits": place.part(full.dlogits, -1)}


def run_ends(answers: tuple[Any, Any, Any], case: Sizes, given: dict[str, Any], group: Any) -> Observed:
    table_split, look_up, scores = answers
    with called_as("table_split()"):
        word = table_split()
    if not isinstance(word, str) or word not in DIM:
        return {ONE_WORD: Claim(f"it returned {word!r}")}
    on_rank = {name: value.to(device()) for name, value in given.items() if isinstance(value, Tensor)}
    e, one_hot, y = given["shards"][word].to(device()), on_rank["one_hot"], on_rank["y"]
    snapshot = Snapshot(one_hot=one_hot)
    first = observe(lambda e: look_up(one_hot, e), on_rank["dx"], inputs={"E": e})
    first["inputs unchanged"] = Changed((*first["inputs unchanged"], *snapshot.changed()))
    with torch.no_grad():
        logits = scores(y.clone(), e.clone())
    own = isinstance(logits, Tensor) and logits.shape[-1:] == on_rank["own dlogits"].shape[-1:]
    second = observe(scores, on_rank["own dlogits" if own else "dlogits"], inputs={"Y": y, "E": e})
    seen = {
        f"{name} of {end}": value for end, some in ((LOOK_UP, first), (SCORES, second)) for name, value in some.items()
    }
    return {ONE_WORD: Claim(""), "split": word, "own logits": own} | {
        with_split(word, name): seen[name] for name in seen
    }


def with_split(word: str, name: str) -> str:
    """Return an observation's name, which mentions the split if it's about traffic, unless it's the cheapest split."""
    return f"{name} with E by {word}" if "traffic" in name and word != CHEAPEST else name


def right_ends(case: Sizes, full: BothEnds, place: Place) -> Observed:
    mine = place.observed[place.index]
    word = mine.get("split")
    if word is None:
        return {}
    logits, vectors = full.y @ full.table.T, full.one_hot @ full.table
    look_up, output = (
        tokens.flatten(0, -2).T @ values.flatten(0, -2)
        for tokens, values in ((full.one_hot, full.dx), (full.dlogits, full.y))
    )
    sent, nothing = place.traffic(("all_reduce", vectors.numel())), place.traffic()
    right = {
        f"out of {LOOK_UP}": vectors,
        f"dE of {LOOK_UP}": place.part(look_up, DIM[word]),
        f"forward traffic of {LOOK_UP}": sent,
        f"backward traffic of {LOOK_UP}": nothing,
        f"out of {SCORES}": place.part(logits, -1) if mine["own logits"] else logits,
        f"dY of {SCORES}": full.dlogits @ full.table,
        f"dE of {SCORES}": place.part(output, DIM[word]),
        f"forward traffic of {SCORES}": nothing,
        f"backward traffic of {SCORES}": sent,
    }
    return {with_split(word, name): value for name, value in right.items()}


def own_terms(case: Sizes, full: BothEnds, size: int) -> dict[str, list[Tensor]]:
    """Return what each rank adds to the vectors and to dY, if the table is split by rows."""
    shards = full.table.chunk(size)
    ones, upstream = full.one_hot.chunk(size, -1), full.dlogits.chunk(size, -1)
    return {
        "term of X": [mine @ e for mine, e in zip(ones, shards, strict=True)],
        "contribution to dY": [mine @ e for mine, e in zip(upstream, shards, strict=True)],
    }


exercise(
    "7.1", "One table, two jobs", takes=["table_split", "look_up", "scores"],
    trials=[
        OnRanks(
            cases=(Sizes(), Sizes(40, 8, (1, 5)), Sizes(16, 4, (3, 1))), draw=draw_ends, give=give_ends, run=run_ends,
            right=right_ends, terms=own_terms,
            world_sizes=(2, 4, 1),  # two ranks come first, as they reveal the most about a mistake
        )
    ],
    passed="The look-up sends one message forward, and the output layer sends one message backward. Both messages are "
    "the size of X, and the table itself is never sent.",
)  # fmt: skip

# 7.2: the masked look-up


@dataclass(frozen=True)
class Lookup(Case):
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


LOOKUPS = (
    Lookup("IDs from all ranks, none at the border of a shard", inner_ids),
    Lookup("the first and the last id of every rank", border_ids),
    Lookup("a flat tensor of IDs, all of them from the last rank", last_ranks_ids),
    Lookup("with a padding_row", border_ids, padding_idx=VOCAB - 1, transposed=True),
    Lookup("with a padding_row of 0", border_ids, padding_idx=0),
    Lookup("IDs from all ranks, and infinite rows that nobody looks up", inner_ids, broken=True),
    Lookup("IDs from ranks with different numbers of rows", border_ids, uneven=True),
    Lookup("IDs from all ranks", border_ids, groups=GROUPS),
)


class Ids(NamedTuple):
    table: Tensor  # [v, h], without padding
    ids: Tensor  # [..]
    dy: Tensor  # [.., h]


def draw_ids(case: Lookup, generator: torch.Generator, size: int) -> Ids:
    ids = case.draw_ids(generator, size, (3, 5))
    ids = ids.T if case.transposed else ids
    table = random_table(generator)
    if case.broken:
        table[:: rows_per_rank(size)] = math.inf
    return Ids(table, ids, random_tensor(generator, *ids.shape, HIDDEN))


def held(case: Lookup, place: Place) -> tuple[int, int]:
    """Return the range of rows that the rank at this place holds, as (start, stop)."""
    rows, inner = rows_per_rank(place.size), range(1, place.size)
    start, stop = (end * rows + (case.uneven and end in inner) for end in (place.index, place.index + 1))
    return start, stop


def give_rows(case: Lookup, problem: Ids, place: Place) -> dict[str, Any]:
    padding, (start, stop) = case.padding_idx, held(case, place)
    mine = padding is not None and start <= padding < stop
    return {
        "ids": problem.ids,
        "weight": padded(problem.table, place.size)[start:stop],
        "start": start,
        "stop": stop,
        "dy": problem.dy,
        "options": {"padding_row": padding - start} if mine and padding is not None else {},
    }


def run_lookup(parallel_lookup: Callable[..., Any], case: Lookup, given: dict[str, Any], group: Any) -> Observed:
    ids = given["ids"].to(device())
    options = given["options"] | ({"group": group} if case.groups else {})
    snapshot = Snapshot(ids=ids)

    def look_up(weight: Tensor) -> Any:
        return parallel_lookup(ids, weight, given["start"], given["stop"], **options)

    seen = observe(look_up, given["dy"].to(device()), inputs={"weight": given["weight"].to(device())})
    return seen | {"inputs unchanged": Changed((*seen["inputs unchanged"], *snapshot.changed()))}


def right_lookup(case: Lookup, problem: Ids, place: Place) -> Observed:
    (table, ids, dy), (start, stop) = problem, held(case, place)
    return {
        "out": padded(table, place.size)[ids],
        "dweight": padded(gradient(ids, dy, case.padding_idx), place.size)[start:stop],
        "forward traffic": place.traffic(("all_reduce", dy.numel())),
        "backward traffic": place.traffic(),
    }


exercise(
    "7.2", "The masked look-up", takes=["parallel_lookup"],
    trials=[OnRanks(cases=LOOKUPS, draw=draw_ids, give=give_rows, run=run_lookup, right=right_lookup)],
    passed="The look-up sends the vectors once in the forward pass and nothing in the backward pass, because the "
    "gradient of each row is computed on the rank that has the row.",
)  # fmt: skip

# 7.4: the logits


@dataclass(frozen=True)
class Logits(Case):
    """A call of parallel_logits. If `padding`, it's told the size of the vocabulary.

    multiple: the table is padded until each rank has a multiple of this many rows
    """

    gather: bool = False
    padding: bool = False
    leading: tuple[int, ...] = (2, 5)
    transposed: bool = False
    multiple: int = 1

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"gather": True} if self.gather else {}
        return options | ({"vocab_size": VOCAB} if self.padding else {})

    def describe(self, name: str) -> str:
        options = [f"{option}={value}" for option, value in self.options.items()] + ["group=group"] * bool(self.groups)
        return f"parallel_logits({', '.join(['x', 'weight', *options])})" + " with a non-contiguous x" * self.transposed


LOGITS = (
    Logits(),
    Logits(leading=(3,), transposed=True),
    Logits(padding=True),
    Logits(padding=True, multiple=12),  # on four ranks, two of them hold nothing but padding
    Logits(gather=True, padding=True),
    Logits(gather=True, padding=True, multiple=12),
    Logits(gather=True),
    Logits(padding=True, groups=GROUPS),
    Logits(gather=True, padding=True, groups=GROUPS),
)


class Output(NamedTuple):
    table: Tensor  # [padded v, h]
    x: Tensor  # [.., h]
    dlogits: Tensor  # [.., padded v], zero for padding, as any softmax would have it


def draw_logits(case: Logits, generator: torch.Generator, size: int) -> Output:
    x = random_tensor(generator, HIDDEN, *case.leading).movedim(0, -1)
    table = padded(random_table(generator), size, case.multiple)
    dlogits = random_tensor(generator, *case.leading, len(table))
    if case.padding:
        dlogits[..., VOCAB:] = 0
    return Output(table, x if case.transposed else x.contiguous(), dlogits)


def returned(case: Logits, logits: Tensor, place: Place) -> Tensor:
    """Return what this rank returns of all the logits [.., padded v], or of their gradients."""
    if case.gather:
        return logits[..., :VOCAB] if case.padding else logits
    return place.part(logits, -1)


def give_output(case: Logits, problem: Output, place: Place) -> dict[str, Tensor]:
    weight = part(problem.table[:VOCAB], place.index, place.size, case.multiple)
    return {"x": problem.x, "weight": weight, "dy": returned(case, problem.dlogits, place)}


def run_logits(parallel_logits: Callable[..., Any], case: Logits, given: dict[str, Tensor], group: Any) -> Observed:
    options = case.options | ({"group": group} if case.groups else {})
    inputs = {name: given[name].to(device()) for name in ("x", "weight")}
    return observe(lambda x, weight: parallel_logits(x, weight, **options), given["dy"].to(device()), inputs=inputs)


def right_logits(case: Logits, problem: Output, place: Place) -> Observed:
    table, x, dlogits = problem
    logits = x @ table.T
    if case.padding:
        logits[..., VOCAB:] = -math.inf
    return {
        "out": returned(case, logits, place),
        "dx": dlogits @ table,
        "dweight": place.part(dlogits.flatten(0, -2).T @ x.flatten(0, -2)),
        "forward traffic": place.traffic(*[("all_gather", logits.numel())] * case.gather),
        "backward traffic": place.traffic(("all_reduce", x.numel())),
    }


def contributions(case: Logits, problem: Output, size: int) -> dict[str, Sequence[Tensor]]:
    pairs = zip(problem.dlogits.chunk(size, -1), problem.table.chunk(size), strict=True)
    return {"contribution to dx": [mine @ rows for mine, rows in pairs]}


exercise(
    "7.4", "Logits, and the token that doesn't exist", takes=["parallel_logits"],
    trials=[
        OnRanks(
            cases=LOGITS, draw=draw_logits, give=give_output, run=run_logits, right=right_logits, terms=contributions,
            world_sizes=(2, 4, 1),
        )
    ],
    passed="Without a gather, the logits send nothing in the forward pass and one message the size of x in the "
    "backward pass. And no softmax will ever choose a token that doesn't exist.",
)  # fmt: skip
