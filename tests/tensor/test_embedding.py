"""VocabParallelEmbedding and parallel_logits, from `tplab.tensor.embedding`, against plain torch on one process."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gpu import real_gpu
from tests.reference import assert_close, random
from tests.tensor.on_ranks import on_ranks, results_of, traffic
from tests.tensor.on_ranks import train as train_sgd
from tplab import launch, record
from tplab.tensor.embedding import VocabParallelEmbedding, pad_vocab_size, parallel_logits
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.sharding import Block

VOCAB, HIDDEN = 21, 6  # 21: every p > 1 has to pad, and p = 4 with multiple=8 leaves the last rank nothing but padding
BATCH, SEQUENCE = 3, 14  # twice as many places as ids
FULL, FLOAT64 = (BATCH, SEQUENCE), torch.float64
STEPS = 3
LEARNING_RATE = 0.1
ONE = {"multiple": 1}
OPTIONS = [
    ONE,
    {"multiple": 8},
    {"multiple": 1, "padding_idx": 0},
    {"multiple": 1, "padding_idx": 11},  # the last row of rank 0 of 2, in the middle of a shard of 4
    {"multiple": 1, "padding_idx": -1},
    {"multiple": 1, "check_ids": "later"},
    {},
]
CASES = [(options, FULL, FLOAT64) for options in OPTIONS]
CASES += [(ONE, shape, FLOAT64) for shape in [(), (5,), (0,), (2, 0), (2, 3, 5)]]
CASES += [(ONE, FULL, torch.float32), (ONE, FULL, torch.bfloat16)]
TOLERANCES = {FLOAT64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-4}


def table() -> Tensor:
    return random((VOCAB, HIDDEN), "table")


def all_ids(step: int = 0) -> Tensor:
    """Every id twice, in an order of its own: so the first and the last row of each rank are among them."""
    order = random((2 * VOCAB,), "order", step).argsort()
    return (order % VOCAB).view(BATCH, SEQUENCE)


def padded(whole: Tensor, p: int, multiple: int) -> Tensor:
    """Zeros below, until each of p ranks has as many rows, a multiple of `multiple`; by counting."""
    rows = len(whole)
    while rows % (p * multiple):
        rows += 1
    return F.pad(whole, (0, 0, 0, rows - len(whole)))


def rows_of(whole: Tensor, rank: int, p: int, multiple: int = 1) -> Tensor:
    return padded(whole, p, multiple).chunk(p)[rank]


# Looking up


def train(module: nn.Module, shape: tuple[int, ...] = FULL, dtype: torch.dtype = FLOAT64):
    """The first step's output, gradient and traffic, and the weight after several steps of SGD."""
    batches = []
    for step in range(STEPS):
        ids = all_ids(step).view(-1)[: torch.Size(shape).numel()].view(shape)
        batches.append(({"ids": ids}, random((*shape, HIDDEN), "dy", step).to(dtype)))
    return train_sgd(module, batches, lr=LEARNING_RATE)


def plain(options: dict, dtype: torch.dtype = FLOAT64) -> nn.Embedding:
    return nn.Embedding(VOCAB, HIDDEN, options.get("padding_idx"), _weight=table().to(dtype))


def parallel(options: dict, group=None, dtype: torch.dtype = FLOAT64) -> VocabParallelEmbedding:
    module = VocabParallelEmbedding(VOCAB, HIDDEN, **options, group=group, dtype=dtype)
    load_full_state_dict(module, {"weight": table().to(dtype)}, group)
    return module


def assert_equals_plain(results, options, shape=FULL, dtype=FLOAT64):
    """`results`: what `train` gave on the ranks of one group."""
    expected, _ = train(plain(options, dtype), shape, dtype)
    for rank, result in enumerate(results):
        assert torch.equal(result["out"], expected["out"])  # a sum with zeros rounds nothing
        for name in ("dweight", "weight"):
            mine = rows_of(expected[name], rank, len(results), options.get("multiple", 128))
            assert_close(result[name], mine, TOLERANCES[dtype])


