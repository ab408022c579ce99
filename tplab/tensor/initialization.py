"""Chapter 04: initialize a shard from a master weight.

Each rank draws the full W [out, in] from the same seed (`torch.manual_seed(1)`) and keeps its shard, so W is the same
for every p. All ranks are then in the same random state, and replicated parameters are equal, too.

Drawing only the shard on each rank is easy to get wrong. Xavier's std is sqrt(2 / (in + out)), but an init method that
sees only the shard [out/p, in] uses out/p instead of out. For W [4096, 1024] and p = 2, it gets 0.0255 instead of
0.0198. And if the ranks drew with equal seeds, all shards would be equal.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.sharding import check_group, sharding_of

InitMethod = Callable[[Tensor], object]


@torch.no_grad()
def init_parameter(parameter: nn.Parameter, init_method: InitMethod, group: ProcessGroup | None = None) -> None:
    """Initialize a parameter in place with `init_method`, a function for full tensors as in `torch.nn.init`.

    A replicated parameter is initialized in full on every rank, and a shard (`parameter.tensor_parallel`) gets its
    slice of the master weight. Raises ValueError if the shards aren't on the group's ranks.
    """
    check_group("the parameter", parameter, group)
    rank, world_size = rank_and_size(group)
    sharding = sharding_of(parameter)
    shape = list(parameter.shape) if sharding is None else sharding.whole_shape(parameter.shape, world_size)
    if sharding is None or (world_size == 1 and shape == list(parameter.shape)):  # a padded shard is larger
        init_method(parameter)
        return
    master = parameter.new_empty(shape)
    init_method(master)
    parameter.copy_(sharding.shard(master, rank, world_size))


def init_linear(
    weight: nn.Parameter, bias: nn.Parameter | None, init_method: InitMethod | None, group: ProcessGroup | None = None
) -> None:
    """Fill weight [out, in] and bias [out], or this rank's shards of them, as `nn.Linear` does.

    If `init_method` is given, it fills the weight, and the bias is zero.
    """
    sharding = sharding_of(weight)
    whole = weight.shape if sharding is None else sharding.whole_shape(weight.shape, rank_and_size(group)[1])
    bound = 1 / math.sqrt(whole[1]) if whole[1] else 0
    init_weight = init_method or partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
    init_bias = nn.init.zeros_ if init_method else partial(nn.init.uniform_, a=-bound, b=bound)
    init_parameter(weight, init_weight, group)
    if bias is not None:
        init_parameter(bias, init_bias, group)
