"""VocabParallelEmbedding and parallel_logits: `tensor.embedding`, against nn.Embedding and F.linear on one process."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn import functional as F

from tests.gpu import real_gpu
from tests.reference import assert_close, random
from tests.tensor.on_ranks import GROUPS, own_group, refusals, traffic
from tests.tensor.on_ranks import train as train_sgd
from tplab import launch, record
from tplab.tensor.embedding import VocabParallelEmbedding, pad_vocab_size, parallel_logits
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.sharding import Block

WORLD_SIZES = (1, 2, 4)
VOCAB, HIDDEN = 21, 6  # 21: every p > 1 has to pad, and p = 4 with multiple=8 leaves the last rank nothing but padding
BATCH, SEQUENCE = 3, 14  # twice as many places as ids
STEPS = 3
LEARNING_RATE = 0.1

OPTIONS = [
    {"multiple": 1},
    {"multiple": 8},
    {"multiple": 1, "padding_idx": 0},
    {"multiple": 1, "padding_idx": 11},  # the last row of rank 0 of 2, in the middle of a shard of 4
    {"multiple": 1, "padding_idx": -1},
    {"multiple": 1, "check_ids": "later"},
]


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


def train(module: nn.Module, shape: tuple[int, ...] = (BATCH, SEQUENCE), dtype: torch.dtype = torch.float64):
    """The first step's output, gradient and traffic, and the weight after several steps of SGD."""
    batches = []
    for step in range(STEPS):
        ids = all_ids(step).view(-1)[: torch.Size(shape).numel()].view(shape)
        batches.append(({"ids": ids}, random((*shape, HIDDEN), "dy", step).to(dtype)))
    return train_sgd(module, batches, lr=LEARNING_RATE)


def plain(options: dict, dtype: torch.dtype = torch.float64) -> nn.Embedding:
    return nn.Embedding(VOCAB, HIDDEN, options.get("padding_idx"), _weight=table().to(dtype))


def parallel(options: dict, group=None, dtype: torch.dtype = torch.float64) -> VocabParallelEmbedding:
    module = VocabParallelEmbedding(VOCAB, HIDDEN, **options, group=group, dtype=dtype)
    load_full_state_dict(module, {"weight": table().to(dtype)}, group)
    return module


def _train_all(cases):
    return [train(parallel(options, dtype=dtype), shape, dtype) for options, shape, dtype in cases]


def assert_equals_plain(results, options, shape=(BATCH, SEQUENCE), tolerance=1e-12):
    """`results`: what `train` gave on the ranks of one group."""
    dtype = results[0]["out"].dtype
    expected, _ = train(plain(options, dtype), shape, dtype)
    for rank, result in enumerate(results):
        assert torch.equal(result["out"], expected["out"])  # a sum with zeros rounds nothing
        for name in ("dweight", "weight"):
            mine = rows_of(expected[name], rank, len(results), options.get("multiple", 128))
            assert_close(result[name], mine, tolerance)


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_vectors_gradients_and_steps_equal_nn_embedding_for_all_options(p):
    full, lower = (BATCH, SEQUENCE), torch.bfloat16
    cases = [(options, full, torch.float64) for options in [*OPTIONS, {}]]
    cases += [(OPTIONS[0], shape, torch.float64) for shape in [(), (5,), (0,), (2, 0), (2, 3, 5)]]
    cases += [(OPTIONS[0], full, torch.float32), (OPTIONS[0], full, lower)]
    results = launch(_train_all, p, args=(cases,))
    assert len(results) == p
    for number, (options, shape, dtype) in enumerate(cases):
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, lower: 2**-4}[dtype]
        assert_equals_plain([result[number][0] for result in results], options, shape, tolerance)
        one = [("all_reduce", "sum", torch.Size(shape).numel() * HIDDEN * dtype.itemsize)] if p > 1 else []
        assert all(result[number][1] == [one, []] for result in results)  # nothing but g, and nothing backward


