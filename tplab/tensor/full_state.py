"""Chapter 04: convert full checkpoints to shards and back, for any module whose shards have `param.tensor_parallel`.

    full_state_dict        shards on p ranks  ->  the state_dict of the unsharded module, on every rank
    load_full_state_dict   that state_dict    ->  each rank's shards, for any p

So you can continue on 2 ranks what was trained on 4: `load_full_state_dict(model_2, full_state_dict(model_4))`. You can
also compare a sharded layer with plain torch, which is what Megatron's tests kept `master_weight` for.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.mappings import all_gather
from tplab.tensor.sharding import Sharding


def full_state_dict(module: nn.Module, group: ProcessGroup | None = None) -> dict[str, Tensor]:
    """Return the module's full state_dict on every rank, with sharded parameters [.., n/p, ..] gathered to [.., n, ..].

    All ranks of the group must call it, because it runs one all-gather per sharded parameter. Replicated parameters and
    buffers are copied from this rank. The returned tensors share no memory with the module.
    """
    world_size = rank_and_size(group)[1]
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):  # the result of a module's get_extra_state
            state[name] = value
            continue
        sharding, tensor = _sharding_of(value), value.detach()
        if sharding is None:
            state[name] = tensor.clone()
        else:
            state[name] = sharding.unshard(all_gather(tensor, group) if world_size > 1 else [tensor])
    return state


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Tensor], group: ProcessGroup | None = None, *, strict: bool = True
) -> None:
    """Copy a full state_dict, from `full_state_dict` or from a plain torch module, into the module's shards.

    There is no communication: each rank takes its shards of the same `state`, which isn't modified. Raises ValueError
    if a tensor doesn't have the shape of the full parameter and, like `torch.nn.Module.load_state_dict`, RuntimeError
    if `strict` is set and the names differ.
    """
    rank, world_size = rank_and_size(group)
    own = module.state_dict(keep_vars=True)
    shards = dict(state)
    for name in own.keys() & state.keys():
        if (sharding := _sharding_of(own[name])) is not None:
            _check_is_whole(name, state[name], own[name], sharding, world_size)
            shards[name] = sharding.shard(state[name], rank, world_size)
    module.load_state_dict(shards, strict=strict)


def _sharding_of(value: object) -> Sharding | None:
    return getattr(value, "tensor_parallel", None)


def _check_is_whole(name: str, given: Tensor, own: Tensor, sharding: Sharding, world_size: int) -> None:
    whole = sharding.whole_shape(own.shape, world_size)
    if list(given.shape) != whole:
        raise ValueError(
            f"{name} needs the whole tensor {whole}, of which each of {world_size} ranks takes {list(own.shape)}; "
            f"got {list(given.shape)}"
        )
