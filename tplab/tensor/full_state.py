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
from torch.distributed.tensor import DTensor, distribute_tensor

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.operators import all_gather
from tplab.tensor.sharding import Sharding, check_group
from tplab.tensor.wrappers import load_plain_state, plain_state


def full_state_dict(module: nn.Module, group: ProcessGroup | None = None) -> dict[str, Tensor]:
    """Return the module's full state_dict on every rank, with sharded parameters [.., n/p, ..] gathered to [.., n, ..].

    All ranks of the group must call it, because it runs one all-gather per sharded parameter. Replicated parameters and
    buffers are copied from this rank. The returned tensors share no memory with the module. If `fully_shard` (FSDP2)
    has split the parameters further, all of its ranks must call it, too. Raises ValueError if the shards aren't on the
    group's ranks.
    """
    world_size = rank_and_size(group)[1]
    state, own = {}, plain_state(module)
    _check_groups(own, group)
    for name, value in own.items():
        if not isinstance(value, Tensor):  # the result of a module's get_extra_state
            state[name] = value
            continue
        sharding, tensor = _sharding_of(value), value.detach()
        if isinstance(value, DTensor):
            tensor = value.to_local() if is_on_ranks_of_shards(name, value) else value.full_tensor()
            tensor = tensor.detach()
        if sharding is None:
            state[name] = tensor.clone()
        else:
            state[name] = sharding.unshard(all_gather(tensor, group) if world_size > 1 else [tensor])
    return state


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Tensor], group: ProcessGroup | None = None, *, strict: bool = True
) -> None:
    """Copy a full state_dict, from `full_state_dict` or from a plain torch module, into the module's shards.

    There is no communication, because each rank takes its shards of the same `state`, which isn't modified. Raises
    ValueError if a tensor doesn't have the full parameter's shape, or if the shards aren't on the group's ranks. Like
    `torch.nn.Module.load_state_dict`, raises RuntimeError if `strict` is set and the names differ.
    """
    rank, world_size = rank_and_size(group)
    own = plain_state(module)
    _check_groups(own, group)
    shards = dict(state)
    for name in own.keys() & state.keys():
        if (sharding := _sharding_of(own[name])) is not None:
            _check_is_whole(name, state[name], _shard_shape(name, own[name]), sharding, world_size)
            shards[name] = sharding.shard(state[name], rank, world_size)
        if isinstance(own[name], DTensor):
            shards[name] = _as_dtensor(name, shards[name], own[name])
    load_plain_state(module, shards, strict=strict)


def is_on_ranks_of_shards(name: str, parameter: DTensor) -> bool:
    """Return True if the DTensor's local tensor is this rank's shard, or False if it is split further, as by FSDP2.

    Raises ValueError if the ranks of the shards are unknown, or if the DTensor's mesh neither has exactly these ranks
    nor has just one rank in common with them.
    """
    sharding, mesh = _sharding_of(parameter), set(parameter.device_mesh.mesh.flatten().tolist())
    if sharding is None:
        return False
    if sharding.ranks is None:
        known = "unknown ranks: set Sharding(.., ranks=..)"
    elif mesh == set(sharding.ranks):
        return True
    elif len(mesh & set(sharding.ranks)) == 1:
        return False
    else:
        known = f"ranks {list(sharding.ranks)}"
    raise ValueError(
        f"{name} is a DTensor on ranks {sorted(mesh)}, and its tensor-parallel shards are on {known}. They should be "
        "the same ranks, or have only this one in common, like the dimensions of a mesh"
    )


def _sharding_of(value: object) -> Sharding | None:
    return getattr(value, "tensor_parallel", None)


def _check_groups(state: Mapping[str, object], group: ProcessGroup | None) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor):
            check_group(name, value, group)


def _shard_shape(name: str, own: Tensor) -> list[int]:
    return list((own.to_local() if isinstance(own, DTensor) and is_on_ranks_of_shards(name, own) else own).shape)


def _as_dtensor(name: str, shard: Tensor, own: DTensor) -> DTensor:
    mesh, placements, shard = own.device_mesh, own.placements, shard.to(own.device)
    if is_on_ranks_of_shards(name, own):
        return DTensor.from_local(shard, mesh, placements, run_check=False, shape=own.shape, stride=own.stride())
    return distribute_tensor(shard, mesh, placements, src_data_rank=None)  # each rank takes a slice of its own copy


def _check_is_whole(name: str, given: Tensor, own: list[int], sharding: Sharding, world_size: int) -> None:
    whole = sharding.whole_shape(own, world_size)
    if list(given.shape) != whole:
        raise ValueError(
            f"{name} needs the whole tensor {whole}, of which each of {world_size} ranks takes {own}; "
            f"got {list(given.shape)}"
        )
