"""A padded vocabulary whose padding must not count: embedding, logits and losses, against torch on one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.reference import assert_close, random
from tests.tensor.on_ranks import GROUPS, assert_refused, own_group, refusals
from tplab import launch
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
    """The same loss in several ways, of which some keep the mark of the weight and the logits, and some lose it."""
    logits = partial(parallel_logits, x, weight, group=group)
    loss = partial(vocab_parallel_cross_entropy, target=target, group=group)
    return {
        "defaults": lambda: loss(logits()),
        "logits without a mark": lambda: loss(logits().double()[:]),
        "divided logits": lambda: loss(logits() / 1.0),
        "overlapped": lambda: loss(logits(async_grad_allreduce=True)),
        "overwritten": lambda: loss(logits(), overwrite_logits=True),
        "vocab_size": lambda: loss(logits(vocab_size=TOKENS), vocab_size=TOKENS),
        "a weight without a mark": lambda: loss(parallel_logits(x, weight * 1, vocab_size=TOKENS, group=group)),
        "fused": lambda: parallel_linear_cross_entropy(x, weight, target, tokens_at_once=3, group=group),
    }


def _defaults(multiples, in_group):
    group = own_group() if in_group else None
    table, x, target = of_a_tied_layer()
    found = []
    for multiple in multiples:
        embedding = VocabParallelEmbedding(TOKENS, WIDTH, multiple=multiple, group=group, dtype=torch.float64)
        load_full_state_dict(embedding, {"weight": table}, group)
        weight, outcomes = embedding.weight, {}
        for name, compute in ways(x.requires_grad_(), weight, target, group).items():
            x.grad = weight.grad = None
            loss = compute()
            loss.backward()
            outcomes[name] = loss.detach(), x.grad.clone(), weight.grad.clone()
        logits = parallel_logits(x, weight, group=group)
        smooth = vocab_parallel_cross_entropy(logits, target, label_smoothing=0.2, group=group)
        fused = parallel_linear_cross_entropy(x, weight, target, label_smoothing=0.2, group=group)
        with torch.no_grad():
            every = parallel_logits(x, weight, gather=True, group=group)
        in_half = parallel_logits(x.bfloat16(), weight.bfloat16(), vocab_size=TOKENS, group=group)
        half = vocab_parallel_cross_entropy(in_half, target, group=group)
        found.append((outcomes, (smooth.detach(), fused.detach()), every, half.detach()))
    return found


@pytest.mark.parametrize(("p", "in_group"), [(1, False), (2, False), (4, False), (4, True)])
def test_padding_does_not_count_by_default(p, in_group):
    table, x, target = of_a_tied_layer()
    leaves = table.requires_grad_(), x.requires_grad_()
    loss = F.cross_entropy(x @ table.T, target)
    loss.backward()
    dtable, dx = (leaf.grad for leaf in leaves)
    multiples, size = (1, 4, 128), 2 if in_group else p
    for rank, found in enumerate(launch(_defaults, p, args=(multiples, in_group))):
        place = GROUPS[rank % 2].index(rank) if in_group else rank
        for multiple, (outcomes, smooth, every, half) in zip(multiples, found, strict=True):
            rows = pad_vocab_size(TOKENS, size, multiple) // size
            mine = F.pad(dtable, (0, 0, 0, size * rows - TOKENS)).split(rows)[place]  # padding gets no gradient
            for got in outcomes.values():
                for value, expected in zip(got, (loss.detach(), dx, mine), strict=True):
                    assert_close(value, expected)
            for value in smooth:
                assert_close(value, F.cross_entropy(x @ table.T, target, label_smoothing=0.2).detach())
            assert_close(every, (x @ table.T).detach())
            assert abs(half - loss) < 0.1


def _targets_in_the_padding():
    table, x, _ = of_a_tied_layer()
    embedding = VocabParallelEmbedding(TOKENS, WIDTH, dtype=torch.float64)
    weight, outside = embedding.weight, torch.tensor([0, TOKENS, 1, 2])
    logits, other = parallel_logits(x, weight), dist.new_group([dist.get_rank()], use_local_synchronization=True)
    wrong_ids = [
        lambda: vocab_parallel_cross_entropy(logits, outside),
        lambda: parallel_linear_cross_entropy(x, weight, outside),
    ]
    nan = vocab_parallel_cross_entropy(logits, outside, check_target=False).detach()
    lost = vocab_parallel_cross_entropy(logits * 1, outside).detach()  # the copy has no mark
    target = outside.clamp(max=TOKENS - 1)
    contradictions = [
        lambda: vocab_parallel_cross_entropy(logits, target, vocab_size=TOKENS + 1),
        lambda: parallel_logits(x, weight, vocab_size=TOKENS - 1),
        lambda: parallel_linear_cross_entropy(x, weight, target, vocab_size=256),
        lambda: vocab_parallel_cross_entropy(logits, target, group=other),
        lambda: parallel_logits(x, weight, group=other),
        lambda: parallel_linear_cross_entropy(x, weight, target, group=other),
        lambda: parallel_logits(x, weight.bfloat16()),
        lambda: parallel_linear_cross_entropy(x, weight * 1, target),
    ]
    return refusals(*wrong_ids, kind=IndexError), (nan, lost), refusals(*contradictions)


def test_targets_in_the_padding_and_what_contradicts_the_mark_are_refused():
    for wrong_ids, (nan, lost), contradictions in launch(_targets_in_the_padding, 2):
        assert all("19" in message and "target" in message for message in wrong_ids), wrong_ids
        assert nan.isnan()
        assert lost == torch.inf
        assert_refused(
            [contradictions],
            "vocab_size=20, but logits [4, 128] is a shard of a vocabulary of 19: leave vocab_size out",
            "vocab_size=18, but weight [128, 8] is a shard of a vocabulary of 19",
            "vocab_size=256, but weight [128, 8]",
            "logits [4, 128] has its shards on ranks [0, 1], but the given group means ranks",
            "weight [128, 8] has its shards on ranks [0, 1]",
            "weight [128, 8] has its shards on ranks [0, 1]",
            "weight [128, 8] was computed from another tensor",
            "pass vocab_size",
        )
