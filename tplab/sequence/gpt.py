"""Chapter 12: a GPT made of the earlier chapters' layers, with the sequence sharded between their blocks.

    x [b, s/p, h] -+- norm -> all-gather  attention  reduce-scatter -> + bias, dropout -(+)- .. -> z [b, s/p, h]
                   |                                                                     |
                   +---------------------------------------------------------------------+

Inside a block, nothing changes: the input is [b, s, h], and each rank computes complete heads and columns. Between
blocks, a rank has only its own tokens, so dropout there uses the state "sharded" (`tplab.tensor.rng`), which is
different on each rank.

One thing is new. Norms, biases after a reduce-scatter, and position embeddings are replicated, but each rank uses them
only for its own tokens. So each rank's gradient is only one term of a sum, which you have to compute after backward:

    loss.backward()
    allreduce_sequence_parallel_gradients(model)
    optimizer.step()

If you forget this sum, nothing fails, but the ranks' copies of these parameters drift apart, because each copy is
trained only on its rank's tokens. The parameters are marked with `param.sequence_parallel = True` (the name that
Megatron uses). If you also use data parallelism, `tplab.cluster.TrainingStep` computes all sums in the right order.

Traffic of one training step, in collectives of the full [b, s, h]; an all-reduce counts as two of these:

                              forward                               backward
    embedding                 1 reduce-scatter                      1 all-gather
    block (two in a layer)    1 all-gather, 1 reduce-scatter        1 all-gather, 1 reduce-scatter
    head                      1 all-gather                          1 reduce-scatter

Without sequence parallelism, the same model sends the same amount: one all-reduce each for the embedding and the head,
and two per block. Only the all-reduce of the small gradients is new. With `gather_again`, autograd saves only this
rank's tokens of a block's input, and backward gathers the others again. This needs 1/p of the memory, but one more
all-gather per block. (Korthikanti et al. 2022, section 4.2.2; Megatron: sequence_parallel, allreduce_layernorm_grads.)
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.common.taken_gradients import check_not_taken
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.sequence.linear import GATHER_AGAIN, SEQUENCE_PARALLEL, gather_linear
from tplab.sequence.regions import gather_from_sequence_region, tokens_per_rank
from tplab.tensor.embedding import parallel_logits
from tplab.tensor.kv_cache import KVCache
from tplab.tensor.linear_cross_entropy import parallel_linear_cross_entropy
from tplab.tensor.rng import RNGTracker
from tplab.tensor.sharding import shard


def sequence_parallel_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Mark and return the replicated parameters that each rank uses only for its own tokens."""
    for module in model.modules():
        for name in getattr(module, "sequence_parallel_parameters", ()):
            if (parameter := module._parameters.get(name)) is not None:
                parameter.sequence_parallel = True  # type: ignore[attr-defined]
    return [parameter for parameter in model.parameters() if getattr(parameter, "sequence_parallel", False)]


def allreduce_sequence_parallel_gradients(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Sum the gradients of all parameters marked `sequence_parallel` over the ranks, with one all-reduce per dtype.

    Call it on every rank, once per step, after the last backward and before gradients are clipped or used. Calling it
    twice would sum them twice. Parameters without a gradient are skipped, so the same parameters must have a gradient
    on every rank. Raises ValueError if no parameter has a gradient, or if data parallelism has already taken a gradient
    out of `.grad` (see `TrainingStep`).
    """
    if rank_and_size(group)[1] == 1:
        return
    parameters = [parameter for parameter in sequence_parallel_parameters(model) if parameter.requires_grad]
    check_not_taken(parameters, "sum the gradients of sequence-parallel parameters")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if parameters and not gradients:
        raise ValueError(
            f"none of the {len(parameters)} sequence-parallel parameters has a gradient: call this after backward, and "
            "before zero_grad()"
        )
    sum_over_ranks(gradients, group)


@torch.no_grad()
def sum_over_ranks(tensors: Iterable[Tensor], group: ProcessGroup | None = None) -> None:
    """Sum each tensor over the ranks in place, with one all-reduce per dtype. All ranks must pass the same shapes."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for of_dtype in by_dtype.values():
        total = torch.cat([tensor.flatten() for tensor in of_dtype])
        dist.all_reduce(total, group=group)
        for tensor, part in zip(of_dtype, total.split([t.numel() for t in of_dtype]), strict=True):
            tensor.copy_(part.view_as(tensor))


class SequenceParallelGPT(ParallelGPT):
    """A `ParallelGPT` with activations [b, s/p, h] between the blocks. It has the same parameters, logits and loss.

    gather_again    save only this rank's tokens of a block's input, and gather the others again in the backward pass
    options         as in ParallelGPT, except that `region` isn't an option

    After backward, call `allreduce_sequence_parallel_gradients(model, group)`. The sequence length, including padding,
    must be a multiple of p. To generate text, load the state_dict into a ParallelGPT, because a single new token can't
    be split.
    """

    def __init__(self, config: GPTConfig, *, gather_again: bool = False, **options: Any) -> None:
        super().__init__(config, region=GATHER_AGAIN if gather_again else SEQUENCE_PARALLEL, **options)

    def features(self, ids: Tensor, *, cache: Sequence[KVCache] | None = None, rng: RNGTracker | None = None) -> Tensor:
        """Return the output layer's input for this rank's tokens, [b, s/p, h], given ids [b, s].

        Raises ValueError if s isn't divisible by p, or if a cache is passed.
        """
        if cache is not None:
            raise ValueError("the next token of a cache can't be cut into parts: generate with a ParallelGPT")
        tokens_per_rank(ids.shape[1], self.world_size)
        return super().features(ids, rng=rng)

    def logits(self, x: Tensor, *, gather: bool = False) -> Tensor:
        """Return this rank's logits [b, s, v/p] of all tokens, or all [b, s, v] with `gather`, given x [b, s/p, h]."""
        return parallel_logits(
            x, self.output_weight, gather=gather, vocab_size=self.config.vocab_size, linear=gather_linear,
            async_grad_allreduce=self.async_grad_allreduce, group=self.group,
        )  # fmt: skip

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a replicated scalar, given x [b, s/p, h] and target tokens [b, s]."""
        return parallel_linear_cross_entropy(
            gather_from_sequence_region(x, self.group), self.output_weight, targets,
            vocab_size=self.config.vocab_size, sum_gradient=False, group=self.group,
        )  # fmt: skip

    def _places(self, past: int, ids: Tensor) -> Tensor:
        return shard(super()._places(past, ids), 0, self.rank, self.world_size)  # [s/p]
