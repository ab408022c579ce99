"""vocab_parallel_cross_entropy: `tensor.cross_entropy`, against F.cross_entropy of the whole logits on one process."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from tests.reference import assert_close, random
from tests.tensor.on_ranks import GROUPS, own_group, refusals, traffic
from tplab import launch, record
from tplab.collectives.by_hand import rank_and_size
from tplab.memory.meter import MemoryMeter, saved_for_backward
from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy
from tplab.tensor.embedding import VocabParallelEmbedding, parallel_logits
from tplab.tensor.full_state import full_state_dict, load_full_state_dict

WORLD_SIZES = (1, 2, 4)
COLUMNS = 24  # of the whole logits, padding included
SHAPE = (3, 5)
INF, NAN = float("inf"), float("nan")


def whole_logits(shape=SHAPE, key: object = "z") -> Tensor:
    return 3 * random((*shape, COLUMNS), "logits", key)


def targets(shape=SHAPE, vocab_size: int = COLUMNS, ignore_index: int = -100) -> Tensor:
    """The first and the last id of every shard of 2 and 4, and the last of the vocabulary; some are ignored."""
    edges = [0, 5, 6, 11, 12, 17, 18, 23, vocab_size - 1]
    edges = [edge for edge in edges if edge < vocab_size]
    flat = torch.tensor((edges * torch.Size(shape).numel())[: torch.Size(shape).numel()], dtype=torch.long)
    flat[2::7] = ignore_index
    return flat.view(shape)


def shard(whole: Tensor, rank: int, p: int) -> Tensor:
    return whole.chunk(p, -1)[rank].clone(memory_format=torch.contiguous_format)


def plain(logits: Tensor, target: Tensor, dloss: Tensor | None = None, vocab_size: int | None = None, **options):
    """Loss and gradient by torch's own cross-entropy, the gradient of the padding filled up with zeros."""
    z = logits[..., :vocab_size].clone().requires_grad_()
    loss = F.cross_entropy(z.reshape(-1, z.shape[-1]), target.flatten().long(), **options)
    loss = loss.view(target.shape) if options.get("reduction") == "none" else loss
    loss.backward(torch.ones_like(loss) if dloss is None else dloss)
    return loss.detach(), F.pad(z.grad, (0, logits.shape[-1] - z.shape[-1]))


def ours(logits: Tensor, target: Tensor, dloss: Tensor | None = None, group=None, **options):
    """This rank's loss and gradient, the traffic of forward and backward; what was passed in must stay as it is."""
    rank, p = rank_and_size(group)
    z = shard(logits, rank, p).requires_grad_()
    before = [z.detach().clone(), target.clone(), None if dloss is None else dloss.clone()]
    with record() as forward:
        loss = vocab_parallel_cross_entropy(z, target, group=group, **options)
    dloss = torch.ones_like(loss) if dloss is None else dloss.to(loss.dtype)
    with record() as backward:
        loss.backward(dloss)
    assert torch.equal(z.detach().nan_to_num(7), before[0].nan_to_num(7))
    assert torch.equal(target, before[1])
    assert before[2] is None or torch.equal(dloss, before[2].to(dloss.dtype))
    return loss.detach(), z.grad, traffic(forward, backward)


def assert_equals(results, loss: Tensor, gradient: Tensor, tolerance: float = 1e-12) -> None:
    """Every rank has the loss, bit for bit that of rank 0, and its shard of the gradient."""
    for rank, (got_loss, got_gradient, *_) in enumerate(results):
        assert torch.equal(got_loss.nan_to_num(7), results[0][0].nan_to_num(7))
        for got, want in ((got_loss, loss), (got_gradient, shard(gradient, rank, len(results)))):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def _run_all(cases):
    """cases: logits, target, upstream gradient and options of each."""
    return [ours(*given, **options) for *given, options in cases]


def upstream(reduction: str, shape=SHAPE) -> Tensor:
    return random(shape if reduction == "none" else (), "dloss")


def case(**options) -> tuple:
    """Logits, targets, upstream gradient, and the options."""
    target = targets(SHAPE, options.get("vocab_size") or COLUMNS, options.get("ignore_index", -100))
    return whole_logits(), target, upstream(options.get("reduction", "mean")), options


