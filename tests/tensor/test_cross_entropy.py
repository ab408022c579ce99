"""vocab_parallel_cross_entropy: `tensor.cross_entropy`, against F.cross_entropy of the whole logits on one process."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests import saying
from tests.reference import assert_close, random
from tests.tensor.on_ranks import assert_refuses, everywhere, traffic
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


def ours(logits, target, dloss=None, group=None, **options):
    """This rank's loss, bit for bit that of all others, its gradient, and the traffic; what was passed in stays."""
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
    same = loss.detach().nan_to_num(7)
    assert all(torch.equal(same, other) for other in (all_gather(same, group) if p > 1 else []))
    return loss.detach(), z.grad, traffic(forward, backward)


def assert_equals_torchs(logits, target, dloss=None, group=None, tolerance=1e-10, **options) -> list:
    """The loss, and this rank's shard of the gradient. Return the traffic."""
    *found, sent = ours(logits, target, dloss, group, **options)
    loss, gradient = plain(logits, target, dloss, **options)
    for got, want in zip(found, (loss, shard(gradient, *rank_and_size(group))), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    return sent


def case(shape=SHAPE, reduction="mean", vocab_size=None, ignore_index=-100) -> tuple:
    """Logits, targets, upstream gradient, and the options."""
    target = targets(shape, vocab_size or COLUMNS, ignore_index)
    options = {"reduction": reduction, "vocab_size": vocab_size, "ignore_index": ignore_index}
    return whole_logits(shape), target, random(shape if reduction == "none" else (), "dloss"), options


REDUCTIONS = ["mean", "sum", "none"]
IGNORED = torch.full(SHAPE, -100)
ONES = torch.ones(()).double().expand(SHAPE)  # strides of 0, as the gradient of sum() has

# vocab_size 17 ends inside the last of 2 shards and leaves the last of 4 without a column; 12 the last of 2 too
CASES = [
    case(reduction=reduction, vocab_size=vocab_size, ignore_index=ignored)
    for reduction, vocab_size, ignored in itertools.product(REDUCTIONS, [None, 17, 12], [-100, 3])
]
CASES += [case(shape, "none") for shape in [(), (7,), (2, 3, 2)]]
CASES += [case((0,), reduction) for reduction in REDUCTIONS]
CASES += [(whole_logits(), IGNORED, None, {"reduction": reduction}) for reduction in REDUCTIONS]
CASES += [(whole_logits(), targets().T.contiguous().T, ONES, {"reduction": "none"})]


def _run_all(group):
    """Every combination of options."""
    for *given, options in CASES:
        sent = assert_equals_torchs(*given, group, **options)
        n = given[1].numel()
        sums = 2 * n if options.get("reduction") == "none" else n + 1
        expected = [("all_reduce", "max", 8 * n), ("all_reduce", "sum", 8 * sums)]
        assert n == 0 or sent == [expected if rank_and_size(group)[1] > 1 else [], []]


# Extreme logits, and a lower precision


def extreme_logits(dtype: torch.dtype) -> Tensor:
    """[rows, 24]; shards of 12 and of 6 with their own troubles."""
    base = random((11, COLUMNS), "extreme").to(dtype)
    base[0] *= 1e4
    base[1] += 1e4
    base[2] = torch.finfo(dtype).max / 4 * torch.sign(base[2])
    base[3, :12] = -INF  # all of rank 0's
    base[4, 12:] = -INF
    base[5] = -INF  # no token possible at all
    base[6, [0, 12]] = INF
    base[7, 20] = NAN
    base[8, 5] = -INF  # the target itself
    base[9, 12:] += 1e4  # another shard is far above the target's
    base[10, :6] = -1e4
    base[10, 6:] = -INF  # the finite shard is far below zero
    return base


def _extremes(group):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-6)):
        target = torch.full((11,), 5)
        assert_equals_torchs(extreme_logits(dtype), target, None, group, tolerance, reduction="none")


def _lower(group):
    """In bfloat16, numbers are summed and returned in float32: a sum in bfloat16 stops growing at 256 + 1 = 256."""
    rank, p = rank_and_size(group)
    logits, target = (random((64, 2048), "long") / 8).bfloat16(), torch.arange(64) * 32
    loss, gradient = plain(logits.double(), target)
    got_loss, got_gradient, sent = ours(logits, target, None, group)
    assert_close(got_loss, loss.float(), 1e-6)
    torch.testing.assert_close(got_gradient, shard(gradient, rank, p).bfloat16(), rtol=2**-7, atol=1e-7)
    assert sent[0] == ([("all_reduce", "max", 64 * 2), ("all_reduce", "sum", 4 * 65)] if p > 1 else [])


# Targets that are not in the vocabulary


def _wrong_targets(group):
    for wrong in [-1, 17, 24, 10**6]:
        target = targets(SHAPE, 17)
        target[1, 3] = wrong
        says = saying(f"target {wrong} ", "[1, 3]", "[3, 5]", "17 ids", " 0 ", " 16")
        with pytest.raises(IndexError, match=says):
            ours(whole_logits(), target, None, group, vocab_size=17)


def _everything(group):
    for program in (_run_all, _extremes, _lower, _wrong_targets):
        program(group)


def test_losses_gradients_and_traffic_are_those_of_torch_for_all_options_logits_precisions_and_targets():
    everywhere(_everything)


# Memory

N, WIDTH = 256, 8192  # a shard of 8 MB


def _memory():
    """Beyond the logits, only their gradient takes memory of their size."""
    shard_bytes = 4 * N * WIDTH
    leaf = random((N, WIDTH), "memory", dist.get_rank(), dtype=torch.float32).requires_grad_()
    logits = leaf.view_as(leaf)  # no leaf, and its gradient goes on without a copy
    with MemoryMeter() as forward, saved_for_backward() as kept:
        loss = vocab_parallel_cross_entropy(logits, torch.arange(N) * 11, vocab_size=2 * WIDTH - 5)
    with MemoryMeter() as backward:
        loss.backward()
    assert kept.bytes <= shard_bytes + 32 * N  # logits, and per token: a target in int64, two numbers in float32
    assert 0 < forward.peak < 0.25 * shard_bytes  # beside the logits: some numbers a token, a few rows at a time
    assert shard_bytes < backward.peak < 1.25 * shard_bytes


def test_beyond_the_logits_only_their_gradient_takes_memory_of_their_size():
    launch(_memory, 2)


def test_rows_are_taken_a_few_at_a_time_and_none_is_left_out():
    logits, target = random((43, 60_000), "blocks"), torch.arange(43) * 1395
    loss, gradient = plain(logits, target)
    got_loss, got_gradient, _ = ours(logits, target)
    assert_close(got_loss, loss)
    torch.testing.assert_close(got_gradient, gradient, rtol=1e-9, atol=1e-15)


def test_what_does_not_fit_is_refused_with_the_numbers():
    logits, target = whole_logits(), targets()
    assert_refuses(
        (lambda: vocab_parallel_cross_entropy(logits, target[:, :4]), "logits [3, 5, 24]", "v/p", "target [3, 4]"),
        (lambda: vocab_parallel_cross_entropy(logits, target, vocab_size=25), "vocab_size=25", "1 ranks", "24 columns"),
    )
