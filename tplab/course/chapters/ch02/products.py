"""The checks for exercises 2.2 and 2.3: one matmul, Y = X A, with A split by columns or by rows.

Both run on 1, 2 and 4 ranks and are compared with X @ A in a single process. X has two or three dimensions. An answer
may use one collective, with a message as large as Y.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.course import checks
from tplab.runtime import device, record

IN, OUT = 8, 12  # divisible by every p, and different, so that mixing them up is detected
Product = Callable[[Tensor, Tensor], Tensor]

OWN = "this rank's own product"
STACKED = "the products of all ranks, one after another along dimension 0"
RESHAPED = "the products of all ranks along dimension 0, reshaped to the shape of Y"
SUM = "the sum of the products of all ranks"
COPIES = "p copies of this rank's product side by side"
BESIDE = "the products of all ranks, side by side"
P_TIMES_OWN = "p times this rank's own product"
LARGEST = "the largest of the ranks' products, entry by entry"


@dataclass(frozen=True)
class Input(checks.Case):
    leading: tuple[int, ...] = (5,)  # all dimensions of x but the last

    def describe(self, name: str) -> str:
        return f"x of {len(self.leading) + 1} dimensions"


CASES = (Input(), Input(leading=(2, 3)))


@dataclass(frozen=True)
class Split:
    """A way to split the matmul, by columns or by rows of A.

    dim_of_x:   dimension along which x is sharded, or None if every rank has the full x
    dim_of_a:   dimension along which A is sharded
    collective: combines the ranks' matmuls into Y
    mistakes:   computes the values that known mistakes give, from the ranks' matmuls, Y and the rank's index
    """

    dim_of_x: int | None
    dim_of_a: int
    collective: str
    mistakes: Callable[[Sequence[Tensor], Tensor, int], Mapping[str, Tensor]]


class Problem(NamedTuple):
    x: Tensor  # [..., IN]
    a: Tensor  # [IN, OUT]


def draw(case: Input, generator: torch.Generator, size: int) -> Problem:
    return Problem(checks.random_tensor(generator, *case.leading, IN), checks.random_tensor(generator, IN, OUT))


def shards(split: Split, problem: Problem, size: int) -> list[Problem]:
    """Return the shards of x and A on each of `size` ranks."""
    xs = [problem.x] * size if split.dim_of_x is None else problem.x.chunk(size, split.dim_of_x)
    rows_or_columns = problem.a.chunk(size, split.dim_of_a)
    return [Problem(x.contiguous(), a.contiguous()) for x, a in zip(xs, rows_or_columns, strict=True)]


def give(split: Split, case: Input, problem: Problem, place: checks.Place) -> Problem:
    return shards(split, problem, place.size)[place.index]


def run(product: Product, case: Input, given: Problem, group: Any) -> checks.Observed:
    x, a = (tensor.to(device()) for tensor in given)
    before = checks.Snapshot(**{"the first argument": x, "the second argument": a})
    with record() as section:
        out = product(x, a)
    return {"out": out, "traffic": checks.traffic(section), "inputs unchanged": before.changed()}


def expect(split: Split, case: Input, problem: Problem, place: checks.Place) -> checks.Expected:
    y = problem.x @ problem.a
    products = [x @ a for x, a in shards(split, problem, place.size)]
    mistakes = split.mistakes(products, y, place.index) if place.size > 1 else {}
    return checks.Expected({"out": y, "traffic": place.traffic((split.collective, y.numel()))}, {"out": dict(mistakes)})


def column_mistakes(products: Sequence[Tensor], y: Tensor, rank: int) -> dict[str, Tensor]:
    stacked = torch.cat(list(products))
    return {
        OWN: products[rank],
        STACKED: stacked,
        RESHAPED: stacked.reshape(y.shape),
        SUM: torch.stack(list(products)).sum(0),
        COPIES: torch.cat([products[rank]] * len(products), -1),
    }


def row_mistakes(products: Sequence[Tensor], y: Tensor, rank: int) -> dict[str, Tensor]:
    return {
        OWN: products[rank],
        P_TIMES_OWN: len(products) * products[rank],
        LARGEST: torch.stack(list(products)).amax(0),
        BESIDE: torch.cat(list(products), -1),
        STACKED: torch.cat(list(products)),
    }


COLUMNS = Split(None, 1, "all_gather", column_mistakes)
ROWS = Split(-1, 0, "all_reduce", row_mistakes)


def check_product(number: str, product: Product, split: Split, questions: Sequence[checks.Question]) -> None:
    checks.check_cases(
        number, product, CASES, draw=draw, give=partial(give, split), run=run, expect=partial(expect, split),
        questions=questions, world_sizes=(2, 4, 1),  # two ranks reveal the most about a mistake
    )  # fmt: skip


@checks.exercise("2.2", "Y = [X A_0, X A_1, ...] on real ranks")
def column_split(column_product: Product) -> checks.Verdict:
    check_product("2.2", column_product, COLUMNS, COLUMN_QUESTIONS)
    return checks.Verdict("One all-gather of b·out numbers. The weights stayed where they were.")


@checks.exercise("2.3", "Y = X_0 A_0 + X_1 A_1 + ... on real ranks")
def row_split(row_product: Product) -> checks.Verdict:
    check_product("2.3", row_product, ROWS, ROW_QUESTIONS)
    return checks.Verdict("One all-reduce of b·out numbers. The weights stayed where they were.")


# Questions


def only_traffic(differences: checks.Differences) -> bool:
    """Return whether the values are right and only the traffic differs."""
    return differences.names == {"traffic"}


def sent(*words: str) -> Callable[[checks.Differences], bool]:
    """Return a predicate that tests whether only the traffic is wrong and it contains all these words."""
    return lambda differences: (
        only_traffic(differences) and all(word in d.text.partition("saw")[2] for word in words for d in differences)
    )


ROUNDED = checks.Question(
    lambda d: bool({"rounded", "dtype"} & d.kinds()),
    "Which step leaves the dtype of x? Fewer bytes are sent that way, and digits are lost.",
)

ROOT_ONLY = checks.Question(
    lambda d: d.p > 1 and "out" in d.names and 0 not in d.ranks("out"),
    "Rank 0 is right, the others are not. Which collective gives its result to one rank, and which to all?",
)

ZEROS = checks.Question(
    lambda d: "zeros" in d.kinds() and not d.malformed,
    "The shape is right. Which line puts numbers in, and is it reached?",
)

WEIGHTS_MOVED = checks.Question(
    sent(f"of {IN * OUT} elements"),
    f"The numbers are right, but {IN * OUT} elements is the size of A: the weights were sent. They are the large "
    "part, and the reason to split. Multiply first: what has to be sent then?",
)

TWICE = checks.Question(
    sent(" 2 all_"),
    "The numbers are right. Is the second collective needed, and what would each cost?",
)

MORE = checks.Question(
    only_traffic,
    "The numbers are right, but by more steps or more bytes than it takes. After each rank's product one collective "
    "is enough: which?",
)

COLUMN_QUESTIONS = (
    checks.LATE_QUESTION,
    ROUNDED,
    checks.Question(
        lambda d: "order" in d.kinds(),
        "The right columns, in another order. all_gather fills its list in rank order, the same on every rank: what "
        "did you do with it?",
    ),
    ROOT_ONLY,
    ZEROS,
    checks.Question(
        checks.kind_is("out", OWN), "These are this rank's columns of Y. Who has the others, and how do they get here?"
    ),
    checks.Question(
        checks.kind_is("out", STACKED, RESHAPED),
        "The parts of Y are columns. Along which dimension were they put together? (all_gather_into_tensor always uses "
        "dimension 0, and a reshape doesn't move numbers between rows as you need it.)",
    ),
    checks.Question(
        checks.kind_is("out", SUM), "The parts are different columns of Y, not terms of a sum. Should they be added?"
    ),
    checks.Question(
        lambda d: d.names == {"out"} and any(COPIES in row.text for row in d),
        "One part stands in all p places. Are the p tensors of your list p different ones? ([tensor] * p is p times "
        "the same.)",
    ),
    checks.Question(
        checks.kind_is("out", COPIES), "Every part came from this rank. Which call brings the other ranks' parts here?"
    ),
    checks.Question(
        lambda d: d.kind("out") == "shape",
        "x is [.., in], with any number of dimensions in front. Which dimension of the product is `out`, counted "
        "from the end?",
    ),
    checks.Question(
        sent("all_reduce"),
        "The numbers are right. But an all-reduce adds, and here nothing has to be added: each column of Y is "
        "finished on one rank. Which collective only brings the parts together, for half of what an all-reduce "
        "sends?",
    ),
    checks.Question(
        sent("broadcast", "all_gather"),
        "Who already holds x? (It is replicated: look at the docstring.) What does the broadcast change?",
    ),
    WEIGHTS_MOVED,
    TWICE,
    MORE,
)

ROW_QUESTIONS = (
    checks.LATE_QUESTION,
    ROUNDED,
    ROOT_ONLY,
    ZEROS,
    checks.Question(
        checks.kind_is("out", OWN),
        "Each rank has its own terms of the sum. Who adds up the terms of all ranks? (If you did call all_reduce: "
        "which tensor did it write to, and which one do you return?)",
    ),
    checks.Question(checks.kind_is("out", "1/p"), "Y is the sum of the products. Is it their mean?"),
    checks.Question(
        checks.kind_is("out", LARGEST), "Which operation over the ranks makes Y out of the terms: their maximum?"
    ),
    checks.Question(checks.kind_is("out", "p times"), "How many times is each term added?"),
    checks.Question(
        checks.kind_is("out", P_TIMES_OWN),
        "These are p times this rank's own terms. Where do the other ranks' terms come in?",
    ),
    checks.Question(
        checks.kind_is("out", BESIDE, STACKED),
        "Each product has the full shape of Y already. Do the products stand side by side, or add up?",
    ),
    checks.Question(
        lambda d: any(d.kind(name) == "changed" for name in d.names) and "out" in d.names,
        "Y is a sum of products. Is it the product of a sum? What did all_reduce write into?",
    ),
    WEIGHTS_MOVED,
    checks.Question(
        sent("reduce_scatter", "all_gather"),
        "The numbers are right, and in a ring the bytes are too: these two together are what an all-reduce does. "
        "Which single call does both?",
    ),
    checks.Question(
        sent("all_gather"),
        "The numbers are right, but every rank received p tensors of the size of Y to add them up itself. Which "
        "collective adds on the way?",
    ),
    checks.Question(
        sent("broadcast", "reduce"),
        "The numbers are right, in two steps: to one rank, then from it to all. Which single collective does both?",
    ),
    TWICE,
    MORE,
)