REDUCTIONS = ["mean", "sum", "none"]
# vocab_size 17 ends inside the last of 2 shards and leaves the last of 4 without a column; 12 the last of 2 too
OPTION_CASES = [
    case(reduction=reduction, label_smoothing=smoothing, vocab_size=vocab_size, ignore_index=ignored)
    for reduction, smoothing, vocab_size, ignored in itertools.product(
        REDUCTIONS, [0.0, 0.1, 1.0], [None, 17, 12], [-100, 3, 0]
    )
]


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_loss_gradient_and_traffic_for_every_combination_of_options(p):
    results = launch(_run_all, p, args=(OPTION_CASES,))
    assert len(results) == p
    n = torch.Size(SHAPE).numel()
    for number, (*given, options) in enumerate(OPTION_CASES):
        assert_equals([result[number] for result in results], *plain(*given, **options))
        sums = 2 * n if options["reduction"] == "none" else n + 1
        sent = [("all_reduce", "max", 8 * n), ("all_reduce", "sum", 8 * sums)]
        assert all(result[number][2] == [sent if p > 1 else [], []] for result in results)


IGNORED = torch.full(SHAPE, -100)
EMPTY = torch.empty(0, COLUMNS, dtype=torch.float64), torch.empty(0, dtype=torch.long)
SHAPE_CASES = {
    "any number of leading dimensions": [
        (whole_logits(shape), targets(shape), upstream("none", shape), {"reduction": "none"})
        for shape in [(), (1,), (7,), (2, 3, 2), (0,), (2, 0)]
    ],
    "targets of any integer type": [
        (whole_logits(), targets(ignore_index=0).to(dtype), None, {"ignore_index": 0})
        for dtype in (torch.uint8, torch.int16, torch.int32)
    ],
    "all targets ignored": [
        (whole_logits(), IGNORED, None, {"reduction": reduction, "label_smoothing": smoothing})
        for reduction in REDUCTIONS
        for smoothing in (0.0, 0.1)
    ],
    "an empty batch": [(*EMPTY, None, {"reduction": reduction}) for reduction in REDUCTIONS],
}


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", SHAPE_CASES)
def test_loss_and_gradient_equal_torchs_for(name, p):
    results = launch(_run_all, p, args=(SHAPE_CASES[name],))
    tolerance = 0 if name == "all targets ignored" else 1e-12  # nan for a mean, otherwise zero, and no gradient
    for number, (*given, options) in enumerate(SHAPE_CASES[name]):
        assert_equals([result[number] for result in results], *plain(*given, **options), tolerance)


def _layouts():
    """(loss, gradient) of logits that are transposed, strided or expanded, and of an upstream gradient that is."""
    rank, p = dist.get_rank(), dist.get_world_size()
    z = shard(whole_logits(), rank, p)
    wide = torch.stack([z, -z], -1).flatten(-2)  # every second column is z
    outcomes = []
    for leaf, view, of_gradient in [
        (z, lambda x: x, lambda dx: dx),
        (z.transpose(0, 1).contiguous(), lambda x: x.transpose(0, 1), lambda dx: dx.transpose(0, 1)),
        (wide, lambda x: x[..., ::2], lambda dx: dx[..., ::2]),
        (z[:1], lambda x: x.expand(3, -1, -1), lambda dx: dx),
    ]:
        leaf = leaf.clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(view(leaf), targets().T.contiguous().T, reduction="none")
        losses.sum().backward()  # an expanded gradient, with strides of 0
        outcomes.append((losses.detach(), of_gradient(leaf.grad).clone()))
    transposed = (leaf := z.transpose(0, 1).contiguous().requires_grad_()).transpose(0, 1)
    losses = vocab_parallel_cross_entropy(transposed, targets(), reduction="none", overwrite_logits=True)
    losses.sum().backward()
    outcomes.append((losses.detach(), leaf.grad.transpose(0, 1).clone()))
    return outcomes


