"""Chapter 08: cross-entropy over a vocabulary that is sharded over the ranks.

The loss of a token with target t and logits z_1 .. z_v (v/p on each rank) needs three values from all ranks:

    loss = log(sum_i exp(z_i - m)) - (z_t - m)        m = max_i z_i

    m      largest of the ranks' maxima        all-reduce (max), one value per token
    S      sum of exp(z_i - m)                 all-reduce (sum), one value per token
    z_t    known only to the rank that has t   all-reduce (sum), one value per token

The last two values are sums, so they share one all-reduce. A mean over tokens is linear in z_t. So instead of one value
of z_t - m per token, the ranks send only the *total* over all tokens. Compare the traffic for n = b s tokens with that
of the naive implementation:

    gather the logits, then F.cross_entropy     n v elements
    here, reduction="none"                      n (max) + 2 n (sums)
    here, reduction="mean" or "sum"             n (max) + n + 1 (sums)

Maxima are sent in the dtype of the logits, which represents them exactly. Sums are computed and sent in float32 (or in
float64, if the logits are float64).

Each rank works on a few rows at a time, so that they stay in the cache. For each row, it finds the maximum m_r of its
own shard and sums exp(z_i - m_r). Once m is known, it multiplies the sum by exp(m_r - m). So the logits are read from
memory only once, and no tensor of their size is allocated. On a GPU, a block of rows is as large as 2^25 logits.

The backward pass sends nothing, because S and m are known: dz_i = (exp(z_i - m) / S - 1[i = t]) dloss. Autograd saves
the logits and five values per token, and the gradient needs as much memory as the logits.
`tplab.tensor.linear_cross_entropy` needs neither. (Shoeybi et al. 2019, "Megatron-LM", section 3; Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax"; Megatron: vocab_parallel_cross_entropy.)
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.embedding import vocabulary
from tplab.tensor.id_check import integers, outside, raise_first

Reduction = Literal["mean", "sum", "none"]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    vocab_size: int | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Compute `F.cross_entropy` from this rank's logits [.., v/p] and the targets' ids in the full vocabulary, [..].

    ignore_index, reduction    as in F.cross_entropy
    vocab_size    the size of the vocabulary without padding. Columns after it are ignored, and their gradient is zero.
                  None: all columns count. The padding of `parallel_logits` still doesn't change the loss, because its
                  logits are -inf, but a target in the padding makes the loss infinite

    Returns the loss on every rank, as a scalar or, with reduction="none", as [..]. Its dtype is float32 (float64 if the
    logits are float64), and it isn't twice differentiable. Raises ValueError for invalid shapes and options. A target
    outside the vocabulary raises IndexError or, on a GPU, stops the process (`tplab.tensor.id_check`). (Megatron: same
    name, but no vocab_size.)
    """
    if logits.dim() == 0 or logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits {list(logits.shape)} should be [.., v/p], with the [..] of target {list(target.shape)}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is not one of 'mean', 'sum', 'none'")
    columns, vocab_size = logits.shape[-1], vocabulary("logits", logits, -1, vocab_size, group)
    options = Options(ignore_index, reduction, vocab_size, start=rank_and_size(group)[0] * columns)
    targets = Targets.of(integers("target", target), columns, options)
    return _VocabParallelCrossEntropy.apply(logits, *targets, options, group)


class Options(NamedTuple):
    ignore_index: int
    reduction: Reduction
    vocab_size: int
    start: int  # the first id of this rank

    def width(self, columns: int) -> int:
        """Return the number of this rank's columns that aren't padding."""
        return min(max(self.vocab_size - self.start, 0), columns)


class Targets(NamedTuple):
    """What the loss needs to know about the targets of n tokens.

    column    the column of the token's target on this rank, int64 [n, 1]; 0 if it is `foreign`
    foreign   True if another rank has the target, or the token is ignored, bool [n, 1]
    counts    False if the token is ignored, bool [n, 1]
    """

    column: Tensor
    foreign: Tensor
    counts: Tensor

    @staticmethod
    def of(target: Tensor, columns: int, options: Options) -> "Targets":
        """Describe the targets, int64 [..]. Raises IndexError for the first one that is outside the vocabulary."""
        counts = target != options.ignore_index
        raise_first("target", target, outside(target, options.vocab_size) & counts, options.vocab_size)
        column = target - options.start
        foreign = outside(column, options.width(columns)) | ~counts
        return Targets(*(values.reshape(-1, 1) for values in (column.masked_fill(foreign, 0), foreign, counts)))

    def of_rows(self, rows: slice) -> "Targets":
        return Targets(*(values[rows] for values in self))

    def counted(self) -> Tensor:
        """Return the number of tokens that aren't ignored, as a scalar."""
        return self.counts.sum()

    def gradients(self, dloss: Tensor) -> tuple[Tensor, Tensor]:
        """Return (dloss, shift) [n, 1]: each token's part of dloss, [n] or [1], and what its target's dz gets besides.

        dz = softmax dloss, and dz of the target = softmax dloss + shift.
        """
        dloss = torch.where(self.counts, dloss.view(-1, 1), 0)
        return dloss, (-dloss).masked_fill(self.foreign, 0)


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, column: Tensor, foreign: Tensor, counts: Tensor, options: Options,
        group: ProcessGroup | None,
    ) -> Tensor:  # fmt: skip
        targets = Targets(column, foreign, counts)
        flat = logits.detach().reshape(len(column), logits.shape[-1])  # [n, v/p], a view if the strides allow it
        sum_exp, aimed, base, divisor = forward_of_rows(flat, targets, options, group, None)
        ctx.save_for_backward(flat, *targets, base, divisor)
        ctx.options, ctx.shape = options, logits.shape
        loss = loss_of(sum_exp, aimed, targets, options)
        return loss.view(logits.shape[:-1]) if options.reduction == "none" else loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple:
        flat, *of_tokens, base, divisor = ctx.saved_tensors
        targets, options = Targets(*of_tokens), ctx.options
        if options.reduction == "mean":
            dloss = dloss / targets.counted()
        dflat = torch.empty_like(flat, memory_format=torch.contiguous_format)
        gradient_of_rows(dflat, flat, None, targets.column, base, divisor, *targets.gradients(dloss), options)
        return dflat.view(ctx.shape), None, None, None, None, None


