"""parallel_linear_cross_entropy: `tensor.linear_cross_entropy`, against a matmul and F.cross_entropy on one process."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests import saying
from tests.reference import assert_close, random
from tests.tensor.on_ranks import assert_refuses, everywhere, traffic
from tplab import launch, record
from tplab.collectives.by_hand import rank_and_size
from tplab.memory.meter import MemoryMeter, saved_for_backward
from tplab.tensor.linear_cross_entropy import parallel_linear_cross_entropy

COLUMNS, HIDDEN, SHAPE = 24, 6, (3, 5)
N = 15
CASES = [(None, 4), (17, 4), (None, 1), (None, 15), (None, 512)]  # vocab_size and tokens at once; 4 leaves a rest
ONE = torch.tensor(1.0, dtype=torch.float64)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return random((*SHAPE, HIDDEN), "x").to(dtype), random((COLUMNS, HIDDEN), "weight").to(dtype)


def targets(vocab_size: int | None = None) -> Tensor:
    flat = torch.arange(N) * 7 % (vocab_size or COLUMNS)
    flat[2::7] = -100
    return flat.view(SHAPE)


def plain(x: Tensor, weight: Tensor, target: Tensor, dloss: Tensor = ONE, vocab_size: int | None = None):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = (x @ weight.T)[..., :vocab_size].flatten(0, -2)
    loss = F.cross_entropy(logits, target.flatten())
    loss.backward(dloss.to(loss.dtype))
    return loss.detach(), x.grad, weight.grad


def ours(x: Tensor, weight: Tensor, target: Tensor, dloss: Tensor = ONE, group=None, **options):
    """The loss, the gradients of x and of this rank's shard of the weight, and the traffic."""
    rank, p = rank_and_size(group)
    x, weight = x.clone().requires_grad_(), weight.chunk(p)[rank].clone().requires_grad_()
    before = x.detach().clone(), weight.detach().clone(), target.clone()
    with record() as forward:
        loss = parallel_linear_cross_entropy(x, weight, target, group=group, **options)
    with record() as backward:
        loss.backward(dloss.to(loss.dtype))
    assert all(torch.equal(one, other) for one, other in zip(before, (x, weight, target), strict=True))
    return loss.detach(), x.grad, weight.grad, traffic(forward, backward)


def assert_equal(found, wanted, group=None, tolerance: float = 1e-10) -> None:
    """The loss, the gradient of x, and this rank's shard of that of the weight."""
    rank, p = rank_and_size(group)
    loss, dx, dweight = wanted
    for got, want in zip(found, (loss, dx, dweight.chunk(p)[rank]), strict=False):
        assert_close(got, want, tolerance)


def _all_cases(group):
    several = rank_and_size(group)[1] > 1
    for vocab_size, block in CASES:
        given = *inputs(), targets(vocab_size), random((), "dloss")
        found = ours(*given, group, tokens_at_once=block, vocab_size=vocab_size)
        assert_equal(found, plain(*given, vocab_size), group)
        tokens = [min(block, N - first) for first in range(0, N, block)]
        sent = [call for n in tokens for call in (("all_reduce", "max", 8 * n), ("all_reduce", "sum", 8 * (n + 1)))]
        assert found[3] == ([sent, [("all_reduce", "sum", 8 * N * HIDDEN)]] if several else [[], []])


def test_loss_gradients_and_traffic():
    everywhere(_all_cases)


# On two ranks


def _frozen_and_ignored():
    x, weight = inputs()
    loss, dx, dw = plain(x, weight, targets())
    rank = dist.get_rank()
    mine = weight.chunk(2)[rank]
    frozen_weight = x.clone().requires_grad_()
    with saved_for_backward() as kept:
        of_x = parallel_linear_cross_entropy(frozen_weight, mine, targets(), tokens_at_once=4)
    of_x.backward()
    assert kept.bytes == x.numel() * 8  # dX, and no dW
    assert_close(frozen_weight.grad, dx)
    frozen_x = mine.clone().requires_grad_()
    with record() as sent:
        parallel_linear_cross_entropy(x, frozen_x, targets(), tokens_at_once=4).backward()
    assert len(sent) == 2 * 4  # dX isn't wanted, so it isn't sent
    assert_close(frozen_x.grad, dw.chunk(2)[rank])
    of_none, dx, dw, _ = ours(x, weight, torch.full(SHAPE, -100))
    assert of_none.isnan()
    assert not dx.any()
    assert not dw.any()