def test_layouts_do_not_matter():
    ones = torch.ones(SHAPE, dtype=torch.float64)
    wanted = [plain(whole_logits(), targets(), ones, reduction="none")] * 3
    loss, gradient = plain(whole_logits()[:1].expand(3, -1, -1), targets(), ones, reduction="none")
    wanted += [(loss, gradient.sum(0, keepdim=True)), wanted[0]]
    for outcomes, want in zip(zip(*launch(_layouts, 2), strict=True), wanted, strict=True):
        assert_equals(outcomes, *want)


# Extreme logits


def extreme_logits(dtype: torch.dtype) -> Tensor:
    """[rows, 24]; shards of 12 and of 6 with their own troubles."""
    base = random((16, COLUMNS), "extreme").to(dtype)
    base[0] *= 1e4
    base[1] += 1e4
    base[2] -= 1e4
    base[3, :12] = -INF  # all of rank 0's
    base[4, 12:] = -INF
    base[5, 3:] = -INF
    base[6] = -INF  # no token possible at all
    base[7, 8] = INF
    base[8, 20] = NAN
    base[9, 0] = NAN
    base[10, 5] = -INF  # the target itself
    base[11, 12:] += 1e4  # another shard is far above the target's
    base[12, :6] = -1e4
    base[12, 6:] = -INF  # the finite shard is far below zero
    base[13] = 0
    base[14, [0, 12]] = INF
    base[15] = torch.finfo(dtype).max / 4 * torch.sign(base[15])
    return base


EXTREME = [(dtype, smoothing) for dtype in (torch.float64, torch.float32) for smoothing in (0.0, 0.1)]


def _extremes():
    target, rank, p = torch.full((16,), 5), dist.get_rank(), dist.get_world_size()
    outcomes = []
    for dtype, smoothing in EXTREME:
        options = {"reduction": "none", "label_smoothing": smoothing}
        z = shard(extreme_logits(dtype), rank, p).requires_grad_()
        loss = vocab_parallel_cross_entropy(z.clone(), target, **options, overwrite_logits=True)
        loss.sum().backward()
        outcomes += [ours(extreme_logits(dtype), target, **options)[:2], (loss.detach(), z.grad)]
    return outcomes


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_large_infinite_and_nan_logits_give_what_torch_gives(p):
    results = launch(_extremes, p)
    for number, (dtype, smoothing) in enumerate(EXTREME):
        target = torch.full((16,), 5)
        loss, gradient = plain(extreme_logits(dtype), target, reduction="none", label_smoothing=smoothing)
        assert loss.isnan().sum() >= 5  # rows 6 to 9 and 14
        assert loss.isposinf().sum() >= 1
        tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}[dtype]
        for way in (0, 1):  # as it is, and overwriting
            assert_equals([result[2 * number + way] for result in results], loss, gradient, tolerance)


# Lower precisions

LOWER = [torch.bfloat16, torch.float16, torch.float32]
LONG = (64, 32)  # enough equal logits for sums in bfloat16 to stop growing: 256 + 1 = 256


def long_logits(dtype: torch.dtype) -> Tensor:
    logits = (random((64, 2048), "long") / 8).to(dtype)
    logits[0, 0] = 10  # the target, of a probability near 1: its gradient is a small difference
    return logits


def _lower():
    target = torch.arange(64) * 32
    outcomes = []
    for dtype, smoothing in itertools.product(LOWER, [0.0, 0.1]):
        outcomes.append(ours(long_logits(dtype), target, label_smoothing=smoothing))
        outcomes.append(ours(long_logits(dtype), target, label_smoothing=smoothing, reduction="none"))
        z = shard(long_logits(dtype), dist.get_rank(), dist.get_world_size()).requires_grad_()
        loss = vocab_parallel_cross_entropy(z * 1, target, label_smoothing=smoothing, overwrite_logits=True)
        loss.backward()
        outcomes.append((loss.detach(), z.grad, outcomes[-2][2]))
    return outcomes


