"""The checks for exercises S.1 and S.2, which split the matmul Y = X A by the rows or by the columns of A.

Both checks run the answer on 1, 2 and 4 ranks and compare it with X @ A in a single process. They have one case with a
two-dimensional X and one with a three-dimensional X. An answer may call one collective, with a message as large as Y.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.course import checks
from tplab.runtime import device, record

IN, OUT = 8, 12  # divisible by every p, and different, so that the check notices if they're mixed up
Product = Callable[[Tensor, Tensor], Tensor]

OWN = "this rank's own result"
STACKED = "the results of all ranks, stacked along dimension 0"
RESHAPED = "the results of all ranks, stacked along dimension 0 and then reshaped to the shape of Y"
SUM = "the sum of all ranks' results"
COPIES = "p copies of this rank's result, side by side"
BESIDE = "the results of all ranks, side by side"
P_TIMES_OWN = "p times this rank's own result"
LARGEST = "the maximum over the ranks' results, element by element"


@dataclass(frozen=True)
class Input(checks.Case):
    leading: tuple[int, ...] = (5,)  # all dimensions of x except the last

    def describe(self, name: str) -> str:
        return f"x with {len(self.leading) + 1} dimensions"


CASES = (Input(), Input(leading=(2, 3)))


@dataclass(frozen=True)
class Split:
    """A way to split the matmul, by columns or by rows of A.

    dim_of_x:   the dimension along which x is sharded, or None if every rank has the full x
    dim_of_a:   the dimension along which A is sharded
    collective: the collective that combines the results of the ranks' matmuls into Y
    mistakes:   computes what common mistakes would produce, given the ranks' results, the full Y and the rank's index
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
    """Return the x and the A that each of `size` ranks receives, sharded the way `split` specifies."""
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
        questions=questions, world_sizes=(2, 4, 1),  # two ranks come first, as they reveal the most about a mistake
    )  # fmt: skip


@checks.exercise("S.1", "A matmul split by rows")
def row_split(row_product: Product) -> checks.Verdict:
    check_product("S.1", row_product, ROWS, ROW_QUESTIONS)
    return checks.Verdict(
        "Your code needs just one collective, an all-reduce of a tensor the size of Y. It doesn't send any weights."
    )


@checks.exercise("S.2", "A matmul split by columns")
def column_split(column_product: Product) -> checks.Verdict:
    check_product("S.2", column_product, COLUMNS, COLUMN_QUESTIONS)
    return checks.Verdict(
        "Your code needs just one collective, an all-gather of the columns of Y. It doesn't send any weights."
    )


# Questions


def only_traffic(differences: checks.Differences) -> bool:
    """Return whether the values are right and only the traffic differs."""
    return differences.names == {"traffic"}


def sent(*words: str) -> Callable[[checks.Differences], bool]:
    """Return a predicate that tests whether only the traffic is wrong and the calls seen contain all these words."""
    return lambda differences: (
        only_traffic(differences) and all(word in d.text.partition("saw")[2] for word in words for d in differences)
    )


ROUNDED = checks.Question(
    lambda d: bool({"rounded", "dtype"} & d.kinds()),
    "Somewhere, your code casts values to a different dtype. A smaller dtype saves traffic, but it costs you "
    "precision. Which line contains the cast?",
)

ROOT_ONLY = checks.Question(
    lambda d: d.p > 1 and "out" in d.names and 0 not in d.ranks("out"),
    "Rank 0 has the correct result, but not every rank does. Did you use a collective that gives its result to only "
    "one rank? Which collective gives the result to every rank?",
)

ZEROS = checks.Question(
    lambda d: "zeros" in d.kinds() and not d.malformed,
    "The shape is correct, but all the values are zero. Which line is supposed to fill in the values, and does your "
    "code ever reach that line?",
)

WEIGHTS_MOVED = checks.Question(
    sent(f"of {IN * OUT} elements"),
    f"Y is correct, but you sent {IN * OUT} elements, which is the size of A. Weights are usually the largest tensors, "
    "so it's best to leave them where they are. What would you have to send if every rank multiplied by its own part "
    "of A first?",
)

TWICE = checks.Question(
    sent(" 2 all_"),
    "Y is correct, but you called two collectives, and one would have been enough. Which of your two calls can you "
    "remove?",
)

MORE = checks.Question(
    only_traffic,
    "Y is correct, but you sent more data than necessary. After each rank's matmul, a single collective is all you "
    "need to get Y. Which collective is it?",
)

