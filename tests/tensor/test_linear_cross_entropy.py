"""parallel_linear_cross_entropy: `tensor.linear_cross_entropy`, against a matmul and F.cross_entropy on one process."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.reference import assert_close, random
from tests.tensor.on_ranks import on_ranks, refusals, results_of, traffic
from tplab import launch, record
from tplab.collectives.by_hand import rank_and_size
from tplab.memory.meter import MemoryMeter, saved_for_backward
from tplab.tensor.linear_cross_entropy import default_tokens_at_once, parallel_linear_cross_entropy

COLUMNS, HIDDEN, SHAPE = 24, 6, (3, 5)
N = 15
OPTIONS = [
    dict(zip(("reduction", "label_smoothing", "vocab_size", "ignore_index"), values, strict=True))
    for values in itertools.product(["mean", "sum"], [0.0, 0.1], [None, 17], [-100, 3])
]
BLOCKS = [1, 4, 15, 512]  # tokens at once: 4 leaves a rest


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return random((*SHAPE, HIDDEN), "x").to(dtype), random((COLUMNS, HIDDEN), "weight").to(dtype)


def targets(vocab_size: int | None, ignore_index: int = -100) -> Tensor:
    flat = torch.arange(N) * 7 % (vocab_size or COLUMNS)
    flat[2::7] = ignore_index
    return flat.view(SHAPE)


ONE = torch.tensor(1.0, dtype=torch.float64)


def plain(x: Tensor, weight: Tensor, target: Tensor, dloss: Tensor = ONE, vocab_size: int | None = None, **options):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = (x @ weight.T)[..., :vocab_size].flatten(0, -2)
    loss = F.cross_entropy(logits, target.flatten(), **options)
    loss.backward(dloss.to(loss.dtype))
    return loss.detach(), x.grad, weight.grad


def ours(x: Tensor, weight: Tensor, target: Tensor, dloss: Tensor = ONE, group=None, **options):
    rank, p = rank_and_size(group)
    x, weight = x.clone().requires_grad_(), weight.chunk(p)[rank].clone().requires_grad_()
    before = x.detach().clone(), weight.detach().clone(), target.clone()
    with record() as forward:
        loss = parallel_linear_cross_entropy(x, weight, target, group=group, **options)
    with record() as backward:
        loss.backward(dloss.to(loss.dtype))
    assert all(torch.equal(one, other) for one, other in zip(before, (x, weight, target), strict=True))
    return loss.detach(), x.grad, weight.grad, traffic(forward, backward)


def assert_equals(results, loss: Tensor, dx: Tensor, dweight: Tensor, tolerance: float = 1e-10) -> None:
    """Every rank has the loss, the gradient of x and its shard of that of the weight."""
    for rank, (got_loss, got_dx, got_dweight, *_) in enumerate(results):
        assert_close(got_loss, loss, tolerance)
        assert_close(got_dx, dx, tolerance)
        assert_close(got_dweight, dweight.chunk(len(results))[rank], tolerance)


def _all_options(group):
    outcomes = []
    for options, block in itertools.product(OPTIONS, BLOCKS):
        target = targets(options["vocab_size"], options["ignore_index"])
        outcomes.append(ours(*inputs(), target, random((), "dloss"), group, tokens_at_once=block, **options))
    return outcomes


@on_ranks
def test_loss_gradients_and_traffic_for_every_combination_of_options(p, in_groups):
    for results in results_of(_all_options, p, in_groups):
        for number, (options, block) in enumerate(itertools.product(OPTIONS, BLOCKS)):
            target = targets(options["vocab_size"], options["ignore_index"])
            sent = []
            for first in range(0, N, block):
                tokens = min(block, N - first)
                sent += [("all_reduce", "max", 8 * tokens), ("all_reduce", "sum", 8 * (tokens + 1))]
            wanted = plain(*inputs(), target, random((), "dloss"), **options)
            assert_equals([result[number] for result in results], *wanted)
            expected = [sent, [("all_reduce", "sum", 8 * N * HIDDEN)]] if len(results) > 1 else [[], []]
            assert all(result[number][3] == expected for result in results)


def _blocks_that_are_sent():
    found = []
    for columns in (8192, 1024):
        x, weight = torch.zeros(1025, 2), torch.zeros(columns, 2)
        with record() as sent:
            parallel_linear_cross_entropy(x, weight, torch.zeros(1025, dtype=torch.long))
        found.append(len(sent))
    return found


def test_ranks_send_twice_per_default_block_of_4_or_34_million_logits_or_512_tokens():
    assert launch(_blocks_that_are_sent, 2) == [[2 * 3, 2]] * 2
    sizes = {("cpu", 1024): 4096, ("cpu", 16032): 512, ("cuda", 16384): 2048, ("cuda", 2**18): 512}
    for (device, columns), tokens in sizes.items():
        assert default_tokens_at_once(columns, torch.device(device)) == tokens


def _odd_inputs():
    x, weight = inputs()
    mine = weight.chunk(2)[dist.get_rank()]
    transposed = x.transpose(0, 1).contiguous().requires_grad_()  # its transpose is x, not contiguous
    parallel_linear_cross_entropy(transposed.transpose(0, 1), mine, targets(None), tokens_at_once=4).backward()
    frozen_weight = x.clone().requires_grad_()
    with saved_for_backward() as kept:
        loss = parallel_linear_cross_entropy(frozen_weight, mine, targets(None), tokens_at_once=4)
    loss.backward()
    assert kept.bytes == x.numel() * 8  # dX, and no dW
    frozen_x = mine.clone().requires_grad_()
    with record() as sent:
        parallel_linear_cross_entropy(x, frozen_x, targets(None), tokens_at_once=4).backward()
    with torch.no_grad():
        loss = parallel_linear_cross_entropy(x, mine, targets(None), tokens_at_once=4)
    empty = ours(x[:0], weight, targets(None)[:0], reduction="sum")
    ignored = ours(x, weight, torch.full(SHAPE, -100))
    gradients = transposed.grad.transpose(0, 1).contiguous(), frozen_weight.grad, frozen_x.grad
    return gradients, loss, len(sent), empty, ignored


def test_strided_frozen_empty_and_ignored_inputs_give_what_torch_gives():
    loss, dx, dw = plain(*inputs(), targets(None))
    for rank, (gradients, got_loss, sent, empty, ignored) in enumerate(launch(_odd_inputs, 2)):
        for got, want in zip(gradients, (dx, dx, dw.chunk(2)[rank]), strict=True):
            assert_close(got, want)
        assert_close(got_loss, loss)
        assert sent == 2 * 4  # dX isn't wanted, so it isn't sent
        assert empty[0] == 0
        assert empty[1].shape == (0, 5, HIDDEN)
        assert not empty[2].any()
        assert ignored[0].isnan()
        assert not ignored[1].any()
        assert not ignored[2].any()


def _lower():
    """In float32 and bfloat16; then float32 and bfloat16 inputs under autocast, with a weight in float32."""
    found = [ours(*inputs(dtype), targets(None), tokens_at_once=4) for dtype in (torch.float32, torch.bfloat16)]
    x, weight = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        return found + [ours(given, weight, targets(None), tokens_at_once=4) for given in (x, x.bfloat16())]


def test_lower_precisions_differ_by_rounding_and_gradients_have_the_dtypes_of_the_inputs():
    results = launch(_lower, 2)
    cases = [(torch.float32, torch.float32, 1e-5), (torch.bfloat16, torch.bfloat16, 2**-5)]
    cases += [(torch.float32, torch.float32, 2**-6), (torch.bfloat16, torch.float32, 2**-6)]
    for number, (dtype, weight_dtype, tolerance) in enumerate(cases):
        x, weight = inputs(dtype)[0], inputs(weight_dtype)[1]
        loss, dx, dw = plain(x.double(), weight.double(), targets(None))
        wanted = loss.float(), dx.to(dtype), dw.to(weight_dtype)
        assert_equals([result[number] for result in results], *wanted, tolerance)


SCALED = [(2048, 4096, 2.0**16), (2048, 4096, 2.0**20), (1, 64, 1.0), (1, 64, 2.0**8)]  # tokens, ids, loss scale


def _scaled_inputs(tokens, ids):
    return random((tokens, 16), "x"), random((ids, 16), "w") / 8, torch.arange(tokens) * 7 % ids


def _with_a_loss_scale(dtype):
    """Gradients of two micro-batches, divided by the scale at last, as `torch.amp.GradScaler` does it."""
    rank, p = rank_and_size()
    found = []
    for tokens, ids, scale in SCALED:
        x, weight, target = _scaled_inputs(tokens, ids)
        x, weight = x.float().requires_grad_(), weight.chunk(p)[rank].float().requires_grad_()
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                loss = parallel_linear_cross_entropy(x, weight, target)
            (loss * scale / 2).backward()
        found.append((x.grad / scale, weight.grad / scale))
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_gradients_of_a_scaled_loss_do_not_vanish_in_float16(dtype, tolerance):
    results = launch(_with_a_loss_scale, 2, args=(dtype,))
    for number, (tokens, ids, _) in enumerate(SCALED):
        _, dx, dweight = plain(*_scaled_inputs(tokens, ids))
        for rank, result in enumerate(results):
            for got, want in zip(result[number], (dx, dweight.chunk(2)[rank]), strict=True):
                assert (got - want).norm() < tolerance * want.norm()


def test_in_float16_a_second_backward_gives_the_same():
    x, weight = (tensor.half().requires_grad_() for tensor in inputs())
    loss = parallel_linear_cross_entropy(x, weight, targets(None))
    first, second = (torch.autograd.grad(loss, (x, weight), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    ("dtype", "matmuls"),
    [
        (torch.float64, {"training": 3, "frozen table": 2, "no_grad": 1, "inference_mode": 1}),
        (torch.float16, {"training": 4, "no_grad": 1}),
    ],
)
def test_training_takes_three_matmuls_in_float16_four_and_evaluation_one(dtype, matmuls):
    for name, number in matmuls.items():
        x, weight = (tensor.to(dtype).requires_grad_() for tensor in inputs())
        weight.requires_grad_(name != "frozen table")
        context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(name, nullcontext)
        with context(), FlopCounterMode(display=False) as flops:
            loss = parallel_linear_cross_entropy(x, weight, targets(None))  # in one block
            if loss.requires_grad:
                loss.backward()
        assert flops.get_total_flops() / (2 * x.numel() * len(weight)) == number, name


TOKENS, WIDTH, BLOCK = 320, 16384, 64  # all logits of a rank: 21 MB; those of a block: 4 MB


def _memory(dtype):
    x = random((TOKENS, 8), "x", dtype=dtype).requires_grad_()
    weight = random((WIDTH, 8), "weight", dist.get_rank(), dtype=dtype).requires_grad_()
    target = torch.arange(TOKENS) * 99
    with MemoryMeter() as meter, saved_for_backward() as kept:
        loss = parallel_linear_cross_entropy(x, weight, target, tokens_at_once=BLOCK)
        loss.backward()
    loss = parallel_linear_cross_entropy(x, weight, target, tokens_at_once=BLOCK)
    loss.backward(retain_graph=True)
    return meter.peak, kept.bytes, refusals(loss.backward, kind=RuntimeError)


@pytest.mark.parametrize(("dtype", "bytes_per_logit"), [(torch.float32, 4), (torch.bfloat16, 2 + 4)])
def test_there_are_never_more_logits_than_those_of_a_block_and_a_second_backward_is_refused(dtype, bytes_per_logit):
    """The exponentials are float32. They're written over float32 logits, and beside bfloat16 logits."""
    inputs_and_gradients = 2 * dtype.itemsize * 8 * (TOKENS + WIDTH)
    of_a_block = bytes_per_logit * BLOCK * WIDTH
    for peak, kept, (second,) in launch(_memory, 2, args=(dtype,)):
        assert kept == inputs_and_gradients / 2  # the gradients
        assert peak < inputs_and_gradients + 1.1 * of_a_block  # and a few values per token
        assert "modified by an inplace operation" in second