def odd_inputs(ids):
    return [ids.T, ids[:, ::3], ids[:1].expand(4, -1), ids.int()]


def _look_up(group):
    """All cases; ids of odd layouts; a table with NaN in a row that nobody wants; one that is frozen; a deep copy."""
    outcomes = [train(parallel(options, group, dtype), shape, dtype) for options, shape, dtype in CASES]
    odd = [parallel(ONE, group)(ids).detach() for ids in odd_inputs(all_ids())]
    spoiled, frozen = parallel(ONE, group), parallel(ONE, group).requires_grad_(False)
    with torch.no_grad():
        spoiled.weight[0] = torch.nan  # what a mask by multiplication would let through
    assert not frozen(all_ids()).requires_grad
    twin = train(copy.deepcopy(parallel(ONE, group)))[0]
    assert all(torch.equal(twin[name], outcomes[0][0][name]) for name in twin)
    return outcomes, odd, spoiled(torch.tensor([1, 13])).detach()


@on_ranks
def test_vectors_gradients_and_steps_equal_nn_embedding_for_all_options(p, in_groups):
    for results in results_of(_look_up, p, in_groups):
        for number, (options, shape, dtype) in enumerate(CASES):
            outcomes, sent = zip(*(outcomes[number] for outcomes, _, _ in results), strict=True)
            assert_equals_plain(outcomes, options, shape, dtype)
            one = [("all_reduce", "sum", torch.Size(shape).numel() * HIDDEN * dtype.itemsize)]
            assert all(calls == [one if len(results) > 1 else [], []] for calls in sent)  # g, and nothing backward
        for _, odd, spoiled in results:
            assert all(torch.equal(out, table()[ids]) for out, ids in zip(odd, odd_inputs(all_ids()), strict=True))
            assert torch.equal(spoiled, table()[[1, 13]])


# The output layer


LOGITS = [{}, {"async_grad_allreduce": True}, {"gather": True, "vocab_size": VOCAB}, {"gather": True}]


def _logits(group):
    """What parallel_logits gives for each case: out, gradients of x, of the shard and of the bias, and the traffic."""
    rank, p = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    outcomes = []
    for options in LOGITS:
        x = random((2, 5, HIDDEN), "x").requires_grad_()
        weight = rows_of(table(), rank, p).clone().requires_grad_()
        bias = rows_of(random((VOCAB, 1), "bias"), rank, p)[:, 0].clone().requires_grad_()
        with record() as forward:
            out = parallel_logits(x, weight, bias, group=group, **options)
        assert ("Async" in out.grad_fn.name()) == (p > 1 and "async_grad_allreduce" in options)
        dy = F.pad(random((2, 5, VOCAB), "dlogits"), (0, p * len(weight) - VOCAB))
        dy = dy[..., : out.shape[-1]] if options.get("gather") else dy.chunk(p, -1)[rank]
        with record() as backward:
            out.backward(dy)
        outcomes.append((out.detach(), x.grad, weight.grad, bias.grad, traffic(forward, backward)))
    return outcomes


@on_ranks
def test_logits_and_gradients_equal_a_matmul_with_the_whole_table(p, in_groups):
    x, weight, bias = random((2, 5, HIDDEN), "x"), table(), random((VOCAB, 1), "bias")[:, 0]
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    expected = x @ weight.T + bias
    expected.backward(random((2, 5, VOCAB), "dlogits"))
    dx, dw, db = (leaf.grad for leaf in leaves)
    for results in results_of(_logits, p, in_groups):
        size = len(results)
        padding = len(padded(table(), size, 1)) - VOCAB
        every = F.pad(expected.detach(), (0, padding))
        for rank, outcomes in enumerate(results):
            wanted = [every.chunk(size, -1)[rank]] * 2 + [expected.detach(), every]
            for (out, got_dx, got_dw, got_db, sent), want, options in zip(outcomes, wanted, LOGITS, strict=True):
                assert_close(out, want)
                assert_close(got_dx, dx)
                assert_close(got_dw, rows_of(dw, rank, size))
                assert_close(got_db, rows_of(db[:, None], rank, size)[:, 0])
                gathered = [("all_gather", None, 80 * (VOCAB + padding))] if options.get("gather") else []
                assert sent == ([gathered, [("all_reduce", "sum", 80 * HIDDEN)]] if size > 1 else [[], []])