def _odd_inputs():
    module = parallel({"multiple": 1})
    ids = all_ids()
    spoiled = parallel({"multiple": 1})
    with torch.no_grad():
        spoiled.weight[0] = torch.nan  # what a mask by multiplication would let through
    frozen = parallel({"multiple": 1}).requires_grad_(False)
    return [
        module(ids.T),
        module(ids[:, ::3]),
        module(ids[:1].expand(4, -1)),
        module(ids.int()),
        frozen(ids),
        spoiled(torch.tensor([1, 12])),
    ]


def test_ids_of_any_layout_and_integer_type_are_looked_up():
    ids, whole = all_ids(), table()
    expected = [whole[other] for other in (ids.T, ids[:, ::3], ids[:1].expand(4, -1), ids, ids, torch.tensor([1, 12]))]
    for outputs in launch(_odd_inputs, 2):
        assert all(torch.equal(out, want) for out, want in zip(outputs, expected, strict=True))
        assert not outputs[-2].requires_grad


def _in_groups():
    group = own_group()
    module = parallel({"multiple": 1}, group)
    twin = copy.deepcopy(module)
    first, second = train(module)[0], train(twin)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)
    x = random((2, HIDDEN), "x").requires_grad_()
    logits = parallel_logits(x, parallel({"multiple": 1}, group).weight, gather=True, vocab_size=VOCAB, group=group)
    logits.backward(random((2, VOCAB), "dlogits", dist.get_rank() % 2))
    return first, logits.detach(), x.grad


def test_two_groups_side_by_side_are_two_tables():
    results = launch(_in_groups, 4)
    for number, members in enumerate(GROUPS):
        assert_equals_plain([results[rank][0] for rank in members], {"multiple": 1})
        for rank in members:
            assert_close(results[rank][1], random((2, HIDDEN), "x") @ table().T)
            assert_close(results[rank][2], random((2, VOCAB), "dlogits", number) @ table())


def _with_dtensor():
    theirs = nn.Module()
    theirs.table = plain({})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(theirs, mesh, {"table": RowwiseParallel(input_layouts=Replicate(), use_local_output=True)})
    outcomes = []
    for module in (parallel({"multiple": 1}), theirs.table):
        ids, dy = all_ids(), random((BATCH, SEQUENCE, HIDDEN), "dy")
        out = module(ids)
        out.backward(dy)
        grad = module.weight.grad
        outcomes.append((out.detach().clone(), grad.full_tensor() if hasattr(grad, "full_tensor") else grad))
    return outcomes


def test_vectors_and_gradients_equal_dtensors():
    for rank, ((out, grad), (their_out, their_grad)) in enumerate(launch(_with_dtensor, 2)):
        assert torch.equal(out, their_out)
        assert_close(grad, rows_of(their_grad, rank, 2))


# The output layer


