"""The checks of exercises 2.2 and 2.3: the two products, on 1, 2 and 4 ranks, against X @ A on one process.

The inputs have two and three dimensions; each product may use one collective, of the size of Y.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.checking import (
    Differences,
    Observed,
    Question,
    Snapshot,
    Traffic,
    Verdict,
    exercise,
    fresh_generator,
    run_ranks,
    traffic,
    verify,
)
from tplab.runtime import device, record

IN, OUT = 8, 12  # divisible by every p, and different, so that a mix-up shows

Product = Callable[[Tensor, Tensor], Tensor]


def run_product(product: Product, cases: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> list[Observed]:
    """On a rank: product(x, a) for every case; cases[i][rank] has what this rank is given."""
    noted = []
    for case in cases:
        x, a = (tensor.to(device()) for tensor in case[dist.get_rank()])
        before = Snapshot(**{"the first argument": x, "the second argument": a})
        with record() as section:
            out = product(x, a)
        noted.append({"out": out, "traffic": traffic(section), "inputs unchanged": before.changed()})
    return noted


Lookalikes = Mapping[str, Mapping[str, Sequence[Tensor]]]


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
        wholes = [(random(generator, *shape, IN), random(generator, IN, OUT)) for shape in leading]
        cases = [list(zip(cut_x(x, p), a.chunk(p, dim_of_a), strict=True)) for x, a in wholes]
        cases = [[(x.contiguous(), a.contiguous()) for x, a in case] for case in cases]
        seen = run_ranks(run_product, p, product, cases)
        for index, (x, a) in enumerate(wholes):
            y = x @ a
            products = [x_part @ a_part for x_part, a_part in cases[index]]
            expected = [{"out": y, "traffic": Traffic.expected(p, (collective, y.numel()))}] * p
            verify(
                number,
                p,
                [noted[index] for noted in seen],
                expected,
                questions=questions,
                lookalikes=lookalikes(products, y),
                note=f"x of {x.dim()} dimensions",
            )


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def kind_is(*kinds: str) -> Callable[[Differences], bool]:
    """The output is wrong in one of these ways."""
    return lambda differences: differences.kind("out") in kinds


def only_traffic(differences: Differences) -> bool:
    """The right numbers came by another way."""
    return differences.names == {"traffic"}


def sent(*words: str) -> Callable[[Differences], bool]:
    """The right numbers came by another way, and the recorded traffic has all these words in it."""
    return lambda differences: (
        only_traffic(differences) and all(word in d.text.partition("saw")[2] for word in words for d in differences)
    )


_OWN = "this rank's own product"
_STACKED = "the products of all ranks, one after another along dimension 0"
_RESHAPED = "the products of all ranks along dimension 0, reshaped to the shape of Y"
_SUM = "the sum of the products of all ranks"
_COPIES = "p copies of this rank's product side by side"
_BESIDE = "the products of all ranks, side by side"
_P_TIMES_OWN = "p times this rank's own product"
_LARGEST = "the largest of the ranks' products, entry by entry"

_ROOT_ONLY = Question(
    lambda d: d.p > 1 and "out" in d.names and 0 not in d.ranks("out"),
    "Rank 0 is right, the others are not. Which collective gives its result to one rank, and which to all?",
)
_ZEROS = Question(
    lambda d: "zeros" in d.kinds() and not d.malformed,
    "The shape is right. Which line puts numbers in, and is it reached?",
)
_LATE = Question(
    lambda d: "never waited" in d.kinds(),
    "The collective was started with async_op=True. From when on may its result be read?",
)
_WEIGHTS_MOVED = Question(
    sent(f"of {IN * OUT} elements"),
    f"The numbers are right, but {IN * OUT} elements is the size of A: the weights were sent. They are the large "
    "part, and the reason to split. Multiply first: what has to be sent then?",
)
_TWICE = Question(
    sent(" 2 all_"),
    "The numbers are right. Is the second collective needed, and what would each cost?",
)
_MORE = Question(
    only_traffic,
    "The numbers are right, but by more steps or more bytes than it takes. After each rank's product one collective "
    "is enough: which?",
)

_ROUNDED = Question(
    lambda d: bool({"rounded", "dtype"} & d.kinds()),
    "Which step leaves the dtype of x? Fewer bytes are sent that way, and digits are lost.",
)

_COLUMN_QUESTIONS = (
    _LATE,
    _ROUNDED,
    Question(
        lambda d: "order" in d.kinds(),
        "The right columns, in another order. all_gather fills its list in rank order, the same on every rank: what "
        "did you do with it?",
    ),
    _ROOT_ONLY,
    _ZEROS,
    Question(kind_is(_OWN), "These are this rank's columns of Y. Who has the others, and how do they get here?"),
    Question(
        kind_is(_STACKED, _RESHAPED),
        "The parts of Y are columns. Along which dimension were they put together? (all_gather_into_tensor always uses "
        "dimension 0, and a reshape doesn't move numbers between rows as you need it.)",
    ),
    Question(kind_is(_SUM), "The parts are different columns of Y, not terms of a sum. Should they be added?"),
    Question(
        lambda d: d.names == {"out"} and any(_COPIES in row.text for row in d),
        "One part stands in all p places. Are the p tensors of your list p different ones? ([tensor] * p is p times "
        "the same.)",
    ),
    Question(kind_is(_COPIES), "Every part came from this rank. Which call brings the other ranks' parts here?"),
    Question(
        lambda d: d.kind("out") == "shape",
        "x is [.., in], with any number of dimensions in front. Which dimension of the product is `out`, counted "
        "from the end?",
    ),
    Question(
        sent("all_reduce"),
        "The numbers are right. But an all-reduce adds, and here nothing has to be added: each column of Y is "
        "finished on one rank. Which collective only brings the parts together, for half of what an all-reduce "
        "sends?",
    ),
    Question(
        sent("broadcast", "all_gather"),
        "Who already holds x? (It is replicated: look at the docstring.) What does the broadcast change?",
    ),
    _WEIGHTS_MOVED,
    _TWICE,
    _MORE,
)

_ROW_QUESTIONS = (
    _LATE,
    _ROUNDED,
    _ROOT_ONLY,
    _ZEROS,
    Question(
        kind_is(_OWN),
        "Each rank has its own terms of the sum. Who adds up the terms of all ranks? (If you did call all_reduce: "
        "which tensor did it write to, and which one do you return?)",
    ),
    Question(kind_is("1/p"), "Y is the sum of the products. Is it their mean?"),
    Question(kind_is(_LARGEST), "Which operation over the ranks makes Y out of the terms: their maximum?"),
    Question(kind_is("p times"), "How many times is each term added?"),
    Question(
        kind_is(_P_TIMES_OWN), "These are p times this rank's own terms. Where do the other ranks' terms come in?"
    ),
    Question(
        kind_is(_BESIDE, _STACKED),
        "Each product has the full shape of Y already. Do the products stand side by side, or add up?",
    ),
    Question(
        lambda d: any(d.kind(name) == "changed" for name in d.names) and "out" in d.names,
        "Y is a sum of products. Is it the product of a sum? What did all_reduce write into?",
    ),
    _WEIGHTS_MOVED,
    Question(
        sent("reduce_scatter", "all_gather"),
        "The numbers are right, and in a ring the bytes are too: these two together are what an all-reduce does. "
        "Which single call does both?",
    ),
    Question(
        sent("all_gather"),
        "The numbers are right, but every rank received p tensors of the size of Y to add them up itself. Which "
        "collective adds on the way?",
    ),
    Question(
        sent("broadcast", "reduce"),
        "The numbers are right, in two steps: to one rank, then from it to all. Which single collective does both?",
    ),
    _TWICE,
    _MORE,
)


def _column_lookalikes(products: Sequence[Tensor], y: Tensor) -> Lookalikes:
    p, stacked = len(products), torch.cat(list(products))
    if p == 1:
        return {}
    return {
        "out": {
            _OWN: products,
            _STACKED: [stacked] * p,
            _RESHAPED: [stacked.reshape(y.shape)] * p,
            _SUM: [torch.stack(list(products)).sum(0)] * p,
            _COPIES: [torch.cat([part] * p, -1) for part in products],
        }
    }


def _row_lookalikes(products: Sequence[Tensor], y: Tensor) -> Lookalikes:
    p = len(products)
    if p == 1:
        return {}
    return {
        "out": {
            _OWN: products,
            _P_TIMES_OWN: [p * part for part in products],
            _LARGEST: [torch.stack(list(products)).amax(0)] * p,
            _BESIDE: [torch.cat(list(products), -1)] * p,
            _STACKED: [torch.cat(list(products))] * p,
        }
    }


@exercise("2.2", "Y = [X A_0, X A_1, ...] on real ranks")
def column_split(column_product: Product) -> Verdict:
    check_product(
        "2.2",
        column_product,
        cut_x=lambda x, p: [x] * p,
        dim_of_a=1,
        collective="all_gather",
        lookalikes=_column_lookalikes,
        questions=_COLUMN_QUESTIONS,
    )
    return Verdict("One all-gather of b·out numbers. The weights stayed where they were.")


@exercise("2.3", "Y = X_0 A_0 + X_1 A_1 + ... on real ranks")
def row_split(row_product: Product) -> Verdict:
    check_product(
        "2.3",
        row_product,
        cut_x=lambda x, p: x.chunk(p, -1),
        dim_of_a=0,
        collective="all_reduce",
        lookalikes=_row_lookalikes,
        questions=_ROW_QUESTIONS,
    )
    return Verdict("One all-reduce of b·out numbers. The weights stayed where they were.")
