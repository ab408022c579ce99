"""Ids and targets of every integer dtype, against plain PyTorch with int64. Narrow dtypes must not wrap around."""

import itertools

import torch
from torch.nn import functional as F

from tests.reference import assert_close, random
from tests.tensor.on_ranks import refusals
from tplab import launch
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy
from tplab.tensor.embedding import VocabParallelEmbedding
from tplab.tensor.linear_cross_entropy import parallel_linear_cross_entropy

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
LATE = {"check_target": False}


def inputs(size):
    return random((5, 8), "x"), random((size, 8), "table")


def _all():
    rank, p = rank_and_size()
    # 256 ids are more than uint8 can count, and int8 can't hold the second rank's ids
    for dtype, size, options in itertools.product(DTYPES, [100, 256], ({}, LATE)):
        x, table = inputs(size)
        # ids of the vocabulary that the dtype can hold, with the largest one, and one that is ignored
        ids = torch.tensor([0, 3, 99, min(torch.iinfo(dtype).max, size - 1), 5])
        target, mine, check = ids.to(dtype), table.chunk(p)[rank], "later" if options else "now"
        embedding = VocabParallelEmbedding(size, 8, multiple=1, check_ids=check, dtype=torch.float64)
        embedding.weight.data.copy_(mine)
        loss = F.cross_entropy(x @ table.T, ids, ignore_index=5)
        assert_close(embedding(target).detach(), table[ids])
        assert_close(parallel_linear_cross_entropy(x, mine, target, ignore_index=5, **options), loss)
        assert_close(vocab_parallel_cross_entropy(x @ mine.T, target, ignore_index=5, **options), loss)


def test_every_integer_dtype_gives_what_int64_gives():
    _all()
    launch(_all, 2)


def test_an_id_outside_the_vocabulary_is_named_in_every_dtype_and_other_dtypes_are_refused():
    x, table = inputs(100)
    embedding = VocabParallelEmbedding(100, 8, multiple=1, check_ids="now")

    def messages(ids, kind):
        return refusals(
            lambda: embedding(ids),
            lambda: parallel_linear_cross_entropy(x, table, ids),
            lambda: vocab_parallel_cross_entropy(x @ table.T, ids),
            kind=kind,
        )

    for dtype in DTYPES:
        wrong = torch.tensor([0, 1, 2, 120, 3]).to(dtype)
        assert all("120 at [3] of [5]" in message for message in messages(wrong, IndexError))
        assert vocab_parallel_cross_entropy(x @ table.T, wrong, **LATE).isnan()
    for dtype in (torch.float32, torch.bool, torch.complex64):
        assert all(str(dtype) in message for message in messages(torch.ones(5).to(dtype), ValueError))
