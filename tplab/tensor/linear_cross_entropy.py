"""Chapter 08: the output layer fused with its loss, in blocks of tokens, so that all logits never exist at once.

With the loss of `tplab.tensor.cross_entropy`, a rank needs memory for one or two shards of logits, [n, v/p]. For a
vocabulary of 128256, 8 ranks and 8192 tokens in bfloat16, each shard takes 263 MB. Only the loss reads the logits, so
they can be computed, used and discarded in blocks of tokens:

    for each block X_b [c, h]      Z = X_b E_r^T [c, v/p],   its loss, and dZ over Z        (two all-reduces, 2 c + 1)
                                   dX_b = dZ E_r [c, h],     dE_r += dZ^T X_b [v/p, h]

So the gradients are ready at the end of forward. The backward pass multiplies them by dloss and, to apply f, sums dX
over the ranks. Like the unfused version, this takes three matmuls, and the traffic is the same except for one more
value per block. Each block reads and writes dE_r once, so very small blocks are slow.

    memory beyond x, E_r, their gradients:     c v/p  instead of  n v/p       (with the exponentials in float32)

float16 is refused for training, because its smallest numbers are so large that dZ = (softmax - 1[t]) / n would become
zero. Training in float16 multiplies the loss by a scale to prevent that, but the scale only reaches backward.
(Hsu et al. 2024, "Liger Kernel", section 3.2, on one GPU; here the loss is computed on several ranks.)
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.cross_entropy import Options, Targets, forward_of_rows, gradient_of_rows, loss_of, sum_dtype
from tplab.tensor.embedding import vocabulary
from tplab.tensor.id_check import integers
from tplab.tensor.operators import needs_gradient
from tplab.tensor.region import in_autocast_dtype


def parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    vocab_size: int | None = None,
    tokens_at_once: int | None = None,
    sum_gradient: bool = True,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Compute vocab_parallel_cross_entropy(parallel_logits(x, weight), target) for x [.., h] and weight [v/p, h].

    tokens_at_once    c, the number of tokens per block; None: `default_tokens_at_once`
    vocab_size        number of ids that aren't padding; None: the number in the mark `weight.tensor_parallel`, or, if
                      there is no mark, all ids
    sum_gradient      False: don't apply f, so that dx is only this rank's term and an earlier operator has to sum it
    The result is as in `vocab_parallel_cross_entropy` with its default options, so it's a mean, tokens with the target
    -100 don't count, and another target outside the vocabulary raises IndexError or, on a GPU, stops the process.

    The weight's gradient is summed over the blocks in the weight's dtype (under autocast, in the lower precision). A
    second backward pass raises RuntimeError, because the first one multiplies the saved gradients in place. Raises
    ValueError for training in float16.
    """
    if x.shape[:-1] != target.shape or x.shape[-1:] != weight.shape[1:]:
        shapes = f"x {list(x.shape)}, weight {list(weight.shape)} and target {list(target.shape)}"
        raise ValueError(f"{shapes} should be [.., h], [v/p, h] and [..]")
    tokens_at_once = default_tokens_at_once(len(weight), x.device) if tokens_at_once is None else tokens_at_once
    if tokens_at_once < 1:
        raise ValueError(f"tokens_at_once={tokens_at_once}: a block has at least one token")
    vocab_size = vocabulary("weight", weight, 0, vocab_size, group)
    options = Options(-100, "mean", vocab_size, start=rank_and_size(group)[0] * len(weight))
    targets = Targets.of(integers("target", target), len(weight), options)
    x, weight = in_autocast_dtype(x, weight)
    # must be known before forward, where grad mode is always off; parameters require gradients even in evaluation
    needed = needs_gradient(x), needs_gradient(weight)
    if any(needed) and weight.dtype == torch.float16:
        raise ValueError(
            "in float16, these gradients would be rounded to zero: train in bfloat16, or scale the loss that "
            "vocab_parallel_cross_entropy computes from parallel_logits"
        )
    with torch.autocast(x.device.type, enabled=False):
        return _LinearCrossEntropy.apply(x, weight, *targets, options, tokens_at_once, needed, sum_gradient, group)


def default_tokens_at_once(columns: int, device: torch.device) -> int:
    """Return the number of tokens per block for a shard of `columns` = v/p ids on this device.

    A block has about 4 million logits on a CPU and 34 million on a GPU, but never fewer than 512 tokens. Larger blocks
    need more memory. Smaller blocks need more all-reduces, each of which waits for the slowest rank. On a GPU, they
    also give its kernels less work than it takes to launch them: on an H200, blocks of 512 tokens and 16384 ids took
    four times as long as blocks of 4096 tokens.
    """
    return max(512, (2**25 if device.type == "cuda" else 2**22) // columns)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, column: Tensor, foreign: Tensor, counts: Tensor, options: Options,
        tokens_at_once: int, needed: Sequence[bool], sum_gradient: bool, group: ProcessGroup | None,
    ) -> Tensor:  # fmt: skip
        rows, targets = x.reshape(-1, x.shape[-1]), Targets(column, foreign, counts)
        ctx.shape, ctx.sum_gradient, ctx.group = x.shape, sum_gradient, group
        loss, dx, dw = _in_blocks(rows, weight, targets, options, tokens_at_once, needed, group)
        ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple:
        dx, dw = ctx.saved_tensors
        for gradient in (dx, dw):
            if gradient is not None:
                gradient.mul_(dloss)
        if dx is not None:
            if ctx.sum_gradient and rank_and_size(ctx.group)[1] > 1:
                dist.all_reduce(dx, group=ctx.group)
            dx = dx.view(ctx.shape)
        return dx, dw, None, None, None, None, None, None, None, None


def _in_blocks(
    rows: Tensor, weight: Tensor, targets: Targets, options: Options, tokens_at_once: int,
    needed: Sequence[bool], group: ProcessGroup | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the loss of x [n, h] and, if they are `needed`, its gradients dx [n, h] (partial) and dw [v/p, h]."""
    need_dx, need_dw = needed
    dx = torch.empty_like(rows, memory_format=torch.contiguous_format) if need_dx else None
    dw: Tensor | None = None
    logits = rows.new_empty(min(tokens_at_once, len(rows)), len(weight))  # [c, v/p], memory reused by all blocks
    exponentials = logits if logits.dtype == sum_dtype(logits) else None  # other dtypes would round them
    if need_dx or need_dw:
        exponentials = torch.empty_like(logits, dtype=sum_dtype(logits)) if exponentials is None else exponentials
        dlosses, shifts = targets.gradients(targets.counted().to(sum_dtype(logits)).reciprocal())
    sums = []
    for first in range(0, max(1, len(rows)), tokens_at_once):
        block = slice(first, first + tokens_at_once)
        z = torch.mm(rows[block], weight.T, out=logits[: len(rows[block])])  # [c, v/p]
        kept = None if exponentials is None else exponentials[: len(z)]
        sum_exp, aimed, base, divisor = forward_of_rows(z, targets.of_rows(block), options, group, kept)
        sums.append((sum_exp, aimed))
        if not (need_dx or need_dw):
            continue
        of_tokens = targets.column[block], base, divisor, dlosses[block], shifts[block]
        gradient_of_rows(z, z, kept, *of_tokens, options)  # now z contains dz
        if dx is not None:
            torch.mm(z, weight, out=dx[block])  # [c, h], partial
        if need_dw:
            dw = z.T @ rows[block] if dw is None else dw.addmm_(z.T, rows[block])
    sum_exp, aimed = map(torch.cat, zip(*sums, strict=True))
    return loss_of(sum_exp, aimed, targets, options), dx, dw