# Ids that are not in the vocabulary

WRONG = [-1, -VOCAB, VOCAB, VOCAB + 2, VOCAB + 3, 10**9]  # VOCAB to VOCAB + 2 are padding rows at p = 4


def _wrong_ids():
    return {check_ids: wrong_ids(check_ids) for check_ids in (None, "later")}


def wrong_ids(check_ids):
    seen = []
    for wrong in WRONG:
        module = parallel({"multiple": 1, "check_ids": check_ids})
        ids = all_ids()
        ids[1, 4] = ids[2, 0] = wrong
        for call in (ids, all_ids()):
            with record() as sent:
                try:
                    outcome = module(call).detach()
                except IndexError as error:
                    outcome = str(error), getattr(error, "__notes__", [])
            seen.append((outcome, len(sent)))
    return seen


@pytest.mark.parametrize("p", [1, 2, 4])
def test_an_id_outside_the_vocabulary_raises_at_once_or_gives_nan_and_raises_in_the_next_call(p):
    right = torch.ones(BATCH, SEQUENCE, dtype=torch.bool)
    right[1, 4] = right[2, 0] = False
    for found in launch(_wrong_ids, p):
        messages, outcomes = found[None], found["later"]
        place = "at [1, 4] of [3, 14] is outside the vocabulary: its 21 ids are 0 to 20"
        assert [refused for refused, _ in messages[::2]] == [(f"id {wrong} {place}", []) for wrong in WRONG]
        assert all(sent == 0 for _, sent in messages[::2])
        assert all(torch.equal(out, table()[all_ids()]) for out, _ in messages[1::2])
        for wrong, (out, sent), ((message, notes), sent_next) in zip(WRONG, outcomes[::2], outcomes[1::2], strict=True):
            assert out[~right].isnan().all()
            assert torch.equal(out[right], table()[all_ids()[right]])
            assert (sent, sent_next) == (p > 1, 0)
            assert message.startswith(f"id {wrong} at [1, 4] of [3, 14] is outside the vocabulary")
            assert "the call before this one" in notes[0]


def test_a_late_report_is_given_once_and_on_request():
    module = parallel({"multiple": 1, "check_ids": "later"})
    module(torch.tensor([3, VOCAB]))
    twins = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for twin in twins:
        twin.check_ids.raise_late()  # a copy has had no call yet
    with pytest.raises(IndexError, match=r"id 21 at \[1\] of \[2\]"):
        module.check_ids.raise_late()
    module.check_ids.raise_late()
    assert module(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, HIDDEN)
    module.check_ids.raise_late()


@pytest.mark.gpu
@real_gpu
@pytest.mark.parametrize("later", [True, False])
def test_on_a_gpu_ids_are_checked_without_waiting_unless_asked_to(later):
    module = VocabParallelEmbedding(VOCAB, HIDDEN, device="cuda", check_ids=None if later else "now")
    ids = all_ids().cuda()
    spoiled = ids.clone()
    spoiled[1, 4] = VOCAB
    module(ids)  # what is set up in the first call may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        if later:
            out = module(spoiled)
            out.sum().backward()
        else:
            with pytest.raises(RuntimeError, match="synchroniz"):
                module(spoiled)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if later:
        assert out[1, 4].isnan().all()
        assert int(out.isnan().sum()) == HIDDEN
    with pytest.raises(IndexError, match=r"id 21 at \[1, 4\] of \[3, 14\]"):
        module(ids if later else spoiled)
    assert not module(ids).isnan().any()  # the GPU goes on


