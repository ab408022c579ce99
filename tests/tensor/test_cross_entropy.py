"""vocab_parallel_cross_entropy: `tensor.cross_entropy`, against F.cross_entropy of the whole logits on one process."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.reference import assert_close, random
from tests.tensor.on_ranks import everywhere, traffic
from tplab import launch, record
from tplab.collectives.by_hand import rank_and_size
from tplab.memory.meter import MemoryMeter, saved_for_backward
from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy
from tplab.tensor.operators import all_gather

COLUMNS = 24  # of the whole logits, padding included
SHAPE = (3, 5)
INF, NAN = float("inf"), float("nan")


def whole_logits(shape=SHAPE) -> Tensor:
    return 3 * random((*shape, COLUMNS), "logits")


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


def ours(logits, target, dloss=None, group=None, laid_out=lambda z: z, **options):
    """This rank's loss, bit for bit that of all others, its gradient, and the traffic; what was passed in stays.

    laid_out:  gives the leaf another layout in memory
    """
    rank, p = rank_and_size(group)
    z = laid_out(shard(logits, rank, p)).requires_grad_()
    before = [z.detach().clone(), target.clone(), None if dloss is None else dloss.clone()]
    with record() as forward:
        loss = vocab_parallel_cross_entropy(z, target, group=group, **options)
    dloss = torch.ones_like(loss) if dloss is None else dloss.to(loss.dtype)
    with record() as backward:
        loss.backward(dloss)
    assert torch.equal(z.detach().nan_to_num(7), before[0].nan_to_num(7))
    assert torch.equal(target, before[1])
    assert before[2] is None or torch.equal(dloss, before[2].to(dloss.dtype))
    same = loss.detach().nan_to_num(7)
    assert all(torch.equal(same, other) for other in (all_gather(same, group) if p > 1 else []))
    return loss.detach(), z.grad, traffic(forward, backward)


def assert_equals_torchs(logits, target, dloss=None, group=None, tolerance=1e-10, **options) -> list:
    """Return the traffic."""
    loss, gradient, sent = ours(logits, target, dloss, group, **options)
    wanted = plain(logits, target, dloss, **{n: v for n, v in options.items() if n != "laid_out"})
    assert_equal((loss, gradient), wanted, group, tolerance)
    return sent


def assert_equal(found, wanted, group=None, tolerance=1e-10) -> None:
    """The loss, and this rank's shard of the gradient."""
    for got, want in zip(found, (wanted[0], shard(wanted[1], *rank_and_size(group))), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def case(shape=SHAPE, reduction="mean", vocab_size=None, ignore_index=-100, **options) -> tuple:
    """Logits, targets, upstream gradient, and the options."""
    target = targets(shape, vocab_size or COLUMNS, ignore_index)
    options |= {"reduction": reduction, "vocab_size": vocab_size, "ignore_index": ignore_index}
    return whole_logits(shape), target, random(shape if reduction == "none" else (), "dloss"), options


REDUCTIONS = ["mean", "sum", "none"]
IGNORED = torch.full(SHAPE, -100)
ONES = torch.ones(()).double().expand(SHAPE)  # strides of 0, as the gradient of sum() has


def transposed(z):
    return z.transpose(0, 1).contiguous().transpose(0, 1)


def every_second(z):
    return torch.stack([z, -z], -1).flatten(-2)[..., ::2]


def expanded(z):
    return z[:1].expand(3, -1, -1)


# vocab_size 17 ends inside the last of 2 shards and leaves the last of 4 without a column; 12 the last of 2 too
CASES = [
    case(reduction=reduction, label_smoothing=smoothing, vocab_size=vocab_size, ignore_index=ignored)
    for reduction, smoothing, vocab_size, ignored in itertools.product(
        REDUCTIONS, [0.0, 0.1, 1.0], [None, 17, 12], [-100, 3, 0]
    )
]
CASES += [case(shape, "none") for shape in [(), (1,), (7,), (2, 3, 2), (0,), (2, 0)]]
CASES += [case((0,), reduction) for reduction in REDUCTIONS]
CASES += [
    (whole_logits(), IGNORED, None, {"reduction": reduction, "label_smoothing": smoothing})
    for reduction, smoothing in itertools.product(REDUCTIONS, (0.0, 0.1))
]
CASES += [
    (whole_logits(), targets().T.contiguous().T, ONES, {"reduction": "none", "laid_out": transposed}),
    (whole_logits(), targets(), ONES, {"reduction": "none", "laid_out": every_second}),
    (whole_logits()[:1].expand(3, -1, -1), targets(), ONES, {"reduction": "none", "laid_out": expanded}),
]


def _run_all(group):
    """Every combination of options."""
    for *given, options in CASES:
        sent = assert_equals_torchs(*given, group, **options)
        n = given[1].numel()
        sums = 2 * n if options.get("reduction") == "none" else n + 1
        expected = [("all_reduce", "max", 8 * n), ("all_reduce", "sum", 8 * sums)]
        assert n == 0 or sent == [expected if rank_and_size(group)[1] > 1 else [], []]


# Extreme logits, and lower precisions


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


def _extremes(group):
    for dtype, smoothing in itertools.product((torch.float64, torch.float32), (0.0, 0.1)):
        options = {"reduction": "none", "label_smoothing": smoothing}
        tolerance = {torch.float64: 1e-10, torch.float32: 2e-6}[dtype]
        assert_equals_torchs(extreme_logits(dtype), torch.full((16,), 5), None, group, tolerance, **options)


LAST_BIT = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}