def _wrong_target():
    target = targets(None)
    target[1, 3] = COLUMNS

    def run(check_target):
        return ours(*inputs(), target, reduction="sum", tokens_at_once=4, check_target=check_target)

    return refusals(lambda: run(None), kind=IndexError), run(False)


def test_a_target_outside_the_vocabulary_raises_with_its_place_or_costs_nan():
    for messages, (loss, dx, dw, _) in launch(_wrong_target, 2):
        assert messages == ["target 24 at [1, 3] of [3, 5] is outside the vocabulary: its 24 ids are 0 to 23"]
        assert loss.isnan()
        assert dx[1, 3].isnan().all()
        assert int(dx.isnan().any(-1).sum()) == 1
        assert dw.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": targets(None)[:2]}, r"x \[3, 5, 6\], weight \[24, 6\] and target \[2, 5\] should be"),
        ({"weight": torch.ones(24, 5)}, r"weight \[24, 5\] .* should be \[.., h\], \[v/p, h\] and \[..\]"),
        ({"reduction": "none"}, "reduction='none' is not one of 'mean', 'sum'"),
        ({"tokens_at_once": 0}, "tokens_at_once=0: a block has at least one token"),
        ({"vocab_size": 25}, "vocab_size=25 doesn't fit 1 ranks with 24 columns each"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(change, message):
    x, weight = inputs()
    with pytest.raises(ValueError, match=message):
        parallel_linear_cross_entropy(**{"x": x, "weight": weight, "target": targets(None), **change})
