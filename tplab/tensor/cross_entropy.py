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
float64, if the logits are float64). Label smoothing also needs sum_i (z_i - m), which enters the loss in the same way
as z_t and is sent with it.

Each rank works on a few rows at a time, so that they stay in the cache. For each row, it finds the maximum m_r of its
own shard and sums exp(z_i - m_r). Once m is known, it multiplies the sum by exp(m_r - m). So the logits are read from
memory only once, and no tensor of their size is allocated.

The backward pass sends nothing, because S and m are known: dz_i = (exp(z_i - m) / S - 1[i = t]) dloss. Autograd saves
the logits and three values per token, and the gradient needs as much memory as the logits. With `overwrite_logits`, the
gradient overwrites the logits, so no second shard is allocated. If the logits are float32 or float64, forward already
overwrites them with the exponentials, to avoid computing these twice. (Shoeybi et al. 2019, "Megatron-LM", section 3;
Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Megatron: vocab_parallel_cross_entropy.)
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.embedding import vocabulary
from tplab.tensor.id_check import outside, raise_first

Reduction = Literal["mean", "sum", "none"]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
    check_target: bool | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Compute `F.cross_entropy` from this rank's logits [.., v/p] and the targets [..], ids of the full vocabulary.

    ignore_index, label_smoothing, reduction    as in F.cross_entropy; smoothing covers the full vocabulary
    vocab_size          the size of the vocabulary without padding. Columns after it are ignored, and their gradient is
                        zero. None: the size in the mark `logits.tensor_parallel`, which `parallel_logits` sets. A copy
                        such as `logits.float()` has no mark. Its padding still doesn't count, because it is -inf, but
                        with label smoothing, or with a target in the padding, the loss is then infinite
    overwrite_logits    store the exponentials, then the gradient, in the memory of the logits. Nothing else may use the
                        logits then: if another backward pass needs them, it raises RuntimeError
    check_target        for targets outside the vocabulary, raise IndexError (True) or return NaN in loss and gradient
                        (False). None: True on a CPU, but False on a GPU, because the check would make the CPU wait

    Returns the loss on every rank, as a scalar or, with reduction="none", as [..]. Its dtype is float32 (float64 if the
    logits are float64), and it isn't twice differentiable. Raises ValueError for invalid shapes and options, such as a
    `vocab_size` or a group that contradicts the mark. (Megatron: same name, but no vocab_size.)
    """
    if logits.dim() == 0 or logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits {list(logits.shape)} should be [.., v/p], with the [..] of target {list(target.shape)}"
        )
    columns = logits.shape[-1]
    vocab_size = vocabulary("logits", logits, -1, vocab_size, group)
    options = Options.of(columns, ignore_index, label_smoothing, reduction, vocab_size, overwrite_logits, group)
    if overwrite_logits and logits.is_leaf and logits.requires_grad:
        raise ValueError(
            "overwrite_logits would destroy logits that are a leaf: their values are yours, not the loss's"
        )
    wrong = wrong_targets(target, options, check_target)
    return _VocabParallelCrossEntropy.apply(logits, target, wrong, options, group)


@dataclass(frozen=True)
class Options:
    ignore_index: int
    label_smoothing: float
    reduction: Reduction
    vocab_size: int
    overwrite_logits: bool
    start: int  # the first id of this rank

    @staticmethod
    def of(
        columns: int, ignore_index: int, label_smoothing: float, reduction: Reduction, vocab_size: int,
        overwrite_logits: bool, group: ProcessGroup | None,
    ) -> "Options":  # fmt: skip
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing={label_smoothing} is not between 0 and 1")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction={reduction!r} is not one of 'mean', 'sum', 'none'")
        start = rank_and_size(group)[0] * columns
        return Options(ignore_index, label_smoothing, reduction, vocab_size, overwrite_logits, start)

    @property
    def smooth(self) -> float:
        """The probability that label smoothing gives to each id of the vocabulary."""
        return self.label_smoothing / self.vocab_size

    def width(self, columns: int) -> int:
        """Return the number of this rank's columns that aren't padding."""
        return min(max(self.vocab_size - self.start, 0), columns)

    def hold_exponentials(self, z: Tensor) -> bool:
        """Return True if forward overwrites z with exp(z - base), which it only does if z's dtype doesn't round it."""
        return self.overwrite_logits and z.dtype == _sum_dtype(z)


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, wrong: Tensor, options: Options, group: ProcessGroup | None
    ) -> Tensor:
        flat = logits.detach().reshape(target.numel(), logits.shape[-1])  # [n, v/p], a view if the strides allow it
        target = target.reshape(-1).long()  # [n]
        loss, base, factor = forward_of_rows(flat, target, wrong.reshape(-1), options, group)
        ctx.save_for_backward(flat, target, base, factor)
        ctx.options, ctx.shape = options, logits.shape
        if options.reduction == "none":
            return loss.view(logits.shape[:-1])
        return loss / (target != options.ignore_index).sum() if options.reduction == "mean" else loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple:
        flat, target, base, factor = ctx.saved_tensors
        if ctx.options.reduction == "mean":
            dloss = dloss / (target != ctx.options.ignore_index).sum()
        dflat = flat if ctx.options.overwrite_logits else torch.empty_like(flat, memory_format=torch.contiguous_format)
        gradient_of_rows(dflat, flat, target, base, factor, dloss.reshape(-1), ctx.options)
        return dflat.view(ctx.shape), None, None, None, None


def wrong_targets(target: Tensor, options: Options, check: bool | None) -> Tensor:
    """Return a bool mask [..] of invalid targets. Depending on `check`, raise IndexError for the first one."""
    if target.is_floating_point():
        raise ValueError(f"target should hold ids, in whole numbers, not {target.dtype}")
    wrong = outside(target, options.vocab_size) & (target != options.ignore_index)
    if target.device.type == "cpu" if check is None else check:
        raise_first("target", target, wrong, options.vocab_size)
    return wrong


def forward_of_rows(
    logits: Tensor, target: Tensor, wrong: Tensor, options: Options, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, base, factor) for logits [n, v/p]. The loss is [n] if reduction="none", otherwise the total.

    The gradient uses base [n] and factor [n], because softmax = exp(z - base) factor. The factor is NaN for wrong
    targets. The logits are overwritten if `options.hold_exponentials` returns True.
    """
    z = logits[:, : options.width(logits.shape[1])]
    mine, column = _columns(target - options.start, z.shape[1])
    aimed = z.gather(1, column[:, None])[:, 0] if z.shape[1] else z.new_zeros(len(z))  # [n]; read before z changes
    my_max, my_sum, my_total = _sweep(z, options)  # [n] each

    highest = _all_reduce(my_max.to(logits.dtype, copy=True), dist.ReduceOp.MAX, group).to(my_max.dtype)  # [n], m
    base, to_highest = _finite(my_max), (my_max - highest).exp()
    aimed = (1 - options.label_smoothing) * torch.where(mine, aimed - highest, 0)
    if options.smooth:
        aimed = aimed + options.smooth * (my_total + z.shape[1] * (base - highest))
    counted = target != options.ignore_index
    aimed = aimed.masked_fill(~counted, 0).masked_fill(wrong, torch.nan)  # [n], this rank's term of the sum
    if options.reduction != "none":
        aimed = aimed.sum().view(1)
    sums = _all_reduce(torch.cat([my_sum * to_highest, aimed]), dist.ReduceOp.SUM, group)  # [n + 1] or [2 n]
    sum_exp, aimed = sums.split([len(target), len(aimed)])
    log_sum = sum_exp.log().masked_fill(~counted, 0)  # [n]
    loss = log_sum - aimed if options.reduction == "none" else log_sum.sum() - aimed[0]
    return loss, base, (to_highest / sum_exp).masked_fill(wrong, torch.nan)