# Making one


def test_padded_sizes_are_the_published_ones():
    assert [pad_vocab_size(50257, p) for p in (1, 2, 8)] == [50304, 50432, 51200]  # Shoeybi et al. 2019, 5.1, for 8
    assert pad_vocab_size(32000, 2) == 32000
    assert [pad_vocab_size(21, 4, multiple) for multiple in (1, 2, 8)] == [24, 24, 32]


def _fives(weight):
    nn.init.constant_(weight, 5.0)


METHODS = [
    {"init_method": _fives, "per_rank_init": per_rank_init, "padding_idx": 2, "multiple": 8}
    for per_rank_init in (False, True)
]


def _initial():
    outcomes = []
    for options in [*OPTIONS, *METHODS, {"per_rank_init": True, "multiple": 1}]:
        torch.manual_seed(11)
        module = VocabParallelEmbedding(VOCAB, HIDDEN, **options)
        sharding = module.weight.tensor_parallel
        assert (sharding.dim, sharding.blocks) == (0, (Block(VOCAB, options.get("multiple", 128), padded=True),))
        outcomes.append((module.weight.detach(), full_state_dict(module), torch.rand(1)))
    return outcomes


@pytest.mark.parametrize("p", [1, 2, 4])
def test_the_first_values_are_those_of_nn_embedding_with_the_same_seed_for_every_p(p):
    wanted = []
    for options in OPTIONS:
        torch.manual_seed(11)
        wanted.append((nn.Embedding(VOCAB, HIDDEN, options.get("padding_idx")).weight, torch.rand(1)))
    filled = torch.full((VOCAB, HIDDEN), 5.0)
    filled[2] = 0
    wanted += [(filled, None)] * 2
    results = launch(_initial, p)
    for rank, (*outcomes, (_, _, then)) in enumerate(results):
        for options, (weight, state, after), (whole, next_number) in zip(
            OPTIONS + METHODS, outcomes, wanted, strict=True
        ):
            assert list(state) == ["weight"]
            assert torch.equal(state["weight"], whole)
            assert torch.equal(weight, rows_of(whole, rank, p, options.get("multiple", 128)))
            assert next_number is None or torch.equal(after, next_number)
        assert torch.equal(then, results[0][-1][2])
    drawn_per_rank = torch.cat([outcomes[-1][0] for outcomes in results])[:VOCAB]
    assert len(set(drawn_per_rank.flatten().tolist())) == VOCAB * HIDDEN


def test_on_meta_shapes_work_without_memory_and_a_module_says_what_it_holds():
    assert "21, 6, padding_idx=0, rank 0 of 1 holds rows 0 to 20" in repr(parallel(OPTIONS[2]))
    module = VocabParallelEmbedding(VOCAB, HIDDEN, device="meta")
    assert module(all_ids().to("meta")).shape == (BATCH, SEQUENCE, HIDDEN)
    later = VocabParallelEmbedding(VOCAB, HIDDEN, device="meta", check_ids="later")
    assert later(all_ids().to("meta")).shape == later(all_ids().to("meta")).shape == (BATCH, SEQUENCE, HIDDEN)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: VocabParallelEmbedding(21, 6, 21), "padding_idx=21 isn't one of the 21 ids"),
        (lambda: VocabParallelEmbedding(21, 6, -22), "padding_idx=-22 isn't one of the 21 ids"),
        (lambda: VocabParallelEmbedding(21, 6, check_ids="never"), "not 'never'"),
        (lambda: VocabParallelEmbedding(21, 6, multiple=0), "whole units of 0"),
        (lambda: parallel_logits(torch.ones(2, 5), table()), r"x \[2, 5\] should be \[.., 6\], for a table \[21, 6\]"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(call, message):
    with pytest.raises(ValueError, match=message):
        call()
