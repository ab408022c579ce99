"""Chapter 01: split a process group into smaller ones without involving the other ranks of the run.

`dist.new_group` involves them on NCCL: with a device bound to each rank, as in `launch`, it splits the communicator of
all ranks, so all of them must call it, or those that do wait forever. `dist.split_group` splits the communicator of the
group instead. Only NCCL has it. On gloo, and on NCCL without bound devices, `new_group(use_local_synchronization=True)`
involves the members only.

torch derives a group's name from how many groups a rank is in. If ranks of a group have created different numbers of
groups, their names for the next one differ. On gloo they would wait for each other, so this is an error.

Source: PyTorch 2.13, distributed_c10d.py, split_group() and _new_process_group_helper().
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from tplab.runtime.hooks import unrecorded


def split(group: ProcessGroup | None, parts: Sequence[Sequence[int]]) -> ProcessGroup:
    """Create a process group for each part of `group`, and return the one that this rank is in.

    group    the ranks that call this, together and with the same parts (None: all ranks)
    parts    ranks within `group`. Each of them is in exactly one part.

    Raises ValueError if it isn't, and RuntimeError if the ranks have created different numbers of groups so far.
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
