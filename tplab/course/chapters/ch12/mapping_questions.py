"""What the check of exercise 12.1 asks, and what it calls the mistakes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tplab.course.checks import LATE_QUESTION, Lookalikes, Question, changed, has_kind

OWN = "this rank's own x"
COPIES = "p copies of this rank's tokens"
STACKED = "the ranks' parts one behind the other along dimension 0, which is the batch"
SHUFFLED = "the ranks' parts put together along the batch and then reshaped: tokens of different sequences are mixed"
OWN_PART = "this rank's own tokens of its own gradient: the other ranks' terms are missing"
MY_TERM = "this rank's tokens of its own x: the other ranks' terms are missing"
MEAN_PART = "this rank's tokens of the mean over the ranks"
WHOLE_SUM = "the whole sum, with the tokens of all ranks"
COPIES_BACK = "this rank's gradient copied into the place of every rank's tokens"
PADDED = "this rank's gradient in the place of its own tokens, zeros elsewhere"
ALONG_BATCH = "the sum cut along dimension 0, which is the batch"

STUCK_BY = {
    "returned an invalid gradient": "A gradient has the shape of what went into forward. Of [b, s/p, h] and [b, s, h], "
    "which went in here, and which does your backward return?",
    "contiguous": "A collective wants memory without gaps. A piece of dimension 1 is no contiguous piece of memory "
    "where b > 1, and gradients may have gaps too. Which tensor do you hand over as it is?",
    "modified by an inplace operation": "x came out of exp, and autograd keeps that output. Who wrote into it?",
    "incorrect number of gradients": "backward returns one gradient for each argument of forward behind ctx.",
}

_COMMON = (
    LATE_QUESTION,
    Question(
        changed,
        "A collective writes into the tensor that it is given as output. Was that one yours, or one that the caller or "
        "autograd still needs?",
    ),
    Question(
        has_kind("out", "none", "type"),
        "What does forward return? dist.all_gather and dist.reduce_scatter write into tensors they are given and "
        "return None.",
    ),
    Question(
        has_kind("dx", "none"),
        "backward returned nothing for x. What is its last line? (Collectives return None.)",
    ),
    Question(
        has_kind("out", STACKED, SHUFFLED, ALONG_BATCH),
        "The sequence is dimension 1 here. `all_gather_into_tensor` and `reduce_scatter_tensor` put parts together, "
        "and cut, along dimension 0: what do the numbers mean then?",
    ),
    Question(has_kind("out", "order"), "In which order do the parts go together? Rank 0 has the first s/p tokens."),
)
_TWICE_AS_MUCH = Question(
    lambda d: bool(d.names) and all("traffic" in name for name in d.names),
    "The numbers are right, the communication is not. An all-reduce gives every rank the whole sum, and sends twice "
    "what a reduce-scatter or an all-gather sends. Which of the two is enough here?",
)
GATHER_QUESTIONS = (
    *_COMMON,
    Question(has_kind("out", OWN), "These are this rank's tokens. Who has the others?"),
    Question(has_kind("out", COPIES), "Every part came from this rank. Which call brings the other ranks' tokens?"),
    _TWICE_AS_MUCH,
    Question(
        has_kind("dx", OWN_PART),
        "Behind the gather each rank computes something else with the same tokens, its own columns or heads. So each "
        "rank's gradient of a token is one term. Who adds up the terms of your tokens?",
    ),
    Question(has_kind("dx", MEAN_PART, "1/p"), "Are the terms of a gradient added up, or is their mean taken?"),
    Question(
        has_kind("dx", "other rank", "order"),
        "The sum is right, but the tokens are another rank's. Which ones did this rank put in?",
    ),
    Question(
        has_kind("dx", WHOLE_SUM, "shape"), "This rank put in s/p tokens. Which part of the sum is their gradient?"
    ),
    Question(has_kind("dx", "p times"), "How many times is each rank's term added?"),
    Question(
        lambda d: "dx" in d.names,
        "dx is [b, s/p, h]: for each token that this rank put in, the sum over all ranks of what they made of it. What "
        "does your backward compute?",
    ),
    Question(
        lambda d: "out" in d.names,
        "y is [b, s, h]: the tokens of rank 0, then those of rank 1, and so on, along dimension 1. What is yours?",
    ),
)
SCATTER_QUESTIONS = (
    *_COMMON,
    Question(has_kind("out", MY_TERM), "This is one term of the sum. Who adds the terms of the other ranks?"),
    Question(has_kind("out", MEAN_PART, "1/p"), "Are the terms added up, or is their mean taken?"),
    Question(
        has_kind("out", "other rank", "order"), "The sum is right, but the tokens are another rank's. Which are yours?"
    ),
    Question(has_kind("out", WHOLE_SUM), "This is the sum of all tokens. Which of them does this rank go on with?"),
    Question(has_kind("out", "p times"), "How many times is each rank's term added?"),
    _TWICE_AS_MUCH,
    Question(
        has_kind("dx", PADDED, "partly zero"),
        "Zeros for the tokens of the other ranks? This rank's x had a term in *their* sums too, so their gradients "
        "concern it. Where can it get them?",
    ),
    Question(
        has_kind("dx", COPIES_BACK),
        "Each token has a gradient of its own, and this rank has those of its own tokens. Who has the others?",
    ),
    Question(
        has_kind("dx", "p times", "1/p"),
        "y of a token is the plain sum of the ranks' terms, so each term has the gradient of the sum. Where does a p "
        "come from?",
    ),
    Question(
        lambda d: "dx" in d.names,
        "dx is [b, s, h]: every token's gradient, each from the rank that went on with that token. What does your "
        "backward compute?",
    ),
    Question(
        lambda d: "out" in d.names,
        "y is [b, s/p, h]: the sum over all ranks, of this rank's tokens alone. What is yours?",
    ),
)


def lookalikes(x: Sequence[Tensor], dy: Sequence[Tensor], cut_in: bool) -> Lookalikes:
    """What known mistakes give on every rank, for gather (x is cut) or reduce-scatter."""
    p = len(x)
    if cut_in:
        total, stacked = torch.stack(list(dy)).sum(0), torch.cat(list(x))
        return {
            "out": {
                OWN: x,
                COPIES: [torch.cat([part] * p, 1) for part in x],
                STACKED: [stacked] * p,
                SHUFFLED: [stacked.reshape(dy[0].shape)] * p,
            },
            "dx": {
                OWN_PART: [d.chunk(p, 1)[rank] for rank, d in enumerate(dy)],
                MEAN_PART: [d / p for d in total.chunk(p, 1)],
                WHOLE_SUM: [total] * p,
            },
        }
    total = torch.stack(list(x)).sum(0)
    flat = total.reshape(p, *dy[0].shape)
    zeros = [torch.zeros_like(d) for d in dy]
    return {
        "out": {
            MY_TERM: [t.chunk(p, 1)[rank] for rank, t in enumerate(x)],
            MEAN_PART: [t / p for t in total.chunk(p, 1)],
            WHOLE_SUM: [total] * p,
            ALONG_BATCH: [flat[rank] for rank in range(p)],
        },
        "dx": {
            COPIES_BACK: [torch.cat([d] * p, 1) for d in dy],
            PADDED: [torch.cat([d if i == rank else zeros[i] for i in range(p)], 1) for rank, d in enumerate(dy)],
        },
    }
