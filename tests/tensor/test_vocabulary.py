"""Embedding, logits and losses together: a vocabulary whose padding must not count, and ids of every integer dtype."""

import itertools
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.reference import assert_close, random
from tests.tensor.on_ranks import assert_refuses, everywhere, refusals
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy
from tplab.tensor.embedding import VocabParallelEmbedding, pad_vocab_size, parallel_logits
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.linear_cross_entropy import parallel_linear_cross_entropy

TOKENS, WIDTH = 19, 8


def of_a_tied_layer(dtype=torch.float64):
    """A table [19, 8], inputs [4, 8] that lead to negative logits, so that padding would dominate, and targets [4]."""
    table = -random((TOKENS, WIDTH), "table", dtype=dtype).abs() - 1
    x = random((4, WIDTH), "x", dtype=dtype).abs() + 1
    return table, x, torch.tensor([0, 18, -100, 7])


def ways(x, weight, target, group):
    """The same loss in several ways, of which some keep the mark of the weight, and some lose it."""
    logits = partial(parallel_logits, x, weight, group=group)
    loss = partial(vocab_parallel_cross_entropy, target=target, group=group)
    return [
        lambda: loss(logits()),
        lambda: loss(logits(async_grad_allreduce=True)),
        lambda: loss(logits(vocab_size=TOKENS), vocab_size=TOKENS),
        lambda: loss(parallel_logits(x, weight * 1, vocab_size=TOKENS, group=group)),
        lambda: parallel_linear_cross_entropy(x, weight, target, tokens_at_once=3, group=group),
    ]


def _padding_does_not_count_by_default(group):
    rank, p = rank_and_size(group)
    table, x, target = of_a_tied_layer()
    scores = x.requires_grad_() @ table.requires_grad_().T
    loss = F.cross_entropy(scores, target)
    dtable, dx = torch.autograd.grad(loss, (table, x))
    for multiple in (1, 4, 128):
        embedding = VocabParallelEmbedding(TOKENS, WIDTH, multiple=multiple, group=group, dtype=torch.float64)
        load_full_state_dict(embedding, {"weight": table}, group)
        weight, rows = embedding.weight, pad_vocab_size(TOKENS, p, multiple) // p
        mine = F.pad(dtable, (0, 0, 0, p * rows - TOKENS)).split(rows)[rank]  # padding gets no gradient
        for compute in ways(x, weight, target, group):
            found = compute()
            gradients = torch.autograd.grad(found, (x, weight))
            for value, expected in zip((found, *gradients), (loss, dx, mine), strict=True):
                assert_close(value.detach(), expected.detach())
        with torch.no_grad():
            assert_close(parallel_logits(x, weight, gather=True, group=group), scores.detach())
        in_half = parallel_logits(x.bfloat16(), weight.bfloat16(), vocab_size=TOKENS, group=group)
        assert abs(vocab_parallel_cross_entropy(in_half, target, group=group) - loss) < 0.1


# Ids of every integer dtype

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


def inputs(size):
    return random((5, 8), "x"), random((size, 8), "table")


def _every_integer_dtype(group):
    """It gives what int64 gives. Narrow dtypes must not wrap around."""
    rank, p = rank_and_size(group)
    # 256 ids are more than uint8 can count, and int8 can't hold the second rank's ids
    for dtype, size in itertools.product(DTYPES, [100, 256]):
        x, table = inputs(size)
        # ids of the vocabulary that the dtype can hold, with the largest one, and one that is ignored
        ids = torch.tensor([0, 3, 99, min(torch.iinfo(dtype).max, size - 1), 5])
        target, mine = ids.to(dtype), table.chunk(p)[rank]
        embedding = VocabParallelEmbedding(size, 8, multiple=1, group=group, dtype=torch.float64)
        embedding.weight.data.copy_(mine)
        loss = F.cross_entropy(x @ table.T, ids, ignore_index=5)
        assert_close(embedding(target).detach(), table[ids])
        fused = parallel_linear_cross_entropy(x, mine, target, group=group)
        assert_close(fused, F.cross_entropy(x @ table.T, ids))
        assert_close(vocab_parallel_cross_entropy(x @ mine.T, target, ignore_index=5, group=group), loss)


def test_other_dtypes_are_refused():
    x, table = inputs(100)
    embedding = VocabParallelEmbedding(100, 8, multiple=1)
    for ids in (torch.ones(5), torch.ones(5, dtype=torch.bool)):
        assert_refuses(
            (lambda ids=ids: embedding(ids), str(ids.dtype)),
            (lambda ids=ids: parallel_linear_cross_entropy(x, table, ids), str(ids.dtype)),
            (lambda ids=ids: vocab_parallel_cross_entropy(x @ table.T, ids), str(ids.dtype)),
        )


def _refuse_targets_in_the_padding_and_what_contradicts_the_mark():
    table, x, _ = of_a_tied_layer()
    embedding = VocabParallelEmbedding(TOKENS, WIDTH, dtype=torch.float64)
    weight, outside = embedding.weight, torch.tensor([0, TOKENS, 1, 2])
    logits, other = parallel_logits(x, weight), dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for message in refusals(
        lambda: vocab_parallel_cross_entropy(logits, outside, vocab_size=TOKENS),
        lambda: parallel_linear_cross_entropy(x, weight, outside),
        kind=IndexError,
    ):
        assert "target 19" in message
    assert vocab_parallel_cross_entropy(logits, outside) == torch.inf
    target, loss = outside.clamp(max=TOKENS - 1), parallel_linear_cross_entropy
    assert_refuses(
        (lambda: parallel_logits(x, weight, vocab_size=18), "vocab_size=18", "weight [128, 8]", "19"),
        (lambda: loss(x, weight, target, group=other), "weight [128, 8]", "ranks [0, 1, 2, 3]"),
        (lambda: parallel_logits(x, weight.bfloat16()), "weight [128, 8]", "vocab_size"),
        (lambda: loss(x, weight * 1, target), "weight [128, 8]", "vocab_size"),
    )


def _everything(group):
    _padding_does_not_count_by_default(group)
    _every_integer_dtype(group)
    if group is None and rank_and_size()[1] == 4:
        _refuse_targets_in_the_padding_and_what_contradicts_the_mark()


def test_padding_does_not_count_by_default_and_every_integer_dtype_gives_what_int64_gives():
    everywhere(_everything)