def _logits(cases):
    """What parallel_logits gives for each case: out, gradients of x, of the shard and of the bias, and the traffic."""
    rank, p = dist.get_rank(), dist.get_world_size()
    outcomes = []
    for options in cases:
        x = random((2, 5, HIDDEN), "x").requires_grad_()
        weight = rows_of(table(), rank, p).clone().requires_grad_()
        bias = rows_of(random((VOCAB, 1), "bias"), rank, p)[:, 0].clone().requires_grad_()
        with record() as forward:
            out = parallel_logits(x, weight, bias, **options)
        assert ("Async" in out.grad_fn.name()) == (p > 1 and "async_grad_allreduce" in options)
        dy = F.pad(random((2, 5, VOCAB), "dlogits"), (0, p * len(weight) - VOCAB))
        dy = dy[..., : out.shape[-1]] if options.get("gather") else dy.chunk(p, -1)[rank]
        with record() as backward:
            out.backward(dy)
        outcomes.append((out.detach(), x.grad, weight.grad, bias.grad, traffic(forward, backward)))
    return outcomes


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_logits_and_gradients_equal_a_matmul_with_the_whole_table(p):
    x, weight, bias = random((2, 5, HIDDEN), "x"), table(), random((VOCAB, 1), "bias")[:, 0]
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    expected = x @ weight.T + bias
    expected.backward(random((2, 5, VOCAB), "dlogits"))
    dx, dw, db = (leaf.grad for leaf in leaves)
    cases = [{}, {"async_grad_allreduce": True}, {"gather": True, "vocab_size": VOCAB}, {"gather": True}]
    padding = len(padded(table(), p, 1)) - VOCAB
    every = F.pad(expected.detach(), (0, padding))
    for rank, outcomes in enumerate(launch(_logits, p, args=(cases,))):
        wanted = [every.chunk(p, -1)[rank]] * 2 + [expected.detach(), every]
        for (out, got_dx, got_dw, got_db, sent), want, options in zip(outcomes, wanted, cases, strict=True):
            assert_close(out, want)
            assert_close(got_dx, dx)
            assert_close(got_dw, rows_of(dw, rank, p))
            assert_close(got_db, rows_of(db[:, None], rank, p)[:, 0])
            gathered = [("all_gather", None, 80 * (VOCAB + padding))] if options.get("gather") else []
            assert sent == ([gathered, [("all_reduce", "sum", 80 * HIDDEN)]] if p > 1 else [[], []])


def tied_steps(embed, logits, weight):
    """A model of one parameter with two uses, trained by SGD: the first step's gradient, and the values at the end."""
    optimizer = torch.optim.SGD([weight], lr=LEARNING_RATE)
    gradient = None
    for step in range(STEPS):
        out = logits(torch.tanh(embed(all_ids(step))), weight)  # [3, 14, v or v/p]
        (out - random((1,), "aim", step)).square().sum().div(100).backward()
        gradient = weight.grad.clone() if step == 0 else gradient
        optimizer.step()
        optimizer.zero_grad()
    return gradient, weight.detach()


def _tied():
    module = parallel({"multiple": 1})
    mine = min(module.stop, VOCAB) - module.start  # the rows without padding
    with record() as seen:
        outcome = tied_steps(module, lambda x, weight: parallel_logits(x, weight)[..., :mine], module.weight)
    return outcome, len(seen)


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_a_tied_output_layer_adds_its_gradient_to_the_same_parameter(p):
    reference = plain({})
    weight = reference.weight
    gradient, trained = tied_steps(reference, lambda x, w: x @ w.T, weight)
    for rank, ((got_gradient, got_trained), collectives) in enumerate(launch(_tied, p)):
        assert_close(got_gradient, rows_of(gradient, rank, p))
        assert_close(got_trained, rows_of(trained, rank, p))
        assert collectives == (2 * STEPS if p > 1 else 0)  # g of the look-up, f's backward of the output layer


# Ids that are not in the vocabulary

WRONG = [-1, -VOCAB, VOCAB, VOCAB + 2, VOCAB + 3, 10**9]  # VOCAB to VOCAB + 2 are padding rows at p = 4


def _wrong_ids(check_ids):
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


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_an_id_outside_the_vocabulary_raises_with_its_place_before_anything_is_sent(p):
    for messages in launch(_wrong_ids, p, args=(None,)):
        place = "at [1, 4] of [3, 14] is outside the vocabulary: its 21 ids are 0 to 20"
        assert [refused for refused, _ in messages[::2]] == [(f"id {wrong} {place}", []) for wrong in WRONG]
        assert all(sent == 0 for _, sent in messages[::2])
        assert all(torch.equal(out, table()[all_ids()]) for out, _ in messages[1::2])


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_checked_later_a_wrong_id_gives_nan_in_its_call_and_raises_in_the_next(p):
    right = torch.ones(BATCH, SEQUENCE, dtype=torch.bool)
    right[1, 4] = right[2, 0] = False
    for outcomes in launch(_wrong_ids, p, args=("later",)):
        assert len(outcomes) == 2 * len(WRONG)
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
    assert torch.equal(module(torch.tensor(3)), table()[3])
    module.check_ids.raise_late()


