"""Chapter 04: initialize a shard from a master weight, or draw it separately on each rank.

    master      each rank draws the full W [out, in] from the same seed and keeps its shard; W is the same for every p
    per rank    each rank draws only its shard, from its own seed, with the std of the full W; no rank ever has all of W

Both methods need the same seed on all ranks (`torch.manual_seed(1)`). They leave all ranks in the same random state, so
that replicated parameters are equal.

Drawing per rank is easy to get wrong. Xavier's std is sqrt(2 / (in + out)), but an init method that sees only the shard
[out/p, in] uses out/p instead of out. For W [4096, 1024] and p = 2, it gets 0.0255 instead of 0.0198. And if the ranks
drew with equal seeds, all shards would be equal.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.sharding import Sharding, check_group

InitMethod = Callable[[Tensor], object]


@torch.no_grad()
def init_parameter(
    parameter: nn.Parameter, init_method: InitMethod, group: ProcessGroup | None = None, *, per_rank: bool = False
) -> None:
    """Initialize a parameter in place with `init_method`, a function for full tensors as in `torch.nn.init`.

    A replicated parameter is initialized in full on every rank. A shard (`parameter.tensor_parallel`) gets its slice of
    the master weight, or is drawn directly if `per_rank` is set. In that case, `init_method` may use only in-place
    draws and arithmetic with numbers; anything else raises ValueError. For example, orthogonal_ can't be used, because
    it needs the full matrix.
    """
    check_group("the parameter", parameter, group)
    rank, world_size = rank_and_size(group)
    sharding: Sharding | None = getattr(parameter, "tensor_parallel", None)
    shape = list(parameter.shape) if sharding is None else sharding.whole_shape(parameter.shape, world_size)
    if sharding is None or (world_size == 1 and shape == list(parameter.shape)):  # a padded shard is larger
        init_method(parameter)
        return
    if not per_rank or world_size == 1:
        master = parameter.new_empty(shape)
        init_method(master)
        parameter.copy_(sharding.shard(master, rank, world_size))
        return
    seed = int(torch.randint(2**62, (), device="cpu"))  # the same on every rank
    if not sharding.blocks:
        _draw_shard(parameter, shape, init_method, seed + rank)
        return
    lengths = [block.shard_length(world_size) for block in sharding.blocks]
    for number, part in enumerate(parameter.split(lengths, sharding.dim)):
        part_of = rank // sharding.blocks[number].copies(world_size)  # ranks that share a part draw the same values
        _draw_shard(part, shape, init_method, seed + number * world_size + part_of)


def init_linear(
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    init_method: InitMethod | None,
    group: ProcessGroup | None = None,
    *,
    per_rank: bool = False,
) -> None:
    """Fill weight [out, in] and bias [out], or this rank's shards of them, as `nn.Linear` does.

    If `init_method` is given, it fills the weight, and the bias is zero.
    """
    sharding: Sharding | None = getattr(weight, "tensor_parallel", None)
    whole = weight.shape if sharding is None else sharding.whole_shape(weight.shape, rank_and_size(group)[1])
    bound = 1 / math.sqrt(whole[1]) if whole[1] else 0
    init_weight = init_method or partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
    init_bias = nn.init.zeros_ if init_method else partial(nn.init.uniform_, a=-bound, b=bound)
    init_parameter(weight, init_weight, group, per_rank=per_rank)
    if bias is not None:
        init_parameter(bias, init_bias, group, per_rank=per_rank)


def _draw_shard(parameter: Tensor, shape: list[int], init_method: InitMethod, seed: int) -> None:
    """Call the init method with a tensor of the full shape, but fill only the shard."""
    stand_in = parameter.new_empty(shape, device="meta")  # has only the shape, which determines the std, but no memory
    with _DrawOnShard(parameter, seed) as drawing:
        init_method(stand_in)
    if not drawing.started:  # trunc_normal_ and orthogonal_ return immediately if a tensor has no memory
        raise _cannot_draw("it leaves a stand-in without memory as it is")


class _DrawOnShard(TorchDispatchMode):
    """Dispatch mode that redirects in-place operations on a meta-device stand-in to the shard."""

    def __init__(self, shard: Tensor, seed: int) -> None:
        super().__init__()
        self.shard = shard
        self.generator = None if shard.is_meta else torch.Generator(shard.device).manual_seed(seed)
        self.started = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        stand_in, *numbers = args
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):  # w.data, w.detach()
            return func(stand_in)
        in_place = func._schema.is_mutable and isinstance(stand_in, Tensor) and stand_in.is_meta
        if not in_place or any(isinstance(number, Tensor) for number in [*numbers, *kwargs.values()]):
            raise _cannot_draw(f"it calls {func}, which needs the whole tensor")
        if any(argument.name == "generator" for argument in func._schema.arguments):
            kwargs["generator"] = self.generator
        func(self.shard, *numbers, **kwargs)
        self.started = True
        return stand_in


def _cannot_draw(reason: str) -> ValueError:
    return ValueError(
        f"per_rank_init can't draw a shard with this init_method: {reason}. "
        "Use plain draws in place such as nn.init.normal_ or xavier_uniform_, or per_rank_init=False."
    )
