"""Chapter 10: the optimizer's state by parameter name, so that it can be sharded like the parameters.

`optimizer.state_dict()` numbers the parameters in the optimizer's order. A checkpoint that works for any number of
ranks contains what `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` returns for the unsharded model:

    {"state": {"up.weight": {"exp_avg": .., "exp_avg_sq": .., "step": ..}, ..},
     "param_groups": [{"lr": 0.001, .., "params": ["up.weight", ..]}]}

A tensor with the shape of its parameter, such as Adam's averages or SGD's momentum, is sharded if the parameter is. A
scalar, such as the step, is the same on all ranks. Anything else, such as Adafactor's averages over rows and columns,
mixes values from several ranks, so it can't be sharded.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tplab.checkpoint.files import gathered, names_under
from tplab.checkpoint.pieces import Pieces, blank, pieces, value_of
from tplab.tensor.sharding import Sharding, sharding_of
from tplab.tensor.wrappers import plain_parameters


class OptimizerState(Protocol):
    """The part of an optimizer that checkpoints use. Torch's optimizers and `tplab.data.FullOptimizer` have it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


GROUPS, STATE = ("optimizer", "param_groups"), ("optimizer", "state")


def optimizer_content(optimizer: OptimizerState, model: nn.Module, rank: int, world_size: int) -> dict[str, Any]:
    """Return the optimizer state to save, in the module docstring's format, with `Pieces` in place of tensors.

    Raises ValueError if a parameter isn't in the model, or if a tensor can't be sharded.
    """
    groups, packed, parameters = _groups(optimizer, model), optimizer.state_dict(), plain_parameters(model)
    names = list(chain(*groups))
    state: dict[str, dict[str, Any]] = {names[number]: {} for number in packed["state"]}
    for number, entries in packed["state"].items():
        name = names[number]
        for key, value in entries.items():
            if isinstance(value, Tensor):
                own = parameters[name]
                sharding = _checked_sharding(name, key, value.shape, own, own.shape)
                value = pieces(value, sharding, rank, world_size)
            state[name][key] = value
    return {
        "state": state,
        "param_groups": [{**g, "params": own} for g, own in zip(packed["param_groups"], groups, strict=True)],
    }


def group_places(metadata: Metadata) -> dict[str, Pieces | None]:
    """Return placeholders for the saved `param_groups`, which have parameter names and hyperparameters such as `lr`."""
    return {name: blank(metadata, name) for name in names_under(metadata, *GROUPS)}