@pytest.mark.parametrize("p", [1, 4])
def test_lower_precisions_are_summed_and_returned_in_float32(p):
    target = torch.arange(64) * 32
    for rank, outcomes in enumerate(launch(_lower, p)):
        for number, (dtype, smoothing, reduction) in enumerate(
            itertools.product(LOWER, [0.0, 0.1], ["mean", "none", "mean"])
        ):
            loss, gradient = plain(long_logits(dtype).double(), target, label_smoothing=smoothing, reduction=reduction)
            got_loss, got_gradient, traffic = outcomes[number]
            assert_close(got_loss, loss.float(), 1e-6)
            want = shard(gradient, rank, p).to(dtype)
            assert got_gradient.dtype == dtype
            tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]  # the last bit
            torch.testing.assert_close(got_gradient, want, rtol=tolerance, atol=1e-7)  # float16's least is 6e-8
            sums = 64 + 1 if reduction == "mean" else 128
            sent = [("all_reduce", "max", 64 * dtype.itemsize), ("all_reduce", "sum", 4 * sums)]
            assert traffic[0] == (sent if p > 1 else [])


def _autocast():
    weight, x = random((COLUMNS, 8), "w").float(), random((4, 8), "x").float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = parallel_logits(x, shard(weight.T, dist.get_rank(), 2).T)
        return logits.dtype, vocab_parallel_cross_entropy(logits, targets((4,)))


def test_under_autocast_the_loss_is_in_float32():
    x, weight = random((4, 8), "x").bfloat16(), random((COLUMNS, 8), "w").bfloat16()
    expected = F.cross_entropy((x @ weight.T).float(), targets((4,)))
    for dtype, loss in launch(_autocast, 2):
        assert dtype == torch.bfloat16
        assert_close(loss, expected, 1e-6)


# Targets that are not in the vocabulary


def _wrong_targets(check_target, wrong):
    target = targets(SHAPE, 17)
    target[1, 3] = target[2, 4] = wrong
    return ours(whole_logits(), target, reduction="none", vocab_size=17, check_target=check_target)


def _refused_targets(wrong):
    return refusals(*(partial(_wrong_targets, check, wrong) for check in (None, True)), kind=IndexError)


@pytest.mark.parametrize("wrong", [-1, 17, 18, 24, 10**6])
def test_a_target_outside_the_vocabulary_raises_with_its_place_or_costs_nan(wrong):
    place = "at [1, 3] of [3, 5] is outside the vocabulary: its 17 ids are 0 to 16"
    assert list(launch(_refused_targets, 2, args=(wrong,))) == [[f"target {wrong} {place}"] * 2] * 2
    target = targets(SHAPE, 17)
    loss, gradient = plain(whole_logits(), target, reduction="none", vocab_size=17)
    for spoiled in [(1, 3), (2, 4)]:
        loss[spoiled] = NAN
        gradient[spoiled][:17] = NAN
    assert_equals(launch(_wrong_targets, 2, args=(False, wrong)), loss, gradient)


# Memory, and a second backward


def _twice(overwrite_logits):
    z = shard(whole_logits(), dist.get_rank(), dist.get_world_size()).requires_grad_()
    logits = z * 1  # not a leaf
    memory, values = logits.data_ptr(), logits.detach().clone()
    seen = []
    logits.register_hook(lambda gradient: seen.append((gradient.data_ptr() == memory, gradient.clone())))
    loss = vocab_parallel_cross_entropy(logits, targets(), overwrite_logits=overwrite_logits)
    unread = torch.equal(logits, values)
    loss.backward(retain_graph=True)
    kept = torch.equal(logits, values)
    (second,) = refusals((3 * loss).backward, kind=RuntimeError)
    (leaf,) = refusals(lambda: vocab_parallel_cross_entropy(z, targets(), overwrite_logits=True))
    return unread, kept, [place for place, _ in seen], [gradient for _, gradient in seen], second, leaf


def test_a_second_backward_is_right():
    _, gradient = plain(whole_logits(), targets())
    for rank, (unread, kept, places, gradients, second, _) in enumerate(launch(_twice, 2, args=(False,))):
        assert unread
        assert kept
        assert places == [False, False]
        assert second == "no error"
        assert_close(gradients[0], shard(gradient, rank, 2))
        assert_close(gradients[1], 3 * shard(gradient, rank, 2))


def test_overwriting_writes_the_gradient_into_the_logits_and_refuses_what_it_would_spoil():
    _, gradient = plain(whole_logits(), targets())
    for rank, (unread, kept, places, gradients, second, leaf) in enumerate(launch(_twice, 2, args=(True,))):
        assert not unread  # the forward left exponentials
        assert not kept
        assert places == [True]
        assert_close(gradients[0], shard(gradient, rank, 2))
        assert "modified by an inplace operation" in second
        assert "overwrite_logits would destroy logits that are a leaf" in leaf


