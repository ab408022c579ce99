"""VocabParallelEmbedding and parallel_logits, from `tplab.tensor.embedding`, against plain torch on one process."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import saying
from tests.gpu import real_gpu
from tests.reference import assert_close, random
from tests.tensor.on_ranks import assert_refuses, assert_trains_like, everywhere, traffic
from tplab import record
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.embedding import VocabParallelEmbedding, pad_vocab_size, parallel_logits
from tplab.tensor.full_state import full_state_dict, load_full_state_dict

VOCAB, HIDDEN = 21, 6  # 21: every p > 1 has to pad, and p = 4 with multiple=8 leaves the last rank nothing but padding
BATCH, SEQUENCE = 3, 14  # twice as many places as ids
FULL = (BATCH, SEQUENCE)
ONE = {"multiple": 1}
OPTIONS = [
    ONE,
    {"multiple": 8},
    {},
]
CASES = [(options, FULL) for options in OPTIONS] + [(ONE, shape) for shape in [(), (0,), (2, 3, 5)]]


def table() -> Tensor:
    return random((VOCAB, HIDDEN), "table")


def all_ids(step: int = 0) -> Tensor:
    """Every id twice, in an order of its own: so the first and the last row of each rank are among them."""
    order = random((2 * VOCAB,), "order", step).argsort()
    return (order % VOCAB).view(BATCH, SEQUENCE)


def rows_of(whole: Tensor, rank: int, p: int, multiple: int = 1) -> Tensor:
    """A rank's rows. Zeros are below, until each of p ranks has as many rows, a multiple of `multiple`; by counting."""
    rows = len(whole)
    while rows % (p * multiple):
        rows += 1
    return F.pad(whole, (0, 0, 0, rows - len(whole))).chunk(p)[rank]


def parallel(options: dict, group=None) -> VocabParallelEmbedding:
    module = VocabParallelEmbedding(VOCAB, HIDDEN, **options, group=group, dtype=torch.float64)
    load_full_state_dict(module, {"weight": table()}, group)
    rank, p = rank_and_size(group)
    assert torch.equal(module.weight, rows_of(table(), rank, p, options.get("multiple", 128)))
    return module


# Looking up


def _look_up(group):
    """All cases, and a table with NaN in a row that nobody wants."""
    for options, shape in CASES:
        twin = nn.Embedding(VOCAB, HIDDEN, _weight=table())
        batches = []
        for step in (0, 1):
            ids = all_ids(step).view(-1)[: torch.Size(shape).numel()].view(shape)
            batches.append(({"ids": ids}, random((*shape, HIDDEN), "dy", step)))
        sent = assert_trains_like(twin, parallel(options, group), batches, group, lr=0.1)
        one = [("all_reduce", "sum", torch.Size(shape).numel() * HIDDEN * 8)]
        assert sent == [one if rank_and_size(group)[1] > 1 else [], []]  # g, and nothing backward
    spoiled = parallel(ONE, group)
    with torch.no_grad():
        spoiled.weight[0] = torch.nan  # what a mask by multiplication would let through
    assert torch.equal(spoiled(torch.tensor([1, 13])), table()[[1, 13]])


# The output layer