ROW_QUESTIONS = (
    checks.LATE_QUESTION,
    ROUNDED,
    ROOT_ONLY,
    ZEROS,
    checks.Question(
        checks.kind_is("out", OWN),
        "Your output is only this rank's partial sum. Which collective adds up the partial sums from all ranks? (If "
        "you do call all_reduce, check which tensor it writes to and which tensor you return.)",
    ),
    checks.Question(
        checks.kind_is("out", "1/p"),
        "You averaged the ranks' results. Is Y the average or the sum of the ranks' results?",
    ),
    checks.Question(
        checks.kind_is("out", LARGEST),
        "You took the maximum of the ranks' results. But each rank's result is only a partial sum. Which operation "
        "combines partial sums?",
    ),
    checks.Question(
        checks.kind_is("out", "p times"),
        "Your output is too large by a constant factor. Does your code add every term more than once?",
    ),
    checks.Question(
        checks.kind_is("out", P_TIMES_OWN),
        "You multiplied this rank's partial sum by p, but the other ranks have different partial sums. Which "
        "collective adds up the partial sums from all ranks?",
    ),
    checks.Question(
        checks.kind_is("out", BESIDE, STACKED),
        "Each rank's result already has the full shape of Y. Should you concatenate these results or add them?",
    ),
    checks.Question(
        lambda d: any(d.kind(name) == "changed" for name in d.names) and "out" in d.names,
        "Y is wrong, and your code modified one of its arguments in place. Did you sum the inputs across ranks before "
        "you multiplied them? A product of sums isn't the same as a sum of products.",
    ),
    WEIGHTS_MOVED,
    checks.Question(
        sent("reduce_scatter", "all_gather"),
        "Y is correct, but you used a reduce-scatter and an all-gather where one collective would do. Which "
        "collective has the same effect as these two?",
    ),
    checks.Question(
        sent("all_gather"),
        "Y is correct, but every rank received p tensors the size of Y and summed them locally. Which collective "
        "does the summing for you?",
    ),
    checks.Question(
        sent("broadcast", "reduce"),
        "Y is correct, but your code takes two steps where one would do. First, it computes the sum on one rank, and "
        "then it broadcasts the sum to the other ranks. Which single collective does both?",
    ),
    TWICE,
    MORE,
)

COLUMN_QUESTIONS = (
    checks.LATE_QUESTION,
    ROUNDED,
    checks.Question(
        lambda d: "order" in d.kinds(),
        "You have the correct columns, but they're in the wrong order. On every rank, `all_gather` fills the list in "
        "rank order. Does your code reorder the list before it concatenates the parts?",
    ),
    ROOT_ONLY,
    ZEROS,
    checks.Question(
        checks.kind_is("out", OWN),
        "You returned only this rank's columns of Y. The other ranks have the remaining columns. Which collective "
        "gives every rank all of the columns?",
    ),
    checks.Question(
        checks.kind_is("out", STACKED, RESHAPED),
        "Each rank has different columns of Y. Along which dimension did you concatenate them? (all_gather_into_tensor "
        "always concatenates along dimension 0, and a reshape after that won't turn rows into columns.)",
    ),
    checks.Question(
        checks.kind_is("out", SUM),
        "You added up the ranks' results. But these results are different columns of Y, not terms of the same sum. How "
        "should you combine columns instead?",
    ),
    checks.Question(
        lambda d: d.names == {"out"} and any(COPIES in row.text for row in d),
        "The same columns appear p times in your result. Does your list contain p different tensors? (The list "
        "[tensor] * p contains one and the same tensor p times.)",
    ),
    checks.Question(
        checks.kind_is("out", COPIES),
        "You concatenated p copies of this rank's own columns. Which collective gets you the other ranks' columns?",
    ),
    checks.Question(
        lambda d: d.kind("out") == "shape",
        "Your function should work for an x with any number of dimensions. The columns of Y are always along the last "
        "dimension. Along which dimension did you concatenate them?",
    ),
    checks.Question(
        sent("all_reduce"),
        "Y is correct, but your all-reduce sends more data than necessary. There's nothing to add up here, because "
        "each column of Y is already complete on one rank. Which collective just gathers the columns, and sends only "
        "half as much data as an all-reduce?",
    ),
    checks.Question(
        sent("broadcast", "all_gather"),
        "According to the docstring, every rank already has all of x. So why does your code need a broadcast?",
    ),
    WEIGHTS_MOVED,
    TWICE,
    MORE,
)
