"""The check of exercise 2.3, the row split: each rank computes one term of Y, and an all-reduce adds them up."""

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

_BESIDE = "the products of all ranks, side by side"
_P_TIMES_OWN = "p times this rank's own product"
_LARGEST = "the largest of the ranks' products, entry by entry"

_ROW_QUESTIONS = (
    LATE_QUESTION,
    ROUNDED,
    ROOT_ONLY,
    ZEROS,
    Question(
        kind_is("out", OWN),
        "Each rank has its own terms of the sum. Who adds up the terms of all ranks? (If you did call all_reduce: "
        "which tensor did it write to, and which one do you return?)",
    ),
    Question(kind_is("out", "1/p"), "Y is the sum of the products. Is it their mean?"),
    Question(kind_is("out", _LARGEST), "Which operation over the ranks makes Y out of the terms: their maximum?"),
    Question(kind_is("out", "p times"), "How many times is each term added?"),
    Question(
        kind_is("out", _P_TIMES_OWN),
        "These are p times this rank's own terms. Where do the other ranks' terms come in?",
    ),
    Question(
        kind_is("out", _BESIDE, STACKED),
        "Each product has the full shape of Y already. Do the products stand side by side, or add up?",
    ),
    Question(
        lambda d: any(d.kind(name) == "changed" for name in d.names) and "out" in d.names,
        "Y is a sum of products. Is it the product of a sum? What did all_reduce write into?",
    ),
    WEIGHTS_MOVED,
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
    TWICE,
    MORE,
)


def _row_lookalikes(products: Sequence[Tensor], y: Tensor) -> Lookalikes:
    p = len(products)
    if p == 1:
        return {}
    return {
        "out": {
            OWN: products,
            _P_TIMES_OWN: [p * part for part in products],
            _LARGEST: [torch.stack(list(products)).amax(0)] * p,
            _BESIDE: [torch.cat(list(products), -1)] * p,
            STACKED: [torch.cat(list(products))] * p,
        }
    }


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
