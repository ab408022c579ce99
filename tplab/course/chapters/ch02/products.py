"""Run one of the two products of exercises 2.2 and 2.3 on 1, 2 and 4 ranks, against X @ A on one process.

The inputs have two and three dimensions; each product may use one collective, of the size of Y.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tplab.course.checks import (
    Differences,
    Lookalikes,
    Observed,
    Question,
    Snapshot,
    Traffic,
    fresh_generator,
    random_tensor,
    run_cases,
    traffic,
    verify,
)
from tplab.runtime import device, record

IN, OUT = 8, 12  # divisible by every p, and different, so that a mix-up shows
Product = Callable[[Tensor, Tensor], Tensor]


def run_product(product: Product, notes: Sequence[str], data: Sequence[Any]) -> list[Observed]:
    """On a rank: product(x, a) for every case; data[case][rank] has what this rank is given."""
    noted = []
    for case in data:
        x, a = (tensor.to(device()) for tensor in case[dist.get_rank()])
        before = Snapshot(**{"the first argument": x, "the second argument": a})
        with record() as section:
            out = product(x, a)
        noted.append({"out": out, "traffic": traffic(section), "inputs unchanged": before.changed()})
    return noted


def check_product(
    number: str,
    product: Product,
    cut_x: Callable[[Tensor, int], Sequence[Tensor]],
    dim_of_a: int,
    collective: str,
    lookalikes: Callable[[Sequence[Tensor], Tensor], Lookalikes],
    questions: Sequence[Question],
) -> None:
    """Run one of the two products on 1, 2 and 4 ranks; each has one collective of the size of Y."""
    for p in (2, 4, 1):  # two ranks tell most about a mistake
        generator = fresh_generator()
        leading = ((5,), (2, 3))  # x [b, in] and [b, s, in]
        wholes = [(random_tensor(generator, *shape, IN), random_tensor(generator, IN, OUT)) for shape in leading]
        cases = [list(zip(cut_x(x, p), a.chunk(p, dim_of_a), strict=True)) for x, a in wholes]
        cases = [[(x.contiguous(), a.contiguous()) for x, a in case] for case in cases]
        notes = [f"x of {x.dim()} dimensions" for x, _ in wholes]
        runs = run_cases(run_product, p, product, notes, cases, note=str)
        for index, ((x, a), seen) in enumerate(zip(wholes, runs, strict=True)):
            y = x @ a
            products = [x_part @ a_part for x_part, a_part in cases[index]]
            expected = [{"out": y, "traffic": Traffic.expected(p, (collective, y.numel()))}] * p
            verify(
                number,
                p,
                seen,
                expected,
                questions=questions,
                lookalikes=lookalikes(products, y),
                note=notes[index],
            )


def only_traffic(differences: Differences) -> bool:
    """The right numbers came by another way."""
    return differences.names == {"traffic"}


def sent(*words: str) -> Callable[[Differences], bool]:
    """The right numbers came by another way, and the recorded traffic has all these words in it."""
    return lambda differences: (
        only_traffic(differences) and all(word in d.text.partition("saw")[2] for word in words for d in differences)
    )


OWN = "this rank's own product"
STACKED = "the products of all ranks, one after another along dimension 0"

ROOT_ONLY = Question(
    lambda d: d.p > 1 and "out" in d.names and 0 not in d.ranks("out"),
    "Rank 0 is right, the others are not. Which collective gives its result to one rank, and which to all?",
)

ZEROS = Question(
    lambda d: "zeros" in d.kinds() and not d.malformed,
    "The shape is right. Which line puts numbers in, and is it reached?",
)

WEIGHTS_MOVED = Question(
    sent(f"of {IN * OUT} elements"),
    f"The numbers are right, but {IN * OUT} elements is the size of A: the weights were sent. They are the large "
    "part, and the reason to split. Multiply first: what has to be sent then?",
)

TWICE = Question(
    sent(" 2 all_"),
    "The numbers are right. Is the second collective needed, and what would each cost?",
)

MORE = Question(
    only_traffic,
    "The numbers are right, but by more steps or more bytes than it takes. After each rank's product one collective "
    "is enough: which?",
)

ROUNDED = Question(
    lambda d: bool({"rounded", "dtype"} & d.kinds()),
    "Which step leaves the dtype of x? Fewer bytes are sent that way, and digits are lost.",
)
