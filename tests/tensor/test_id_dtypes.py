"""Ids and targets of every integer dtype, against plain PyTorch with int64. Narrow dtypes must not wrap around."""

import itertools

import pytest
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
SIZES = [100, 256]  # 256 ids are more than uint8 can count, and int8 can't hold the second rank's ids
LATE = {"check_target": False}


def ids_of(dtype, size):
    """Ids of the vocabulary that the dtype can hold, with the largest one, and one that is ignored."""
    return torch.tensor([0, 3, 99, min(torch.iinfo(dtype).max, size - 1), 5]).to(dtype)


def inputs(size):
    return random((5, 8), "x"), random((size, 8), "table")


def _all():
    rank, p = rank_and_size()
    found = []
    for dtype, size, options in itertools.product(DTYPES, SIZES, ({}, LATE)):
        x, table = inputs(size)
        target, mine = ids_of(dtype, size), table.chunk(p)[rank]
        embedding = VocabParallelEmbedding(
            size, 8, multiple=1, check_ids="later" if options else "now", dtype=torch.float64
        )
        embedding.weight.data.copy_(mine)
        fused = parallel_linear_cross_entropy(x, mine, target, ignore_index=5, **options)
        unfused = vocab_parallel_cross_entropy(x @ mine.T, target, ignore_index=5, **options)
        found.append((embedding(target).detach(), fused, unfused))
    return found


@pytest.mark.parametrize("p", [1, 2])
def test_every_integer_dtype_gives_what_int64_gives(p):
    for result in launch(_all, p):
        for (dtype, size, _), got in zip(itertools.product(DTYPES, SIZES, ({}, LATE)), result, strict=True):
            (x, table), ids = inputs(size), ids_of(dtype, size).long()
            loss = F.cross_entropy(x @ table.T, ids, ignore_index=5)
            for value, expected in zip(got, (table[ids], loss, loss), strict=True):
                assert_close(value, expected)


def test_an_id_outside_the_vocabulary_is_named_in_every_dtype_and_other_dtypes_are_refused():
    x, table = inputs(100)
    embedding = VocabParallelEmbedding(100, 8, multiple=1, check_ids="now")
    for dtype in DTYPES:
        wrong = torch.tensor([0, 1, 2, 120, 3]).to(dtype)
        for message in refusals(
            lambda wrong=wrong: embedding(wrong),
            lambda wrong=wrong: parallel_linear_cross_entropy(x, table, wrong),
            lambda wrong=wrong: vocab_parallel_cross_entropy(x @ table.T, wrong),
            kind=IndexError,
        ):
            assert "120 at [3] of [5]" in message
        assert vocab_parallel_cross_entropy(x @ table.T, wrong, **LATE).isnan()
    for dtype in (torch.float32, torch.bool, torch.complex64):
        ids = torch.ones(5).to(dtype)
        for message in refusals(
            lambda ids=ids: embedding(ids),
            lambda ids=ids: parallel_linear_cross_entropy(x, table, ids),
            lambda ids=ids: vocab_parallel_cross_entropy(x @ table.T, ids),
        ):
            assert str(dtype) in message
