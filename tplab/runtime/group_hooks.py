"""Hooks for calls in which ranks wait for each other without sending tensors, such as new_group and monitored_barrier.

All ranks must create the same groups in the same order. The recorder therefore compares these calls between ranks and
shows them on the board (the shared memory in which ranks announce what they're doing), as it does for collectives.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from tplab.runtime.diagnosis import NEW_GROUP
from tplab.runtime.recorder import Recorder

Active = Callable[[], Recorder | None]


def _wrap_new_group(active: Active) -> Callable[..., Any]:
    """Wrap the function that `new_group`, `new_subgroups` and `init_device_mesh` call."""
    original = distributed_c10d._new_group_with_tag

    def new_group(ranks: Any = None, *args: Any, use_local_synchronization: bool = False, **kwargs: Any) -> Any:
        recorder = active()
        world = tuple(range(dist.get_world_size()))
        given = world if ranks is None else tuple(int(rank) for rank in ranks)
        kwargs["use_local_synchronization"] = use_local_synchronization
        if recorder is None or (use_local_synchronization and recorder.rank not in given):
            return original(ranks, *args, **kwargs)
        members = tuple(sorted(given))
        if use_local_synchronization:  # torch derives the name from the number of groups so far, which must match
            number = len(distributed_c10d._world.pg_names)
            channel, signature, others = (
                f"{NEW_GROUP} {members}",
                f"ranks {list(members)}, as group {number + 1} of this rank",
                members,
            )
        else:
            channel, signature, others = NEW_GROUP, f"ranks {list(members)}", world
            if dist.group.WORLD.bound_device_id is not None:  # type: ignore[union-attr]
                members = world  # NCCL splits the communicator of all ranks
        entered = recorder.enter_call(NEW_GROUP, channel, signature, members, others)
        if recorder.rank not in members:  # torch returns a placeholder immediately
            return original(ranks, *args, **kwargs)
        with recorder.blocked_in(entered):
            group = original(ranks, *args, **kwargs)
        recorder.groups.created(group, entered.where)
        return group

    return new_group


def _wrap_method(name: str, active: Active) -> Callable[..., Any]:
    """Wrap a method of ProcessGroup that returns once all ranks of the group have called it."""
    original = getattr(ProcessGroup, name)

    def method(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        recorder = active()
        if recorder is None:
            return original(self, *args, **kwargs)
        members = tuple(dist.get_process_group_ranks(self))
        entered = recorder.enter_call(name, self.group_name, "", members, members, self)
        with recorder.blocked_in(entered):
            result = original(self, *args, **kwargs)
        recorder.groups.created(result, entered.where)  # a barrier returns nothing
        return result

    return method


def set_default_timeout(timeout: timedelta) -> None:
    """Make this the timeout of all groups that are created without one, such as those of a device mesh."""
    distributed_c10d._get_default_timeout = lambda backend: timeout


def install(active: Active) -> None:
    """Install the wrappers. While `active()` returns None, they only forward calls."""
    distributed_c10d._new_group_with_tag = _wrap_new_group(active)
    for name in ("monitored_barrier", "split_group"):
        setattr(ProcessGroup, name, _wrap_method(name, active))
