"""Chapter 02: modules that have a process group can be copied, but not pickled.

A process group is a set of connections between running processes, so it can be neither copied nor pickled. A copy of a
module uses the same group. A pickle, such as a file written by `torch.save(model)`, would lose the group, and a shard
without its group would compute as if it were the full layer.
"""

import copy
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size


class GroupModule(nn.Module):
    """Base class for modules with process groups among their attributes. Pickling them raises TypeError."""

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"a {type(self).__name__} belongs to this process and its process group, so it can't be pickled. Save "
            "full_state_dict(module), or use save_sharded; copy.deepcopy makes a copy"
        )

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