def _logits(group):
    rank, p = rank_and_size(group)
    whole = random((2, 5, HIDDEN), "x"), table(), random((VOCAB, 1), "bias")[:, 0]
    x, weight, bias = (tensor.requires_grad_() for tensor in whole)
    expected, upstream = x @ weight.T + bias, random((2, 5, VOCAB), "dlogits")
    dx, dw, db = torch.autograd.grad(expected, (x, weight, bias), upstream)
    padding = p * len(rows_of(table(), rank, p)) - VOCAB
    expected = expected.detach()
    every, every_upstream = F.pad(expected, (0, padding)), F.pad(upstream, (0, padding))
    for options, want, dy in [
        ({}, every.chunk(p, -1)[rank], every_upstream.chunk(p, -1)[rank]),
        ({"async_grad_allreduce": True}, every.chunk(p, -1)[rank], every_upstream.chunk(p, -1)[rank]),
        ({"gather": True, "vocab_size": VOCAB}, expected, upstream),
        ({"gather": True}, every, every_upstream),
    ]:
        mine = [x, rows_of(weight, rank, p), rows_of(bias[:, None], rank, p)[:, 0]]
        leaves = [tensor.detach().clone().requires_grad_() for tensor in mine]
        with record() as forward:
            out = parallel_logits(*leaves, group=group, **options)
        assert ("Async" in out.grad_fn.name()) == (p > 1 and "async_grad_allreduce" in options)
        with record() as backward:
            out.backward(dy)
        assert_close(out, want)
        wanted = dx, rows_of(dw, rank, p), rows_of(db[:, None], rank, p)[:, 0]
        for leaf, gradient in zip(leaves, wanted, strict=True):
            assert_close(leaf.grad, gradient)
        gathered = [("all_gather", None, 80 * (VOCAB + padding))] if options.get("gather") else []
        sent = [gathered, [("all_reduce", "sum", 80 * HIDDEN)]] if p > 1 else [[], []]
        assert traffic(forward, backward) == sent


# Ids that are not in the vocabulary

WRONG = [-1, VOCAB, VOCAB + 3, 10**9]  # VOCAB is a padding row at p = 4


def _wrong_ids(group):
    """They raise on all ranks, before anything is sent."""
    right = torch.ones(FULL, dtype=torch.bool)
    right[1, 4] = right[2, 0] = False
    for wrong in WRONG:
        ids, says = all_ids().masked_fill(~right, wrong), (f"id {wrong} ", "[1, 4]", "[3, 14]", "21 ids", " 0 ", " 20")
        module = parallel(ONE, group)
        with pytest.raises(IndexError, match=saying(*says)), record() as sent:
            module(ids)
        assert not sent
        assert torch.equal(module(all_ids()), table()[all_ids()])


def test_a_compiled_graph_and_a_gpu_check_ids_too():
    module = parallel(ONE)
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        assert torch.equal(module(all_ids()), table()[all_ids()])
        for wrong in WRONG:
            with pytest.raises(RuntimeError, match=saying("id ", "21 ids", " 0 ", " 20")):
                module(torch.tensor([3, wrong]))


@pytest.mark.gpu
@real_gpu
def test_on_a_gpu_ids_are_checked_without_waiting():
    module, ids = VocabParallelEmbedding(VOCAB, HIDDEN, device="cuda"), all_ids().cuda()
    module(ids)  # what is set up in the first call may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(ids).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Making one


def test_padded_sizes_are_the_published_ones():
    assert [pad_vocab_size(50257, p) for p in (1, 2, 8)] == [50304, 50432, 51200]  # Shoeybi et al. 2019, 5.1, for 8
    assert pad_vocab_size(32000, 2) == 32000
    assert [pad_vocab_size(21, 4, multiple) for multiple in (1, 2, 8)] == [24, 24, 32]


def _initial():
    """The first values are those of nn.Embedding with the same seed for every p."""
    for options in OPTIONS:
        torch.manual_seed(11)
        whole, after = nn.Embedding(VOCAB, HIDDEN).weight, torch.rand(1)
        torch.manual_seed(11)
        assert torch.equal(full_state_dict(VocabParallelEmbedding(VOCAB, HIDDEN, **options))["weight"], whole)
        assert torch.equal(torch.rand(1), after)


def _everything(group):
    for program in (_look_up, _logits, _wrong_ids):
        program(group)
    if group is None:
        _initial()


def test_vectors_logits_gradients_steps_and_first_values_are_torchs_and_wrong_ids_raise():
    """tests/gpu/test_on_the_cpu.py has other dtypes."""
    everywhere(_everything)


def test_what_does_not_fit_is_refused_with_the_numbers():
    assert_refuses(
        (lambda: parallel_logits(torch.ones(2, 5), table()), "x [2, 5]", "[.., 6]", "[21, 6]"),
    )