N, WIDTH = 256, 8192  # a shard of 8 MB


def _memory(overwrite_logits, smoothing):
    leaf = random((N, WIDTH), "memory", dist.get_rank(), dtype=torch.float32).requires_grad_()
    logits = leaf.view_as(leaf)  # no leaf, and its gradient goes on without a copy
    target = torch.arange(N) * 11
    options = {"overwrite_logits": overwrite_logits, "label_smoothing": smoothing, "vocab_size": 2 * WIDTH - 5}
    with MemoryMeter() as meter, saved_for_backward() as kept:
        loss = vocab_parallel_cross_entropy(logits, target, **options)
    forward = meter.peak
    with MemoryMeter() as meter:
        loss.backward()
    return forward, kept.bytes, meter.peak


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("overwrite_logits", [False, True])
def test_beyond_the_logits_only_their_gradient_takes_memory_of_their_size(overwrite_logits, smoothing):
    shard_bytes = 4 * N * WIDTH
    for forward, kept, backward in launch(_memory, 2, args=(overwrite_logits, smoothing)):
        assert kept <= shard_bytes + 32 * N  # logits, and per token: a target in int64, two numbers in float32
        assert shard_bytes < forward < 1.25 * shard_bytes  # the logits, some numbers a token, a few rows at a time
        shards = 1 if overwrite_logits else 2
        assert shards * shard_bytes < backward < (shards + 0.25) * shard_bytes


def _many_blocks():
    z = random((43, 30_000), "blocks", dist.get_rank()).requires_grad_()
    target = torch.arange(43) * 1395
    loss = vocab_parallel_cross_entropy(z, target, label_smoothing=0.1)
    loss.backward()
    return loss.detach(), z.grad


def test_rows_are_taken_a_few_at_a_time_and_none_is_left_out():
    whole = torch.cat([random((43, 30_000), "blocks", rank) for rank in range(2)], -1)
    loss, gradient = plain(whole, torch.arange(43) * 1395, label_smoothing=0.1)
    results = launch(_many_blocks, 2)
    assert_equals(results, loss, gradient)
    for rank, (_, got) in enumerate(results):
        torch.testing.assert_close(got, shard(gradient, rank, 2), rtol=1e-9, atol=1e-15)


# Beside others


def _with_loss_parallel():
    rank, p = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (p,))
    z = shard(whole_logits().view(-1, COLUMNS), rank, p).requires_grad_()
    outcomes = []
    for reduction in REDUCTIONS:
        dloss = upstream(reduction).reshape(-1) if reduction == "none" else upstream(reduction)
        with loss_parallel(), record() as sent:
            distributed = DTensor.from_local(z, mesh, [Shard(1)])
            loss = F.cross_entropy(distributed, targets().view(-1), reduction=reduction)
            loss.backward(DTensor.from_local(dloss, mesh))
        theirs = (loss.full_tensor().detach(), z.grad.clone(), sum(c.bytes for c in sent))
        z.grad = None
        mine = ours(whole_logits().view(-1, COLUMNS), targets().view(-1), dloss, reduction=reduction)
        outcomes.append((mine, theirs))
    return outcomes


def test_loss_and_gradient_equal_torchs_loss_parallel_with_less_traffic():
    n = torch.Size(SHAPE).numel()
    for outcomes in launch(_with_loss_parallel, 2):
        for reduction, ((loss, gradient, sent), (their_loss, their_gradient, their_bytes)) in zip(
            REDUCTIONS, outcomes, strict=True
        ):
            assert_close(loss, their_loss)
            assert_close(gradient, their_gradient)
            assert their_bytes == 3 * n * 8
            assert sum(size for _, _, size in sent[0]) == (3 * n if reduction == "none" else 2 * n + 1) * 8


def _in_groups():
    return ours(whole_logits(key=dist.get_rank() % 2), targets(), group=own_group())


def test_two_groups_side_by_side_are_two_losses():
    results = launch(_in_groups, 4)
    for number, members in enumerate(GROUPS):
        assert_equals([results[rank] for rank in members], *plain(whole_logits(key=number), targets()))


