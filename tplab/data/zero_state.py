"""Chapter 14: ZeRO's optimizer state in the format of a plain optimizer, so that any run can continue with it.

ZeRO's own state consists of one vector per bucket and rank, which may start or end in the middle of a parameter. With
another number of replicas, or with plain data parallelism, it's divided differently. So we save the state of each
parameter, and split it again when we load it:

    exp_avg of a bucket    rank 0 [n], rank 1 [n], ..   -> all-gather -> [p n] -> one tensor per parameter, on the CPU

We gather one bucket at a time. (torch: ZeroRedundancyOptimizer.consolidate_state_dict; Megatron's distributed
optimizer: "fully_reshardable".)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tplab.data.zero import Unit, ZeRO1
from tplab.data.zero3 import ZeRO3

State = dict[str, Any]


@contextmanager
def unsharded(optimizer: Optimizer | ZeRO1 | None) -> Iterator["Optimizer | FullOptimizer | None"]:
    """Context manager that gathers ZeRO-3's weights and yields the optimizer in the form that checkpoints need.

    All ranks of ZeRO's group must enter it together. Without ZeRO, it yields the optimizer unchanged.
    """
    with optimizer.gathered() if isinstance(optimizer, ZeRO3) else nullcontext():
        yield FullOptimizer(optimizer) if isinstance(optimizer, ZeRO1) else optimizer


class FullOptimizer:
    """Presents a ZeRO optimizer to checkpoints as a plain optimizer of the full parameters.

        full = FullOptimizer(zero)
        full.gather()                                           # on all ranks of ZeRO's group
        save_sharded("step-100", model, optimizer=full)         # on one replica's ranks
        load_sharded("step-100", model, optimizer=full)         # on all ranks, with any number of replicas

    Saving and loading need the full weights, too: with ZeRO-3, do both inside `with zero.gathered():`, or use
    `unsharded` for any optimizer.
    """

    def __init__(self, zero: ZeRO1) -> None:
        self.zero = zero
        self._state: dict[nn.Parameter, State] | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Copies of the optimizer's groups, with the full parameters. To change a learning rate, use zero.optimizer."""
        inner = self.zero.optimizer.param_groups
        return [{**group, "params": own} for group, own in zip(inner, self.zero.group_parameters, strict=True)]

    def gather(self) -> None:
        """Gather the state on every rank, in CPU memory, one bucket at a time. All ranks of ZeRO's group call this.

        Raises ValueError for a state tensor that is neither a scalar nor of the bucket's shape.
        """
        self._state = {}
        for unit in self.zero.units:
            for key, value in self.zero.optimizer.state[unit.shard].items():
                for parameter, own in zip(unit.parameters, _unsharded(unit, key, value), strict=True):
                    self._state.setdefault(parameter, {})[key] = own

    def state_dict(self) -> dict[str, Any]:
        """Return the gathered state in torch's format. Raises ValueError if `gather` hasn't been called."""
        if self._state is None:
            raise ValueError("call gather() on all ranks first: each of them has only a shard of ZeRO's state")
        numbers = self._numbers()
        groups = [{**group, "params": [numbers[p] for p in group["params"]]} for group in self.param_groups]
        return {"state": {numbers[parameter]: own for parameter, own in self._state.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's shards from the `state_dict` of a plain optimizer, or of a `FullOptimizer`. Nothing is sent.

        Raises ValueError if the param groups have different sizes, if only some parameters of a bucket have state, or
        if their steps differ, because a bucket has a single step.
        """
        numbers, inner = self._numbers(), self.zero.optimizer
        saved_lengths = [len(group["params"]) for group in state_dict["param_groups"]]
        own_lengths = [len(own) for own in self.zero.group_parameters]
        if saved_lengths != own_lengths:
            raise ValueError(
                f"the saved param_groups have {saved_lengths} parameters, these have {own_lengths}: make the groups as "
                "they were, and freeze the same parameters"
            )
        place = {id(shard): number for number, shard in enumerate(_all(g["params"] for g in inner.param_groups))}
        state: dict[int, State] = {}
        for unit in self.zero.units:
            given = [state_dict["state"].get(numbers[parameter], {}) for parameter in unit.parameters]
            own = {key: _shard(unit, key, [of.get(key) for of in given]) for key in dict.fromkeys(chain(*given))}
            if own:
                state[place[id(unit.shard)]] = own
        groups = zip(state_dict["param_groups"], inner.state_dict()["param_groups"], strict=True)
        numbered = [{**saved, "params": own["params"]} for saved, own in groups]
        inner.load_state_dict({"state": state, "param_groups": numbered})

    def _numbers(self) -> dict[nn.Parameter, int]:
        """Number the parameters as torch's `state_dict` does."""
        return {parameter: number for number, parameter in enumerate(_all(self.zero.group_parameters))}


def _unsharded(unit: Unit, key: str, value: Any) -> list[Any]:
    """Return one tensor per parameter of the unit, or the same value for each if it isn't a tensor with elements."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return [value.clone() if isinstance(value, Tensor) else value for _ in unit.parameters]
    if value.shape != unit.shard.shape:
        raise ValueError(
            f"the optimizer's {key} is {list(value.shape)}, the bucket {list(unit.shard.shape)}: ZeRO needs an "
            "optimizer that works element by element, such as AdamW or SGD"
        )
    full = value.new_empty(unit.flat.world_size * unit.flat.shard_numel)
    unit.flat.all_gather(value, full)
    return [view.to("cpu", copy=True) for view in unit.flat.views(full)]


def _shard(unit: Unit, key: str, values: Sequence[Any]) -> Any:
    """Return this rank's shard, given the values of all the unit's parameters. It undoes `_unsharded`."""
    missing = [list(shape) for shape, value in zip(unit.flat.shapes, values, strict=True) if value is None]
    if missing:
        raise ValueError(
            f"a bucket has no {key} for {len(missing)} of its {len(values)} parameters, {missing[:3]}: they weren't "
            "trained before. ZeRO updates all parameters of a bucket alike, so their state has to exist as well"
        )
    first = values[0]
    shapes = [value.shape if isinstance(value, Tensor) else None for value in values]
    if key == "step" or shapes != unit.flat.shapes:
        if any(value != first for value in values):
            found = sorted(set(map(float, values)))
            raise ValueError(f"{key} is {found} for the parameters of a bucket, but ZeRO has a single {key} for them")
        return first
    full = torch.zeros(unit.flat.world_size * unit.flat.shard_numel, dtype=first.dtype, device=unit.flat.device)
    for view, value in zip(unit.flat.views(full), values, strict=True):
        view.copy_(value)
    return unit.flat.shard(full).clone()


def _all(groups: Iterable[Sequence[nn.Parameter]]) -> list[nn.Parameter]:
    return list(chain(*groups))