def saved_groups(metadata: Metadata, loaded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the saved `param_groups`, given their placeholders after loading."""
    groups: dict[str | int, dict[str, Any]] = {}
    for name, (*_, number, key) in names_under(metadata, *GROUPS).items():
        groups.setdefault(number, {})[str(key)] = value_of(loaded[name])
    return list(groups.values())


def named_groups(optimizer: OptimizerState, model: nn.Module) -> list[dict[str, Any]]:
    """Return the optimizer's `param_groups` with only the entry `params`, which lists the parameters' names."""
    return [{"params": names} for names in _groups(optimizer, model)]


def of_all_stages(groups: list[dict[str, Any]], replica: ProcessGroup | None) -> list[dict[str, Any]]:
    """Return the `param_groups` of the full model, given those of each rank's pipeline stage.

    Raises ValueError if the stages have different numbers of groups, or if a group's options differ between stages.
    """
    of_ranks = [groups] if replica is None else gathered(groups, replica)
    if len({len(of_rank) for of_rank in of_ranks}) > 1:
        raise ValueError(
            f"the ranks' optimizers have {[len(of_rank) for of_rank in of_ranks]} param_groups. Make the same groups "
            "on every stage, even if one of them is empty there"
        )
    merged = []
    for alike in zip(*of_ranks, strict=True):
        options = [{key: value for key, value in group.items() if key != "params"} for group in alike]
        if any(other != options[0] for other in options):
            raise ValueError(f"the ranks have different options for a param_group: {options}")
        names = dict.fromkeys(chain.from_iterable(group["params"] for group in alike))
        merged.append({**options[0], "params": list(names)})
    return merged


def check_groups(groups: Sequence[Mapping[str, Any]], own_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless the saved groups match the optimizer's, with the same parameters in each."""
    own = [group["params"] for group in own_groups]
    if len(groups) != len(own):
        raise ValueError(
            f"the checkpoint's optimizer has {len(groups)} param_groups, this one has {len(own)}"
            + ("" if groups else ": save_sharded was called without optimizer")
        )
    for number, (saved, names) in enumerate(zip(groups, own, strict=True)):
        missing, unexpected = sorted(set(names) - set(saved["params"])), sorted(set(saved["params"]) - set(names))
        if missing or unexpected:
            raise ValueError(
                f"param_groups[{number}] has other parameters in the checkpoint: {missing[:5]} are not there, "
                f"{unexpected[:5]} are not in this optimizer's. Make the groups as they were when it was saved"
            )


def state_places(metadata: Metadata, model: nn.Module, rank: int, world_size: int) -> dict[str, Pieces | None]:
    """Return placeholders for the saved state of each parameter, sharded the way this rank needs it."""
    places, parameters = {}, plain_parameters(model)
    for name, (*_, parameter_name, key) in names_under(metadata, *STATE).items():
        if str(parameter_name) not in parameters:  # it's on another pipeline stage
            continue
        saved, parameter = metadata.state_dict_metadata[name], parameters[str(parameter_name)]
        places[name] = blank(metadata, name)
        if isinstance(saved, TensorStorageMetadata):
            sharding = sharding_of(parameter)
            whole = sharding.whole_shape(parameter.shape, world_size) if sharding else list(parameter.shape)
            sharding = _checked_sharding(str(parameter_name), str(key), saved.size, parameter, whole)
            if list(saved.size) == whole:
                shard = torch.zeros_like(parameter, dtype=saved.properties.dtype)
                places[name] = pieces(shard, sharding, rank, world_size)
    return places


def load_optimizer(
    optimizer: OptimizerState,
    model: nn.Module,
    metadata: Metadata,
    groups: Sequence[Mapping[str, Any]],
    loaded: Mapping[str, Any],
) -> None:
    """Load the optimizer's state from the filled placeholders, using the optimizer's own `load_state_dict`.

    Implementation choices (`fused`, `foreach`, `capturable`) aren't loaded, so they keep their current values.
    """
    own = _groups(optimizer, model)
    numbers = {name: number for number, name in enumerate(chain(*own))}
    state: dict[int, dict[str, Any]] = {}
    for name, (*_, parameter_name, key) in names_under(metadata, *STATE).items():
        if name in loaded:
            state.setdefault(numbers[str(parameter_name)], {})[str(key)] = value_of(loaded[name])
    numbered = [
        {**saved, **_implementation(group), "params": [numbers[n] for n in names]}
        for saved, names, group in zip(groups, own, optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": numbered})


def _implementation(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in ("fused", "foreach", "capturable") if key in group}


def _groups(optimizer: OptimizerState, model: nn.Module) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in plain_parameters(model).items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"the optimizer has a parameter {list(parameter.shape)} that isn't the model's: make it from the "
                    "parameters of this model, after the last change that replaces any"
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _checked_sharding(
    name: str, key: str, shape: Sequence[int], parameter: nn.Parameter, parameter_shape: Sequence[int]
) -> Sharding | None:
    """Return the sharding of a state tensor's parameter, or None for a scalar. Raises ValueError if shapes differ."""
    sharding = sharding_of(parameter)
    if sharding is None or len(shape) == 0:
        return None
    if list(shape) != list(parameter_shape):
        raise ValueError(
            f"the optimizer's {key} of {name} is {list(shape)}, the parameter {list(parameter_shape)}, and each rank "
            "has a shard of it: no telling what belongs to which. Adam, AdamW and SGD keep tensors that can be cut"
        )
    return sharding