def test_empty_later_checks_find_nothing():
    module = parallel({"multiple": 1, "check_ids": "later"})
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


def _initial(options):
    torch.manual_seed(11)
    module = VocabParallelEmbedding(VOCAB, HIDDEN, **options)
    sharding = module.weight.tensor_parallel
    assert (sharding.dim, sharding.blocks) == (0, (Block(VOCAB, options.get("multiple", 128), padded=True),))
    return module.weight.detach(), full_state_dict(module), torch.rand(1)


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("options", [{}, *OPTIONS[:4]], ids=str)
def test_the_first_values_are_those_of_nn_embedding_with_the_same_seed_for_every_p(options, p):
    torch.manual_seed(11)
    expected = nn.Embedding(VOCAB, HIDDEN, options.get("padding_idx")).state_dict()
    next_number = torch.rand(1)
    for rank, (weight, state, after) in enumerate(launch(_initial, p, args=(options,))):
        assert list(state) == ["weight"]
        assert torch.equal(state["weight"], expected["weight"])
        assert torch.equal(weight, rows_of(expected["weight"], rank, p, options.get("multiple", 128)))
        assert torch.equal(after, next_number)


def _fives(weight):
    nn.init.constant_(weight, 5.0)


def test_an_init_method_fills_the_table_but_for_its_padding():
    for per_rank_init in (False, True):
        options = {"init_method": _fives, "per_rank_init": per_rank_init, "padding_idx": 2, "multiple": 8}
        whole = torch.full((VOCAB, HIDDEN), 5.0)
        whole[2] = 0
        for p in (1, 2):
            for rank, (weight, state, _) in enumerate(launch(_initial, p, args=(options,))):
                assert torch.equal(weight, rows_of(whole, rank, p, 8))
                assert torch.equal(state["weight"], whole)


def test_drawn_per_rank_shards_differ():
    torch.manual_seed(11)
    expected = nn.Embedding(VOCAB, HIDDEN).weight
    assert torch.equal(_initial({"per_rank_init": True})[1]["weight"], expected)  # the only rank draws all of it
    (first, _, after), (second, _, again) = launch(_initial, 2, args=({"per_rank_init": True, "multiple": 1},))
    assert len({float(number) for number in torch.cat([first, second[:-1]]).flatten()}) == VOCAB * HIDDEN
    assert torch.equal(after, again)


def test_without_a_process_group_it_is_a_plain_embedding_and_sends_nothing():
    module = parallel(OPTIONS[2])
    result, sent = train(module)
    assert_equals_plain([result], OPTIONS[2])
    assert sent == [[], []]
    assert full_state_dict(module)["weight"].shape == (VOCAB, HIDDEN)
    assert "21, 6, padding_idx=0, rank 0 of 1 holds rows 0 to 20" in repr(module)


def test_on_meta_shapes_work_without_memory():
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


# Compiled


def _compiled():
    module = parallel({"multiple": 1, "padding_idx": 11})
    uncompiled = copy.deepcopy(module)
    module.compile(backend="aot_eager", fullgraph=True)
    (refused,) = refusals(lambda: module(torch.full((BATCH, SEQUENCE), VOCAB)), kind=RuntimeError)
    return train(module)[0], refused, train(uncompiled)[0]


def test_compiled_in_one_graph_it_gives_the_same_and_refuses_the_same():
    results = launch(_compiled, 2, timeout=240)
    for outcome in (0, 2):
        assert_equals_plain([result[outcome] for result in results], {"multiple": 1, "padding_idx": 11})
    assert all("id outside the vocabulary: its 21 ids are 0 to 20" in refused for _, refused, _ in results)
