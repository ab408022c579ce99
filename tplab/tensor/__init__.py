"""Chapters 02 to 09: tensor parallelism, from one split matrix to a whole vocabulary.

02  sharding               which slice of a tensor belongs to which rank, and the error if p doesn't divide a size
    group_module           modules that have a process group can be copied, but not pickled
03  operators              f, g, scatter and gather, with their backward passes
04  initialization         initial weights that are the same for every number of ranks
    full_state             convert full checkpoints to shards and back
    wrappers               parameter names without the prefixes of torch.compile and DistributedDataParallel
    region                 how activations enter and leave a block of sharded weights
    linear                 ColumnParallelLinear, RowParallelLinear
    regression             a small problem that shows what a layer learns
05  mlp                    ParallelMLP, with one all-reduce in the forward pass and one in the backward pass
06  attention_mask         which positions a query may attend to
    qkv                    the projections to Q, K and V, whose heads are split over the ranks
    kv_cache               the keys and values of earlier tokens
    attention              ParallelAttention, with heads split over the ranks
07  id_check               an error for token ids outside the vocabulary
    embedding              the vocabulary-parallel embedding table, and the output layer that shares its weight
    token_way              the path of a token through both of them, recorded for a picture
08  cross_entropy          the loss of logits that are split over the ranks
    linear_cross_entropy   the same, together with the output layer, without storing the logits
09  rng                    dropout masks that are identical where ranks must agree and different everywhere else
"""

from tplab.plain import rotary_angles, rotate
from tplab.tensor import regression
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy
from tplab.tensor.embedding import VocabParallelEmbedding, pad_vocab_size, parallel_logits
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.initialization import InitMethod, init_parameter
from tplab.tensor.kv_cache import KVCache
from tplab.tensor.linear import ColumnParallelLinear, LayerOptions, RowParallelLinear
from tplab.tensor.linear_cross_entropy import parallel_linear_cross_entropy
from tplab.tensor.mlp import ParallelMLP
from tplab.tensor.operators import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region
from tplab.tensor.qkv import QKVParallelLinear
from tplab.tensor.region import Region
from tplab.tensor.rng import RNGTracker, checkpoint, dropout, seed_all
from tplab.tensor.sharding import (
    Block,
    ShardedModule,
    Sharding,
    divide,
    shard,
    shard_range,
    unshard,
)
from tplab.tensor.token_way import OnRank, TokenWay, record_token

__all__ = [
    "Block",
    "ColumnParallelLinear",
    "InitMethod",
    "KVCache",
    "LayerOptions",
    "OnRank",
    "ParallelAttention",
    "ParallelMLP",
    "QKVParallelLinear",
    "RNGTracker",
    "Region",
    "RowParallelLinear",
    "ShardedModule",
    "Sharding",
    "TokenWay",
    "VocabParallelEmbedding",
    "checkpoint",
    "copy_to_region",
    "divide",
    "dropout",
    "full_state_dict",
    "gather_from_region",
    "init_parameter",
    "load_full_state_dict",
    "pad_vocab_size",
    "parallel_linear_cross_entropy",
    "parallel_logits",
    "record_token",
    "reduce_from_region",
    "regression",
    "rotary_angles",
    "rotate",
    "scatter_to_region",
    "seed_all",
    "shard",
    "shard_range",
    "unshard",
    "vocab_parallel_cross_entropy",
]
