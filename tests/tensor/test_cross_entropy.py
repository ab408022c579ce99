"""vocab_parallel_cross_entropy: `tensor.cross_entropy`, against F.cross_entropy of the whole logits on one process."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.reference import assert_close, random
from tests.tensor.on_ranks import on_ranks, refusals, results_of, traffic
from tplab import launch, record
from tplab.collectives.by_hand import rank_and_size
from tplab.memory.meter import MemoryMeter, saved_for_backward
from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy

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


def ours(logits, target, dloss=None, group=None, laid_out=lambda z: z, overwrite=False, **options):
    """This rank's loss and gradient, the traffic of forward and backward; what was passed in must stay as it is.

    laid_out:  gives the leaf another layout in memory
    overwrite: the loss overwrites its logits, which aren't the leaf
    """
    rank, p = rank_and_size(group)
    z = laid_out(shard(logits, rank, p)).requires_grad_()
    before = [z.detach().clone(), target.clone(), None if dloss is None else dloss.clone()]
    with record() as forward:
        given = z * 1 if overwrite else z
        loss = vocab_parallel_cross_entropy(given, target, group=group, overwrite_logits=overwrite, **options)
    dloss = torch.ones_like(loss) if dloss is None else dloss.to(loss.dtype)
    with record() as backward:
        loss.backward(dloss)
    assert torch.equal(z.detach().nan_to_num(7), before[0].nan_to_num(7))
    assert torch.equal(target, before[1])
    assert before[2] is None or torch.equal(dloss, before[2].to(dloss.dtype))
    return loss.detach(), z.grad, traffic(forward, backward)


def assert_equals(results, loss: Tensor, gradient: Tensor, tolerance: float = 1e-10) -> None:
    """Every rank has the loss, bit for bit that of rank 0, and its shard of the gradient."""
    for rank, (got_loss, got_gradient, *_) in enumerate(results):
        assert torch.equal(got_loss.nan_to_num(7), results[0][0].nan_to_num(7))
        for got, want in ((got_loss, loss), (got_gradient, shard(gradient, rank, len(results)))):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def upstream(reduction: str, shape=SHAPE) -> Tensor:
    return random(shape if reduction == "none" else (), "dloss")


def case(**options) -> tuple:
    """Logits, targets, upstream gradient, and the options."""
    target = targets(SHAPE, options.get("vocab_size") or COLUMNS, options.get("ignore_index", -100))
    return whole_logits(), target, upstream(options.get("reduction", "mean")), options


REDUCTIONS = ["mean", "sum", "none"]
# vocab_size 17 ends inside the last of 2 shards and leaves the last of 4 without a column; 12 the last of 2 too


IGNORED = torch.full(SHAPE, -100)
EMPTY = torch.empty(0, COLUMNS, dtype=torch.float64), torch.empty(0, dtype=torch.long)
ONES = torch.ones(()).double().expand(SHAPE)  # strides of 0, as the gradient of sum() has


def transposed(z):
    return z.transpose(0, 1).contiguous().transpose(0, 1)


def every_second(z):
    return torch.stack([z, -z], -1).flatten(-2)[..., ::2]


def expanded(z):
    return z[:1].expand(3, -1, -1)


CASES = [
    case(reduction=reduction, label_smoothing=smoothing, vocab_size=vocab_size, ignore_index=ignored)
    for reduction, smoothing, vocab_size, ignored in itertools.product(
        REDUCTIONS, [0.0, 0.1, 1.0], [None, 17, 12], [-100, 3, 0]
    )
]
CASES += [
    (whole_logits(shape), targets(shape), upstream("none", shape), {"reduction": "none"})
    for shape in [(), (1,), (7,), (2, 3, 2), (0,), (2, 0)]
]
CASES += [
    (whole_logits(), targets(ignore_index=0).to(dtype), None, {"ignore_index": 0})
    for dtype in (torch.uint8, torch.int16, torch.int32)
]
CASES += [
    (whole_logits(), IGNORED, None, {"reduction": reduction, "label_smoothing": smoothing})
    for reduction, smoothing in itertools.product(REDUCTIONS, (0.0, 0.1))
]
CASES += [(*EMPTY, None, {"reduction": reduction}) for reduction in REDUCTIONS]
LAYOUTS = [
    (whole_logits(), targets().T.contiguous().T, ONES, {"reduction": "none", "laid_out": transposed}),
    (whole_logits(), targets(), ONES, {"reduction": "none", "laid_out": every_second}),
    (whole_logits()[:1].expand(3, -1, -1), targets(), ONES, {"reduction": "none", "laid_out": expanded}),
    (whole_logits(), targets(), ONES, {"reduction": "none", "laid_out": transposed, "overwrite": True}),
]


def _run_all(group):
    return [ours(*given, group=group, **options) for *given, options in CASES + LAYOUTS]


@on_ranks
def test_loss_gradient_and_traffic_equal_torchs_for_every_combination_of_options(p, in_groups):
    for results in results_of(_run_all, p, in_groups):
        for number, (*given, options) in enumerate(CASES + LAYOUTS):
            plain_options = {name: value for name, value in options.items() if name not in ("laid_out", "overwrite")}
            assert_equals([result[number] for result in results], *plain(*given, **plain_options))
            n = given[1].numel()
            sums = 2 * n if options.get("reduction") == "none" else n + 1
            sent = [("all_reduce", "max", 8 * n), ("all_reduce", "sum", 8 * sums)] if len(results) > 1 else []
            assert n == 0 or all(result[number][2] == [sent, []] for result in results)


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


EXTREME = list(itertools.product((torch.float64, torch.float32), (0.0, 0.1), (False, True)))


def _extremes():
    target, options = torch.full((16,), 5), {"reduction": "none"}
    return [
        ours(extreme_logits(dtype), target, **options, label_smoothing=smoothing, overwrite=overwrite)
        for dtype, smoothing, overwrite in EXTREME
    ]


@pytest.mark.parametrize("p", [1, 2, 4])
def test_large_infinite_and_nan_logits_give_what_torch_gives(p):
    results = launch(_extremes, p)
    for number, (dtype, smoothing, _) in enumerate(EXTREME):
        target = torch.full((16,), 5)
        loss, gradient = plain(extreme_logits(dtype), target, reduction="none", label_smoothing=smoothing)
        assert loss.isnan().sum() >= 5  # rows 6 to 9 and 14
        assert loss.isposinf().sum() >= 1
        tolerance = {torch.float64: 1e-10, torch.float32: 2e-6}[dtype]
        assert_equals([result[number] for result in results], loss, gradient, tolerance)


# Lower precisions


LOWER = list(itertools.product([torch.bfloat16, torch.float16, torch.float32], [0.0, 0.1], ["mean", "none"]))


def long_logits(dtype: torch.dtype) -> Tensor:
    """So many equal logits that sums in bfloat16 would stop growing: 256 + 1 = 256."""
    logits = (random((64, 2048), "long") / 8).to(dtype)
    logits[0, 0] = 10  # the target, of a probability near 1: its gradient is a small difference
    return logits


def _lower():
    target = torch.arange(64) * 32
    return [
        ours(long_logits(dtype), target, label_smoothing=smoothing, reduction=reduction, overwrite=overwrite)
        for dtype, smoothing, reduction in LOWER
        for overwrite in (False, True)
    ]


@pytest.mark.parametrize("p", [1, 4])
def test_lower_precisions_are_summed_and_returned_in_float32(p):
    target = torch.arange(64) * 32
    for rank, outcomes in enumerate(launch(_lower, p)):
        for number, (got_loss, got_gradient, sent) in enumerate(outcomes):
            dtype, smoothing, reduction = LOWER[number // 2]
            loss, gradient = plain(long_logits(dtype).double(), target, label_smoothing=smoothing, reduction=reduction)
            assert_close(got_loss, loss.float(), 1e-6)
            want = shard(gradient, rank, p).to(dtype)
            assert got_gradient.dtype == dtype
            tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]  # the last bit
            torch.testing.assert_close(got_gradient, want, rtol=tolerance, atol=1e-7)  # float16's least is 6e-8
            sums = 64 + 1 if reduction == "mean" else 128
            calls = [("all_reduce", "max", 64 * dtype.itemsize), ("all_reduce", "sum", 4 * sums)]
            assert sent[0] == (calls if p > 1 else [])


# Targets that are not in the vocabulary


WRONG = [-1, 17, 24, 10**6]


def _wrong_targets():
    """For each wrong target, the message, and the loss and the gradient without a check."""
    found = []
    for wrong in WRONG:
        target = targets(SHAPE, 17)
        target[1, 3] = target[2, 4] = wrong
        run = partial(ours, whole_logits(), target, reduction="none", vocab_size=17)
        messages = refusals(run, partial(run, check_target=True), kind=IndexError)
        found.append((messages, run(check_target=False)))
    return found


def test_a_target_outside_the_vocabulary_raises_with_its_place_or_costs_nan():
    loss, gradient = plain(whole_logits(), targets(SHAPE, 17), reduction="none", vocab_size=17)
    for spoiled in [(1, 3), (2, 4)]:
        loss[spoiled] = NAN
        gradient[spoiled][:17] = NAN
    for wrong, results in zip(WRONG, zip(*launch(_wrong_targets, 2), strict=True), strict=True):
        place = "at [1, 3] of [3, 5] is outside the vocabulary: its 17 ids are 0 to 16"
        assert all(messages == [f"target {wrong} {place}"] * 2 for messages, _ in results)
        assert_equals([outcome for _, outcome in results], loss, gradient)


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


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_backward_is_right_or_refused_where_the_gradient_overwrote_the_logits(overwrite):
    _, gradient = plain(whole_logits(), targets())
    for rank, (unread, kept, places, gradients, second, leaf) in enumerate(launch(_twice, 2, args=(overwrite,))):
        assert (unread, kept) == (not overwrite, not overwrite)  # overwriting, the forward left exponentials
        assert places == ([True] if overwrite else [False, False])
        assert_close(gradients[0], shard(gradient, rank, 2))
        assert "overwrite_logits would destroy logits that are a leaf" in leaf
        if overwrite:
            assert "modified by an inplace operation" in second
        else:
            assert second == "no error"
            assert_close(gradients[1], 3 * shard(gradient, rank, 2))


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
        assert 0 < forward < 0.25 * shard_bytes  # beside the logits: some numbers a token, a few rows at a time
        shards = 0 if overwrite_logits else 1  # the gradient is written over the logits, or beside them
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
