"""This module contains helpers that the checks of several chapters share, so that no chapter imports from another.

- random inputs: random_tensor
- two groups on four ranks: GROUPS, IN_GROUPS, member_of and make_group
- a question about a call that ignores its group: ask_about_group
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.notebooks.mistakes import shared


def random_tensor(generator: torch.Generator, *shape: int) -> Tensor:
    """Return a float64 CPU tensor of this shape with normally distributed elements."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


GROUPS = ((0, 2), (1, 3))
IN_GROUPS = "in groups [0, 2] and [1, 3]"
_made: dict[Any, list[Any]] = {}  # the groups of each default group


def member_of(p: int, groups: Sequence[Sequence[int]] | None) -> list[tuple[int, tuple[int, ...]]]:
    """For each rank from 0 to p - 1, return the index of its group and the ranks in that group."""
    groups = groups or (tuple(range(p)),)
    return [next((i, tuple(g)) for i, g in enumerate(groups) if rank in g) for rank in range(p)]


def make_group(groups: Sequence[Sequence[int]] | None) -> Any:
    """Return the process group that this rank belongs to, or None if there are no groups.

    The first call in a run creates all groups. Every rank has to call `new_group` for every group, even for groups that
    the rank doesn't belong to. Later calls return the same group, because each group has threads of its own, and dozens
    of known mistakes may run in one launch.
    """
    if not groups:
        return None
    key = dist.group.WORLD, tuple(map(tuple, groups))
    if key not in _made:
        _made[key] = [dist.new_group(list(ranks)) for ranks in groups]
    return next((group for group, ranks in zip(_made[key], groups, strict=True) if dist.get_rank() in ranks), None)


def ask_about_group(ask: str) -> str:
    """Return the question `ask`, preceded by a sentence saying that the ranks form two groups in this run."""
    return f"{shared('two groups')} {ask}"
