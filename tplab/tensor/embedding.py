"""Chapter 07: the embedding table, sharded by rows, and the output layer that uses the same rows.

Each rank has the rows for ids start to stop - 1, with all h columns. It looks up the ids whose rows it has, and uses
zeros for all other ids. Then g sums the results over the ranks, and exactly one rank contributes to each vector.

    E [v, h], v = 6, p = 2         ids    [  1    4    0  ]
    rank 0: rows 0 1 2      E_0, masked   [ E[1]  0   E[0] ]
    rank 1: rows 3 4 5      E_1, masked   [  0   E[4]  0   ]     -> g -> [ E[1] E[4] E[0] ] on every rank

The output layer, logits = X E^T, also has one vector per id, and it may use the same E (Press and Wolf 2017). E^T is
split by columns, which makes this a column-parallel layer. The loss of chapter 08 uses the sharded logits directly.

    X -> f -> X E_r^T -> logits_r [b, s, v/p]

The lookup and the output layer both add to the gradient of the same parameter. For each row, both terms are computed on
the rank that has the row, so tying the weights adds no traffic.

                       forward                           backward
    embedding          all-reduce of b s h elements      none
    parallel_logits    none (gather: all-gather)         all-reduce of b s h elements

v is padded to a multiple of 128 p, so that all ranks have the same number of rows and matmuls run efficiently. Padding
is never looked up, trained or saved in a checkpoint, so `full_state_dict` returns E [v, h] for any p. The padding's
logits are -inf, so any softmax ignores them, no matter how the logits are processed in between. The size of the
vocabulary is stored in the weight's mark, `weight.tensor_parallel`. (Shoeybi et al. 2019, "Megatron-LM", section 3;
Megatron: VocabParallelEmbedding, parallel_lm_logits.)
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.id_check import integers, outside, raise_first
from tplab.tensor.initialization import InitMethod, init_parameter
from tplab.tensor.linear import Device
from tplab.tensor.operators import gather_from_region
from tplab.tensor.region import TENSOR_PARALLEL, Region, column_linear
from tplab.tensor.sharding import Block, ShardedModule, Sharding, check_group, sharding_of


def pad_vocab_size(vocab_size: int, world_size: int, multiple: int = 128) -> int:
    """Return the number of rows of the padded table, which is `vocab_size` rounded up to a multiple of `multiple` * p.

    For example, pad_vocab_size(50257, 2) is 50432, which is 197 times 256.
    """
    return world_size * Block(vocab_size, multiple, padded=True).shard_length(world_size)


class VocabParallelEmbedding(ShardedModule):
    """`nn.Embedding` with its rows sharded over the ranks. Maps ids [..] to vectors [.., h], which are replicated.

    multiple         the table is padded to a multiple of this times p (1: to a multiple of p)
    region           how the vectors leave the layer (see `tplab.tensor.region`)
    init_method      initializes the full table in place; None: normal distribution, as in nn.Embedding

    The parameter is `weight` [v/p, h], with v padded. Rank r has rows `start` to `stop` - 1. Ids outside the vocabulary
    raise IndexError or, on a GPU, stop the process (`tplab.tensor.id_check`). (Megatron: same name, but these ids get a
    vector of zeros.)
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        multiple: int = 128,
        region: Region = TENSOR_PARALLEL,
        init_method: InitMethod | None = None,
        group: ProcessGroup | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.region, self.init_method = region, init_method
        rows = pad_vocab_size(num_embeddings, self.world_size, multiple) // self.world_size
        self.start, self.stop = self.rank * rows, (self.rank + 1) * rows
        weight = nn.Parameter(torch.empty(rows, embedding_dim, device=device, dtype=dtype))  # [v/p, h]
        self.register_shard("weight", weight, Sharding(0, blocks=(Block(num_embeddings, multiple, padded=True),)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the weight with `init_method`, or the way `nn.Embedding` does. The padding is zero."""
        init_parameter(self.weight, self.init_method or nn.init.normal_, self.group)

    def forward(self, ids: Tensor) -> Tensor:
        ids = integers("ids", ids)
        raise_first("id", ids, outside(ids, self.num_embeddings), self.num_embeddings)
        if self.world_size == 1:
            return self.region.leave(F.embedding(ids, self.weight), self.group)  # [b, s, h]
        row = ids - self.start  # [b, s]
        foreign = outside(row, len(self.weight))  # [b, s]: another rank has the row
        vectors = F.embedding(row.masked_fill(foreign, 0), self.weight)  # [b, s, h]; 0 is any valid row, masked below
        vectors.masked_fill_(foreign.unsqueeze(-1), 0)  # in place, to avoid a second tensor of this size
        return self.region.leave(vectors, self.group)  # [b, s, h]


def parallel_logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gather: bool = False,
    vocab_size: int | None = None,
    async_grad_allreduce: bool = False,
    linear: Callable[..., Tensor] = column_linear,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return this rank's logits x E_r^T, [.., v/p], from x [.., h] (replicated) and the rank's rows E_r [v/p, h].

    bias                    [v/p], this rank's shard of a bias
    gather                  return all logits [.., v] on every rank, without padding, with one all-gather (for sampling)
    vocab_size              number of ids that aren't padding; None: the number in the mark `weight.tensor_parallel`,
                            or all ids if there is no mark
    async_grad_allreduce    as in ColumnParallelLinear
    linear                  computes the matmul; `tplab.sequence.linear.gather_linear` if x has only this rank's tokens

    Without `gather`, the logits of padding are -inf. For a tied output layer, pass `embedding.weight`. A copy such as
    `weight.bfloat16()` has no mark, so it needs `vocab_size`. Raises ValueError if `vocab_size` is missing for a weight
    that was computed from another tensor, or if `vocab_size` or the group contradicts the mark. (Megatron:
    parallel_lm_logits.)
    """
    if x.shape[-1:] != weight.shape[-1:]:
        raise ValueError(f"x {list(x.shape)} should be [.., {weight.shape[-1]}], for a table {list(weight.shape)}")
    vocab_size, rows = vocabulary("weight", weight, 0, vocab_size, group), len(weight)
    own = min(max(vocab_size - rank_and_size(group)[0] * rows, 0), rows)  # this rank's rows that aren't padding
    if own < rows and not gather:
        bias = torch.zeros_like(weight[:, 0]) if bias is None else bias.clone()
        bias[own:] = -torch.inf  # added in the matmul, so no extra memory is needed
    logits = linear(x, weight, bias, group, async_grad_allreduce)  # [.., v/p]
    return gather_from_region(logits, group)[..., :vocab_size] if gather else logits


def vocabulary(name: str, shard: Tensor, dim: int, vocab_size: int | None, group: ProcessGroup | None) -> int:
    """Return the size of the vocabulary, given a shard of a table (one row per id) or of logits (one column per id).

    dim            the dimension that is sharded
    vocab_size     the size that the caller passed; None: the size in the table's mark, `shard.tensor_parallel`. Without
                   a mark, as in logits, nothing is padding.
    Raises ValueError if the caller's size or group contradicts the mark, if the size doesn't fit the shards, or if the
    size is unknown and the table was computed from another tensor, which may have had a mark.
    """
    check_group(name, shard, group)
    columns, p = shard.shape[dim], rank_and_size(group)[1]
    sharding = sharding_of(shard)
    known = sum(block.size for block in sharding.blocks) if sharding is not None and sharding.blocks else None
    if vocab_size is not None and known is not None and vocab_size != known:
        raise ValueError(
            f"vocab_size={vocab_size}, but {name} {list(shard.shape)} is a shard of a vocabulary of {known}: leave "
            "vocab_size out"
        )
    size = known if vocab_size is None else vocab_size
    if size is None and name == "weight" and shard.grad_fn is not None:
        raise ValueError(
            f"weight {list(shard.shape)} was computed from another tensor, so it doesn't say which of its rows are "
            "padding: pass vocab_size"
        )
    size = p * columns if size is None else size
    if not 0 < size <= p * columns:
        raise ValueError(f"vocab_size={size} doesn't fit {p} ranks with {columns} columns each")
    return size