def test_without_a_process_group_it_is_plain_cross_entropy():
    for *given, options in OPTION_CASES[::5]:
        result = ours(*given, **options)
        assert_equals([result], *plain(*given, **options))
        assert result[2] == [[], []]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(3, 4, dtype=torch.long)}, r"logits \[3, 5, 24\] should be \[.., v/p\], .* \[3, 4\]"),
        ({"logits": torch.tensor(1.0)}, r"logits \[\] should be"),
        ({"target": torch.zeros(3, 5)}, "target should hold ids, in whole numbers, not torch.float32"),
        ({"label_smoothing": 1.1}, "label_smoothing=1.1 is not between 0 and 1"),
        ({"reduction": "average"}, "reduction='average' is not one of 'mean', 'sum', 'none'"),
        ({"vocab_size": 25}, "vocab_size=25 doesn't fit 1 ranks with 24 columns each"),
        ({"vocab_size": 0}, "vocab_size=0 doesn't fit"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        vocab_parallel_cross_entropy(**{"logits": whole_logits(), "target": targets(), **change})


# Embedding, tied output layer and loss together

VOCAB, HIDDEN, STEPS = 21, 6, 4


def language_model(embed, logits_and_loss, weight):
    """Losses of a few steps of SGD with weight decay, which would move the padding if it had a gradient."""
    optimizer = torch.optim.SGD([weight], lr=0.5, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        ids = random((4, 9), "ids", step).mul(1e6).long() % VOCAB
        loss = logits_and_loss(torch.tanh(embed(ids[:, :-1])), weight, ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def _language_model(overwrite_logits):
    embedding = VocabParallelEmbedding(VOCAB, HIDDEN, multiple=8, dtype=torch.float64)
    load_full_state_dict(embedding, {"weight": random((VOCAB, HIDDEN), "table")})
    options = {"vocab_size": VOCAB, "overwrite_logits": overwrite_logits}

    def logits_and_loss(x, weight, target):
        return vocab_parallel_cross_entropy(parallel_logits(x, weight), target, **options)

    losses = language_model(embedding, logits_and_loss, embedding.weight)
    return losses, full_state_dict(embedding)["weight"], embedding.weight.detach()


@pytest.mark.parametrize("overwrite_logits", [False, True])
@pytest.mark.parametrize("p", WORLD_SIZES)
def test_a_tied_language_model_trains_as_on_one_process_and_its_padding_stays_zero(p, overwrite_logits):
    plain_table = nn.Embedding(VOCAB, HIDDEN, _weight=random((VOCAB, HIDDEN), "table"))
    losses = language_model(
        plain_table, lambda x, w, target: F.cross_entropy((x @ w.T).flatten(0, 1), target.flatten()), plain_table.weight
    )
    for rank, (got_losses, weight, mine) in enumerate(launch(_language_model, p, args=(overwrite_logits,))):
        assert_close(got_losses, losses)
        assert_close(weight, plain_table.weight.detach())
        assert not mine[max(0, VOCAB - rank * len(mine)) :].any()


# Compiled


COMPILED_CASES = [case(), case(vocab_size=17), case(reduction="none", label_smoothing=0.1, vocab_size=17)]


def _compiled():
    compiled = torch.compile(vocab_parallel_cross_entropy, backend="aot_eager", fullgraph=True)
    outcomes = []
    for logits, target, dloss, options in COMPILED_CASES:
        z = shard(logits, *rank_and_size()).requires_grad_()
        compiled(z, target, **options).backward(dloss)
        outcomes.append((compiled(z, target, **options).detach(), z.grad))
    return outcomes, refusals(lambda: compiled(z, torch.full(SHAPE, 17), **options), kind=RuntimeError)


def test_compiled_in_one_graph_it_gives_the_same_and_refuses_the_same():
    results = launch(_compiled, 2, timeout=240)
    for number, (*given, options) in enumerate(COMPILED_CASES):
        assert_equals([outcomes[number] for outcomes, _ in results], *plain(*given, **options), 1e-10)
    assert all("target outside the vocabulary: its 17 ids are 0 to 16" in refused for _, (refused,) in results)
