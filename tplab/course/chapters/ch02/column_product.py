"""The check of exercise 2.2, the column split: each rank computes columns of Y, an all-gather joins them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tplab.course.chapters.ch02.products import (
    MORE,
    OWN,
    ROOT_ONLY,
    ROUNDED,
    STACKED,
    TWICE,
    WEIGHTS_MOVED,
    ZEROS,
    Product,
    check_product,
    sent,
)
from tplab.course.checks import LATE_QUESTION, Lookalikes, Question, Verdict, exercise, kind_is

_RESHAPED = "the products of all ranks along dimension 0, reshaped to the shape of Y"
_SUM = "the sum of the products of all ranks"
_COPIES = "p copies of this rank's product side by side"

_COLUMN_QUESTIONS = (
    LATE_QUESTION,
    ROUNDED,
    Question(
        lambda d: "order" in d.kinds(),
        "The right columns, in another order. all_gather fills its list in rank order, the same on every rank: what "
        "did you do with it?",
    ),
    ROOT_ONLY,
    ZEROS,
    Question(kind_is("out", OWN), "These are this rank's columns of Y. Who has the others, and how do they get here?"),
    Question(
        kind_is("out", STACKED, _RESHAPED),
        "The parts of Y are columns. Along which dimension were they put together? (all_gather_into_tensor always uses "
        "dimension 0, and a reshape doesn't move numbers between rows as you need it.)",
    ),
    Question(kind_is("out", _SUM), "The parts are different columns of Y, not terms of a sum. Should they be added?"),
    Question(
        lambda d: d.names == {"out"} and any(_COPIES in row.text for row in d),
        "One part stands in all p places. Are the p tensors of your list p different ones? ([tensor] * p is p times "
        "the same.)",
    ),
    Question(kind_is("out", _COPIES), "Every part came from this rank. Which call brings the other ranks' parts here?"),
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
    WEIGHTS_MOVED,
    TWICE,
    MORE,
)


def _column_lookalikes(products: Sequence[Tensor], y: Tensor) -> Lookalikes:
    p, stacked = len(products), torch.cat(list(products))
    if p == 1:
        return {}
    return {
        "out": {
            OWN: products,
            STACKED: [stacked] * p,
            _RESHAPED: [stacked.reshape(y.shape)] * p,
            _SUM: [torch.stack(list(products)).sum(0)] * p,
            _COPIES: [torch.cat([part] * p, -1) for part in products],
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
