"""The check for exercise 2.2, in which the learner computes Z = (X A) B with sharded weights and the least traffic.

In a ring all-gather or reduce-scatter, each rank sends (p-1)/p of a tensor's bytes. In a ring all-reduce, each rank
sends twice as much. For each of the four ways to split A and B, this table shows how many elements the cheapest plan
sends per row of X, without the factor (p-1)/p, and which collectives this plan needs:

    column, row       2 out              all-reduce Z
    column, column    hidden + out       all-gather X A, then Z
    row, column       2 hidden + out     all-reduce X A, then all-gather Z
    row, row          hidden + 2 out     reduce-scatter X A, then all-reduce Z
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.course import checks
from tplab.runtime import device, record

IN = 8
Splits = tuple[str, str]
Choose = Callable[[int, int], Splits]
Compute = Callable[[Tensor, Tensor, Tensor, Splits], Tensor]
COSTS: Mapping[Splits, Callable[[int, int], int]] = {
    ("column", "row"): lambda hidden, out: 2 * out,
    ("column", "column"): lambda hidden, out: hidden + out,
    ("row", "column"): lambda hidden, out: 2 * hidden + out,
    ("row", "row"): lambda hidden, out: hidden + 2 * out,
}
DIM = {"column": 1, "row": 0}
TWICE_P = "p times the right values"
OWN = "this rank's own result"
STACKED = "the results of all ranks, concatenated along dimension 0"


@dataclass(frozen=True)
class Sizes(checks.Case):
    hidden: int = 24
    out: int = 8
    leading: tuple[int, ...] = (5,)  # all dimensions of x except the last

    def describe(self, name: str) -> str:
        dimensions = "1 dimension" if not self.leading else f"{len(self.leading) + 1} dimensions"
        return f"hidden = {self.hidden}, out = {self.out}, x with {dimensions}"


CASES = (
    Sizes(),
    Sizes(hidden=8, out=24),
    Sizes(hidden=12, out=12),
    Sizes(leading=(2, 3)),
    Sizes(4, 8, (3, 1, 2)),
    Sizes(leading=()),
)
CHOICES = ((16384, 4096), (16, 4096), (4096, 4096), (4097, 4096), (4095, 4096), (1, 2), (2, 1))


class Problem(NamedTuple):
    x: Tensor  # [..., IN]
    a: Tensor  # [IN, hidden], or a shard of it
    b: Tensor  # [hidden, out], or a shard of it


def draw(case: Sizes, generator: torch.Generator, size: int) -> Problem:
    return Problem(
        checks.random_tensor(generator, *case.leading, IN),
        checks.random_tensor(generator, IN, case.hidden),
        checks.random_tensor(generator, case.hidden, case.out),
    )


def give(chosen: Mapping[tuple[int, int], Splits], case: Sizes, problem: Problem, place: checks.Place) -> Problem:
    a, b = chosen[case.hidden, case.out]
    return Problem(
        problem.x, place.part(problem.a, DIM[a]).contiguous(), place.part(problem.b, DIM[b]).contiguous()
    )  # fmt: skip


def run(
    chosen: Mapping[tuple[int, int], Splits], two_matmuls: Compute, case: Sizes, given: Problem, group: Any
) -> checks.Observed:
    x, a, b = (tensor.to(device()) for tensor in given)
    before = checks.Snapshot(x=x, a_shard=a, b_shard=b)
    with record() as section:
        out = two_matmuls(x, a, b, chosen[case.hidden, case.out])
    return {"out": out, "traffic": as_all_reduce(checks.traffic(section)), "inputs unchanged": before.changed()}


def as_all_reduce(traffic: checks.Traffic) -> checks.Traffic:
    """Replace a reduce-scatter and an all-gather of the same size with one all-reduce, which sends just as many bytes.

    Return any other traffic unchanged.
    """
    if sorted(call.kind for call in traffic) == ["all_gather", "reduce_scatter"]:
        whole = {call._replace(kind="all_reduce") for call in traffic}
        if len(whole) == 1:
            return checks.Traffic(whole)
    return traffic


def expect(
    chosen: Mapping[tuple[int, int], Splits], case: Sizes, problem: Problem, place: checks.Place
) -> checks.Expected:
    z = problem.x @ problem.a @ problem.b
    rows = z.numel() // case.out
    splits = chosen[case.hidden, case.out]
    if splits == ("column", "row"):
        own = place.part(problem.x @ problem.a, -1) @ place.part(problem.b, 0)
        calls = [("all_reduce", rows * case.out)]
        mistakes = {OWN: own, TWICE_P: place.size * z}
    else:
        own = z.chunk(place.size, -1)[place.index]
        calls = [("all_gather", rows * case.hidden), ("all_gather", rows * case.out)]
        mistakes = {OWN: own, STACKED: torch.cat(z.chunk(place.size, -1))}
    alone = place.size == 1
    return checks.Expected({"out": z, "traffic": place.traffic(*calls)}, {"out": {} if alone else mistakes})


def choice(choose: Choose, hidden: int, out: int) -> Splits:
    """Return the learner's splits for these sizes. The check fails if they're invalid or not the cheapest splits."""
    with checks.calling(f"choose_splits(hidden={hidden}, out={out})"):
        answer = choose(hidden, out)
    said: Any = tuple(answer) if isinstance(answer, (tuple, list)) else answer
    if said not in COSTS:
        checks.fail(
            "2.2",
            f"choose_splits(hidden={hidden}, out={out}) returned {said!r}.",
            'It should return two words, one for A and one for B. Each word should be either "column" or "row". What '
            "does your function return?",
        )
    cost, least = COSTS[said](hidden, out), min(each(hidden, out) for each in COSTS.values())
    if cost > least:
        checks.fail(
            "2.2",
            f"For hidden = {hidden} and out = {out}, your combination ({', '.join(said)}) sends {cost} elements per "
            f"row of X (times (p-1)/p), but another combination only sends {least}.",
            "Go through all four combinations. What does each rank hold after the first matmul? Which collectives do "
            "you need after that? For which sizes is each combination the cheapest?",
        )
    return said[0], said[1]


@checks.exercise("2.2", "The cheapest way through two matmuls")
def cheapest_chain(choose_splits: Choose, two_matmuls: Compute) -> checks.Verdict:
    for hidden, out in CHOICES:
        choice(choose_splits, hidden, out)
    chosen = {(case.hidden, case.out): choice(choose_splits, case.hidden, case.out) for case in CASES}
    checks.check_cases(
        "2.2", two_matmuls, CASES, draw=draw, give=partial(give, chosen), run=partial(run, chosen),
        expect=partial(expect, chosen), questions=QUESTIONS, world_sizes=(2, 4, 1),
    )  # fmt: skip
    return checks.Verdict(
        "Your splits need the minimum traffic when X A is wider than Z, when it's narrower, and when both have the "
        "same width."
    )


def only_traffic(differences: checks.Differences) -> bool:
    """Return True if the values are right and only the traffic is wrong."""
    return differences.names == {"traffic"}


QUESTIONS = (
    checks.LATE_QUESTION,
    checks.Question(
        lambda d: "rounded" in d.kinds() or "dtype" in d.kinds(),
        "Somewhere, your code casts a tensor to a different dtype, which can lose precision. Which line does that?",
    ),
    checks.Question(
        checks.kind_is("out", STACKED),
        "You concatenated the ranks' columns of Z along dimension 0. Along which dimension should you concatenate "
        "columns?",
    ),
    checks.Question(
        checks.kind_is("out", OWN),
        "You returned only this rank's own result. With these splits, does each rank compute some of the columns of Z "
        "or a partial sum for every entry of Z? Which collective turns the ranks' results into the full Z?",
    ),
    checks.Question(
        checks.kind_is("out", TWICE_P),
        "Z is p times too large, because your code added p copies of the full result. Does your code all-reduce Z "
        "twice, or does every rank already have the full Z before the all-reduce?",
    ),
    checks.Question(
        lambda d: "out" in d.names and not d.malformed,
        "After the first matmul, rank r holds the r-th block of columns of X A. Which rows of B are these columns "
        "multiplied by? Which rows does your shard of B contain?",
    ),
    checks.Question(
        only_traffic,
        "Z is correct, but your collectives aren't the cheapest ones for these splits. Do the ranks need to "
        "communicate between the two matmuls? Could any of your collectives send a smaller tensor?",
    ),
)