def gradient_of_rows(
    dlogits: Tensor, logits: Tensor, target: Tensor, base: Tensor, factor: Tensor, dloss: Tensor, options: Options
) -> None:
    """Write the gradient to dlogits [n, v/p], which may be the logits. dloss is [n], or [1] if all rows share it."""
    z = logits[:, : options.width(logits.shape[1])]
    dloss = dloss.expand(len(target)).masked_fill(target == options.ignore_index, 0)  # [n]
    mine, column = _columns(target - options.start, z.shape[1])
    hit = torch.where(mine, (options.label_smoothing - 1) * dloss, 0)  # [n]
    scale = factor * dloss  # [n]
    for rows in _blocks(z):
        exponentials = z[rows] if options.hold_exponentials(z) else (z[rows] - base[rows, None]).exp_()
        part = exponentials.mul_(scale[rows, None])
        if options.smooth:
            part -= options.smooth * dloss[rows, None]
        if z.shape[1]:
            part.scatter_add_(1, column[rows, None], hit[rows, None])
        if not options.hold_exponentials(z):
            dlogits[rows, : z.shape[1]] = part
    dlogits[:, z.shape[1] :] = 0


def _sweep(z: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each row of z [n, v/p], its maximum m, the sum of exp(z - m) and, for smoothing, the sum of z - m."""
    my_max, my_sum, my_total = (z.new_empty(len(z), dtype=_sum_dtype(z)) for _ in range(3))
    for rows in _blocks(z):
        part = z[rows]
        largest = part.amax(1, keepdim=True) if part.shape[1] else part.new_full((len(part), 1), -torch.inf)
        my_max[rows] = largest[:, 0]
        base = _finite(largest.to(my_max.dtype))
        shifted = part.sub_(base) if options.hold_exponentials(z) else part - base
        if options.smooth:
            my_total[rows] = shifted.sum(1)
        my_sum[rows] = shifted.exp_().sum(1)
    return my_max, my_sum, my_total


def _finite(largest: Tensor) -> Tensor:
    """Replace -inf, the maximum of a fully masked shard, with 0, because -inf - -inf would be NaN."""
    return largest.masked_fill(largest == -torch.inf, 0)


def _columns(column: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return a bool mask [n] of the columns that this rank has, and `column` [n] with 0 in place of all others."""
    foreign = outside(column, width)
    return ~foreign, column.masked_fill(foreign, 0)


def _blocks(z: Tensor) -> list[slice]:
    """Split the rows of z into slices small enough for a CPU's cache, or large enough to keep a GPU busy."""
    elements = 2**25 if z.is_cuda else 2**17
    rows = max(1, len(z) if torch.compiler.is_compiling() else elements // max(1, z.shape[1]))
    return [slice(first, first + rows) for first in range(0, len(z), rows)]


def _sum_dtype(z: Tensor) -> torch.dtype:
    return torch.promote_types(z.dtype, torch.float32)


def _all_reduce(x: Tensor, op: Any, group: ProcessGroup | None) -> Tensor:
    if rank_and_size(group)[1] > 1 and x.numel():
        x = x.contiguous()
        dist.all_reduce(x, op, group)
    return x
