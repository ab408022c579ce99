"""Chapter 02: modules that have a process group and can still be copied and pickled.

A process group is a set of connections between running processes, so it can be neither copied nor pickled. A copy of a
module uses the same group. A pickle, such as a file written by `torch.save(model)`, stores the ranks of the group
instead. Unpickling then looks for a group with these ranks in the current process. If there is none, or if the process
has a different rank, it raises RuntimeError, because a shard without its group would compute as if it were the full
layer.
"""

import copy
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, distributed_c10d

from tplab.collectives.by_hand import rank_and_size


class SavedGroup(NamedTuple):
    """Replaces a process group in a pickle. It has the members' global ranks and the pickling process's global rank."""

    ranks: tuple[int, ...]
    rank: int


class GroupModule(nn.Module):
    """Base class for modules with process groups among their attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: _saved(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kind = type(self).__name__
        super().__setstate__({name: _restored(value, kind) for name, value in state.items()})

    def __deepcopy__(self, memo: dict) -> Self:
        twin = self.__new__(type(self))
        memo[id(self)] = twin
        memo.update({id(value): value for value in self.__dict__.values() if isinstance(value, ProcessGroup)})
        nn.Module.__setstate__(twin, copy.deepcopy(self.__dict__, memo))
        return twin


def group_ranks(group: ProcessGroup | None = None) -> tuple[int, ...]:
    """Return the global ranks of a process group, in the group's order, or (0,) if there isn't any process group."""
    rank_and_size(group)  # raises ValueError on a rank that isn't a member
    return tuple(dist.get_process_group_ranks(group)) if dist.is_available() and dist.is_initialized() else (0,)


def wrong_process(kind: str, pickled: str) -> RuntimeError:
    rank, world_size = rank_and_size()
    return RuntimeError(
        f"this {kind} was pickled {pickled}, and this process is rank {rank} of {world_size}, without such a group. "
        "Unpickle each rank's file on the same rank, after creating the same groups. To change the number of ranks, "
        "save the full_state_dict, or use save_sharded"
    )


def _saved(value: Any) -> Any:
    return SavedGroup(group_ranks(value), dist.get_rank()) if isinstance(value, ProcessGroup) else value


def _restored(value: Any, kind: str) -> Any:
    if not isinstance(value, SavedGroup):
        return value
    if dist.is_available() and dist.is_initialized() and dist.get_rank() == value.rank:
        for group in distributed_c10d._world.pg_map:
            if isinstance(group, ProcessGroup) and tuple(dist.get_process_group_ranks(group)) == value.ranks:
                return group
    raise wrong_process(kind, f"on rank {value.rank} with a group of ranks {list(value.ranks)}")