def long_logits(dtype: torch.dtype) -> Tensor:
    """So many equal logits that sums in bfloat16 would stop growing: 256 + 1 = 256."""
    logits = (random((64, 2048), "long") / 8).to(dtype)
    logits[0, 0] = 10  # the target, of a probability near 1: its gradient is a small difference
    return logits


def _lower(group):
    """Lower precisions are summed and returned in float32."""
    rank, p = rank_and_size(group)
    target = torch.arange(64) * 32
    for dtype, smoothing, reduction in itertools.product(LAST_BIT, [0.0, 0.1], ["mean", "none"]):
        options, logits = {"label_smoothing": smoothing, "reduction": reduction}, long_logits(dtype)
        loss, gradient = plain(logits.double(), target, **options)
        want = shard(gradient, rank, p).to(dtype)
        got_loss, got_gradient, sent = ours(logits, target, None, group, **options)
        assert_close(got_loss, loss.float(), 1e-6)
        torch.testing.assert_close(got_gradient, want, rtol=LAST_BIT[dtype], atol=1e-7)  # float16's least is 6e-8
        sums = 64 + 1 if reduction == "mean" else 128
        calls = [("all_reduce", "max", 64 * dtype.itemsize), ("all_reduce", "sum", 4 * sums)]
        assert sent[0] == (calls if p > 1 else [])


# Targets that are not in the vocabulary


def _wrong_targets(group):
    """With a check, the message names the first; without, loss and gradient are NaN where the target is wrong."""
    wanted = plain(whole_logits(), targets(SHAPE, 17), reduction="none", vocab_size=17)
    for spoiled in [(1, 3), (2, 4)]:
        wanted[0][spoiled] = NAN
        wanted[1][spoiled][:17] = NAN
    for wrong in [-1, 17, 24, 10**6]:
        target = targets(SHAPE, 17)
        target[1, 3] = target[2, 4] = wrong
        given, options = (whole_logits(), target, None, group), {"reduction": "none", "vocab_size": 17}
        for check in (None, True):
            with pytest.raises(IndexError) as error:
                ours(*given, check_target=check, **options)
            place = "at [1, 3] of [3, 5] is outside the vocabulary: its 17 ids are 0 to 16"
            assert str(error.value) == f"target {wrong} {place}"
        assert_equal(ours(*given, check_target=False, **options)[:2], wanted, group)


def _everything(group):
    for program in (_run_all, _extremes, _lower, _wrong_targets):
        program(group)


def test_losses_gradients_and_traffic_are_those_of_torch_for_all_options_logits_precisions_and_targets():
    loss, _ = plain(extreme_logits(torch.float64), torch.full((16,), 5), reduction="none")
    assert loss.isnan().sum() >= 5  # rows 6 to 9 and 14
    assert loss.isposinf().sum() >= 1
    everywhere(_everything)


# Memory, and a second backward

N, WIDTH = 256, 8192  # a shard of 8 MB


def _memory_and_a_second_backward():
    """Beyond the logits, only their gradient takes memory of their size. The logits stay as they are."""
    shard_bytes = 4 * N * WIDTH
    for smoothing in (0.0, 0.1):
        leaf = random((N, WIDTH), "memory", dist.get_rank(), dtype=torch.float32).requires_grad_()
        logits = leaf.view_as(leaf)  # no leaf, and its gradient goes on without a copy
        options = {"label_smoothing": smoothing, "vocab_size": 2 * WIDTH - 5}
        with MemoryMeter() as forward, saved_for_backward() as kept:
            loss = vocab_parallel_cross_entropy(logits, torch.arange(N) * 11, **options)
        with MemoryMeter() as backward:
            loss.backward(retain_graph=True)
        assert kept.bytes <= shard_bytes + 32 * N  # logits, and per token: a target in int64, two numbers in float32
        assert 0 < forward.peak < 0.25 * shard_bytes  # beside the logits: some numbers a token, a few rows at a time
        assert shard_bytes < backward.peak < 1.25 * shard_bytes
        first = leaf.grad.clone()
        (2 * loss).backward()
        assert_close(leaf.grad, 3 * first, 1e-6)


def test_beyond_the_logits_only_their_gradient_takes_memory_of_their_size():
    launch(_memory_and_a_second_backward, 2)


def test_rows_are_taken_a_few_at_a_time_and_none_is_left_out():
    logits, target = random((43, 60_000), "blocks"), torch.arange(43) * 1395
    loss, gradient = plain(logits, target, label_smoothing=0.1)
    got_loss, got_gradient, _ = ours(logits, target, label_smoothing=0.1)
    assert_close(got_loss, loss)
    torch.testing.assert_close(got_gradient, gradient, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(3, 4, dtype=torch.long)}, r"logits \[3, 5, 24\] should be \[.., v/p\], .* \[3, 4\]"),
        ({"logits": torch.tensor(1.0)}, r"logits \[\] should be"),
        ({"label_smoothing": 1.1}, "label_smoothing=1.1 is not between 0 and 1"),
        ({"reduction": "average"}, "reduction='average' is not one of 'mean', 'sum', 'none'"),
        ({"vocab_size": 25}, "vocab_size=25 doesn't fit 1 ranks with 24 columns each"),
        ({"vocab_size": 0}, "vocab_size=0 doesn't fit"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        vocab_parallel_cross_entropy(**{"logits": whole_logits(), "target": targets(), **change})