def forward_of_rows(
    logits: Tensor, targets: Targets, options: Options, group: ProcessGroup | None, exponentials: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (S, aimed, base, divisor) for logits [n, v/p]. softmax = exp(z - base) / divisor, and all are [n, 1].

    aimed           z_t - m; if the ranks sum it and reduction isn't "none", its total [1, 1]
    exponentials    memory [n, v/p] that receives exp(z - base), which may be that of the logits; None: discard them
    """
    z = logits[:, : options.width(logits.shape[1])]
    aimed = z.gather(1, targets.column) if z.shape[1] else z.new_zeros(len(z), 1)  # read before z changes
    base, sum_exp = _sweep(z, exponentials)
    if rank_and_size(group)[1] == 1:
        return sum_exp, (aimed - base).masked_fill_(targets.foreign, 0), base, sum_exp
    highest = _all_reduce(base.to(logits.dtype, copy=True), dist.ReduceOp.MAX, group).to(base.dtype)  # m
    to_highest = (base - highest).exp()
    aimed = (aimed - highest).masked_fill_(targets.foreign, 0)
    if options.reduction != "none":
        aimed = aimed.sum(0, keepdim=True)
    sums = _all_reduce(torch.cat([sum_exp * to_highest, aimed]), dist.ReduceOp.SUM, group)  # [n + 1, 1] or [2 n, 1]
    sum_exp, aimed = sums.split([len(z), len(aimed)])
    return sum_exp, aimed, base, sum_exp / to_highest


def loss_of(sum_exp: Tensor, aimed: Tensor, targets: Targets, options: Options) -> Tensor:
    """Return the loss, a scalar or [n], given S [n, 1], and z_t - m [n, 1] or totals of it [any, 1]."""
    log_sum = sum_exp.log().masked_fill_(~targets.counts, 0)
    if options.reduction == "none":
        return (log_sum - aimed)[:, 0]
    loss = log_sum.sum() - aimed.sum()
    return loss / targets.counted() if options.reduction == "mean" else loss


def gradient_of_rows(
    dlogits: Tensor, logits: Tensor, exponentials: Tensor | None, column: Tensor, base: Tensor, divisor: Tensor,
    dloss: Tensor, shift: Tensor, options: Options,
) -> None:  # fmt: skip
    """Write the gradient to dlogits [n, v/p], which may be the logits or the exponentials. See `Targets.gradients`.

    exponentials    what `forward_of_rows` stored there; None: compute them again, a few rows at a time
    """
    width = options.width(logits.shape[1])
    scale = dloss / divisor  # [n, 1]
    for rows in _blocks(logits) if width else []:
        if exponentials is None:
            part = (logits[rows, :width] - base[rows]).exp_()
        else:
            part = exponentials[rows, :width]
        of_target = torch.addcmul(shift[rows], part.gather(1, column[rows]), scale[rows])
        dz = dlogits[rows, :width]
        _into(dz, torch.mul, part, scale[rows])
        dz.scatter_(1, column[rows], of_target.to(dz.dtype))
    dlogits[:, width:] = 0


def _sweep(z: Tensor, exponentials: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return, for each row of z [n, v/p], its maximum m and the sum of exp(z - m), [n, 1] each.

    If a shard is fully masked, m is the lowest finite number, because -inf - -inf would be NaN.
    """
    found = []
    for rows in _blocks(z):
        part = z[rows]
        largest = part.amax(1, keepdim=True) if z.shape[1] else part.new_full((len(part), 1), -torch.inf)
        base = largest.clamp(min=torch.finfo(z.dtype).min).to(sum_dtype(z))
        shifted = (
            part - base if exponentials is None else _into(exponentials[rows, : z.shape[1]], torch.sub, part, base)
        )
        found.append((base, shifted.exp_().sum(1, keepdim=True)))
    base, sum_exp = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
    return base, sum_exp


def _into(out: Tensor, operation: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """Write operation(*operands) to `out`, rounded to its dtype, in one kernel. torch.compile fuses the copy."""
    if torch.compiler.is_compiling():  # it refuses an `out` that isn't contiguous
        return out.copy_(operation(*operands))
    return operation(*operands, out=out)


def _blocks(z: Tensor) -> list[slice]:
    """Split the rows of z into slices small enough for a CPU's cache, or large enough to keep a GPU busy."""
    elements = 2**25 if z.is_cuda else 2**17
    rows = max(1, len(z) if torch.compiler.is_compiling() else elements // max(1, z.shape[1]))
    return [slice(first, first + rows) for first in range(0, max(1, len(z)), rows)]


def sum_dtype(z: Tensor) -> torch.dtype:
    """Return the dtype of sums over z, which is float32 or, if z is float64, float64."""
    return torch.promote_types(z.dtype, torch.float32)


def _all_reduce(x: Tensor, op: Any, group: ProcessGroup | None) -> Tensor:
    if rank_and_size(group)[1] > 1 and x.numel():
        x = x.contiguous()
        dist.all_reduce(x, op, group)
    return x
