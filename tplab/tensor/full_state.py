"""Chapter 04: convert full checkpoints to shards and back, for modules that mark shards with `param.tensor_parallel`.

    full_state_dict        shards on p ranks  ->  the state_dict of the unsharded module, on every rank
    load_full_state_dict   that state_dict    ->  each rank's shards, for any p

So you can train on 4 ranks and continue on 2: `load_full_state_dict(model_2, full_state_dict(model_4))`. You can also
compare a sharded layer with plain torch, which Megatron's tests used `master_weight` for. Names are those of the module
without wrappers such as torch.compile (`tplab.tensor.wrappers`).
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.operators import all_gather
from tplab.tensor.sharding import Sharding, check_group, sharding_of
from tplab.tensor.wrappers import load_plain_state, plain_state


def full_state_dict(module: nn.Module, group: ProcessGroup | None = None) -> dict[str, Tensor]:
    """Return the module's full state_dict on every rank, with sharded parameters [.., n/p, ..] gathered to [.., n, ..].

    All ranks of the group must call it, because it runs one all-gather per sharded parameter. Replicated parameters and
    buffers are copied from this rank. The returned tensors share no memory with the module. Raises ValueError if the
    shards aren't on the group's ranks, or for a DTensor.
    """
    world_size = rank_and_size(group)[1]
    state, own = {}, plain_state(module)
    _check_groups(own, group)
    for name, value in own.items():
        if not isinstance(value, Tensor):  # the result of a module's get_extra_state
            state[name] = value
            continue
        sharding, tensor = sharding_of(value), value.detach()
        if sharding is None:
            state[name] = tensor.clone()
        else:
            state[name] = sharding.unshard(all_gather(tensor, group) if world_size > 1 else [tensor])
    return state


def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor], group: ProcessGroup | None = None) -> None:
    """Copy a full state_dict, from `full_state_dict` or from a plain torch module, into the module's shards.

    There is no communication, because each rank takes its shards of the same `state`, which isn't modified. Raises
    ValueError if a tensor doesn't have the full parameter's shape, or if the shards aren't on the group's ranks. Like
    `torch.nn.Module.load_state_dict`, raises RuntimeError if the names differ.
    """
    rank, world_size = rank_and_size(group)
    own = plain_state(module)
    _check_groups(own, group)
    shards = dict(state)
    for name in own.keys() & state.keys():
        if (sharding := sharding_of(own[name])) is not None:
            _check_is_whole(name, state[name], list(own[name].shape), sharding, world_size)
            shards[name] = sharding.shard(state[name], rank, world_size)
    load_plain_state(module, shards)


def _check_groups(state: Mapping[str, object], group: ProcessGroup | None) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor):
            check_group(name, value, group)


def _check_is_whole(name: str, given: Tensor, own: list[int], sharding: Sharding, world_size: int) -> None:
    whole = sharding.whole_shape(own, world_size)
    if list(given.shape) != whole:
        raise ValueError(
            f"{name} needs the whole tensor {whole}, of which each of {world_size} ranks takes {own}; "
            f"got {list(given.shape)}"
        )
