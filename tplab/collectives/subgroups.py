"""Chapter 01: split a process group into smaller ones without involving the other ranks of the run.

On NCCL, `dist.new_group` involves the other ranks. With a device bound to each rank, as in `launch`, it splits the
communicator of all ranks, so the ranks that call it wait forever unless all ranks do. `dist.split_group` splits the
group's own communicator instead, but only NCCL has it. On gloo, and on NCCL without bound devices,
`new_group(use_local_synchronization=True)` involves only the members.

torch derives a group's name from the number of groups that a rank is in. If the ranks of a group have created different
numbers of groups, they use different names for the next one. On gloo, they would wait for each other forever, so
`split` raises an error.

Source: PyTorch 2.13, distributed_c10d.py, split_group() and _new_process_group_helper().
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from tplab.runtime.hooks import unrecorded


def split(group: ProcessGroup | None, parts: Sequence[Sequence[int]]) -> ProcessGroup:
    """Create a process group for each part of `group`, and return the one that this rank is in.

    group    the group to split (None: all ranks); all its ranks must call this with the same parts
    parts    the ranks of each part, counted within `group`; each rank must be in exactly one part

    Raises ValueError if a rank isn't in exactly one part, and RuntimeError if the ranks have created different numbers
    of groups so far.
    """
    group = group or dist.group.WORLD
    assert group is not None
    listed = sorted(rank for part in parts for rank in part)
    if listed != list(range(group.size())):
        raise ValueError(
            f"parts {[list(part) for part in parts]} should have each of {group.size()} ranks exactly once"
        )
    _check_numbers_of_groups(group)
    if dist.get_backend(group) == "nccl" and dist.group.WORLD.bound_device_id is not None:  # type: ignore[union-attr]
        made = dist.split_group(group, [sorted(part) for part in parts])
        assert made is not None
        return made
    own = next(part for part in parts if group.rank() in part)
    ranks = [dist.get_global_rank(group, rank) for rank in sorted(own)]
    return dist.new_group(ranks, backend=dist.get_backend_config(group), use_local_synchronization=True)


def _check_numbers_of_groups(group: ProcessGroup) -> None:
    numbers: list[int | None] = [None] * group.size()
    with unrecorded():
        dist.all_gather_object(numbers, len(distributed_c10d._world.pg_names), group)
    if len(set(numbers)) > 1:
        raise RuntimeError(
            f"ranks {dist.get_process_group_ranks(group)} have created different numbers of process groups, {numbers}. "
            "Have each of them create the same number before they create one together"
        )
