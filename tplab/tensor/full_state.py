"""Chapter 04: full checkpoints to shards and back, for every module of the course, by `param.tensor_parallel` alone.

    full_state_dict        shards on p ranks  ->  the state_dict of the unsharded module, on every rank
    load_full_state_dict   that state_dict    ->  each rank's shards, for any p

So a model trained on 4 ranks goes on on 2: `load_full_state_dict(model_2, full_state_dict(model_4))`. What a sharded
layer computes can be compared with plain torch in the same way; Megatron kept `master_weight` for its tests to do that.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.mappings import all_gather
from tplab.tensor.sharding import Sharding


def full_state_dict(module: nn.Module, group: ProcessGroup | None = None) -> dict[str, Tensor]:
    """The module's state_dict with every sharded parameter [.., n/p, ..] gathered whole [.., n, ..], on every rank.

    All ranks of the group must call it: one all-gather per sharded parameter. Replicated parameters and buffers are
    this rank's own. The tensors share no memory with the module.
    """
    world_size = rank_and_size(group)[1]
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):  # what a module's get_extra_state returned
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
    """Copy into the module its shards of a whole state_dict, such as `full_state_dict` or a plain torch module gives.

    No rank talks to another: each cuts its own shards out of the same `state`, which stays as it is.
    Raises ValueError if a tensor has not the shape of the whole parameter, RuntimeError as
    `torch.nn.Module.load_state_dict` does if `strict` and the names differ.
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