def _lower_precisions():
    """In float32 and bfloat16; then float32 and bfloat16 inputs under autocast, with a weight in float32."""
    cases = [(torch.float32, torch.float32, False, 1e-5), (torch.bfloat16, torch.bfloat16, False, 2**-5)]
    cases += [(torch.float32, torch.float32, True, 2**-6), (torch.bfloat16, torch.float32, True, 2**-6)]
    for dtype, weight_dtype, cast, tolerance in cases:
        x, weight = inputs(dtype)[0], inputs(weight_dtype)[1]
        with torch.autocast("cpu", torch.bfloat16) if cast else nullcontext():
            found = ours(x, weight, targets(), tokens_at_once=4)
        loss, dx, dw = plain(x.double(), weight.double(), targets())
        assert_equal(found, (loss.float(), dx.to(dtype), dw.to(weight_dtype)), None, tolerance)


def _wrong_target():
    target = targets()
    target[1, 3] = COLUMNS
    with pytest.raises(IndexError, match=saying("target 24 ", "[1, 3]", "[3, 5]", "24 ids", " 0 ", " 23")):
        ours(*inputs(), target, tokens_at_once=4)


def test_training_takes_three_matmuls_and_evaluation_one():
    for context, number in ((nullcontext, 3), (torch.no_grad, 1)):
        x, weight = (tensor.requires_grad_() for tensor in inputs())
        with context(), FlopCounterMode(display=False) as flops:
            loss = parallel_linear_cross_entropy(x, weight, targets())  # in one block
            if loss.requires_grad:
                loss.backward()
        assert flops.get_total_flops() / (2 * x.numel() * len(weight)) == number


TOKENS, WIDTH, BLOCK = 320, 16384, 64  # all logits of a rank: 21 MB; those of a block: 4 MB


def _memory():
    """There are never more logits than those of a block, and a second backward is refused.

    The exponentials are float32. They're written over float32 logits, and beside bfloat16 logits.
    """
    for dtype, bytes_per_logit in ((torch.float32, 4), (torch.bfloat16, 2 + 4)):
        x = random((TOKENS, 8), "x", dtype=dtype).requires_grad_()
        weight = random((WIDTH, 8), "weight", dist.get_rank(), dtype=dtype).requires_grad_()
        target = torch.arange(TOKENS) * 99
        with MemoryMeter() as meter, saved_for_backward() as kept:
            loss = parallel_linear_cross_entropy(x, weight, target, tokens_at_once=BLOCK)
            loss.backward()
        inputs_and_gradients = 2 * dtype.itemsize * 8 * (TOKENS + WIDTH)
        of_a_block = bytes_per_logit * BLOCK * WIDTH
        assert kept.bytes == inputs_and_gradients / 2  # the gradients
        assert meter.peak < inputs_and_gradients + 1.1 * of_a_block  # and a few values per token
        loss = parallel_linear_cross_entropy(x, weight, target, tokens_at_once=BLOCK)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def _on_two_ranks():
    _frozen_and_ignored()
    _lower_precisions()
    _wrong_target()
    _memory()


def test_frozen_inputs_precisions_wrong_targets_and_memory():
    launch(_on_two_ranks, 2)


def test_what_does_not_fit_is_refused_with_the_numbers():
    (x, weight), loss = inputs(), parallel_linear_cross_entropy
    assert_refuses(
        (lambda: loss(x, weight, targets()[:2]), "x [3, 5, 6]", "weight [24, 6]", "target [2, 5]"),
        (lambda: loss(x, weight, targets(), vocab_size=25), "vocab_size=25", "1 ranks", "24 columns"),
    )


@pytest.mark.parametrize("autocast", [False, True])
def test_float16_is_refused_for_training_and_can_be_evaluated(autocast):
    x, weight = inputs(torch.float32 if autocast else torch.float16)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        with pytest.raises(ValueError, match=saying("float16", "bfloat16")):
            parallel_linear_cross_entropy(x.requires_grad_(), weight, targets())
        with torch.no_grad():
            loss = parallel_linear_cross_entropy(x, weight, targets())
    assert float(loss) == pytest.approx(float(plain(*inputs(), targets())[0]), rel=2e-3)
