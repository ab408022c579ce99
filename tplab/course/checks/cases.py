"""Test cases, and running an answer in them: on 1, 2 and 4 ranks, in process groups, and in variants of each case.

A trial (`trials.OnRanks`) consists of its cases and these functions:

    draw    (case, generator, size)        creates the full problem, such as random tensors, for a group of `size` ranks
    give    (case, problem, place)         returns the part of the problem that the rank at this place receives
    run     (answer, case, given, group)   runs the answer on a rank and returns the observations
    right   (case, problem, place)         computes what's right on the rank at this place, usually with plain PyTorch

The very first case gets its own launch, because most wrong answers fail in it, and their question then comes soonest.
After that, all cases of a world size share a launch. On two ranks, this launch also runs several variants of every case
(its twins). Each of these variants changes one condition (see `twins`). For example, a variant may use bfloat16, run
under no_grad, or use non-contiguous tensors.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.checks import layouts, twins
from tplab.course.checks.default_device import DefaultDevice
from tplab.course.checks.messages import messages_kept
from tplab.course.checks.observation import Claim, Observed
from tplab.course.checks.recorded_traffic import Traffic
from tplab.course.checks.twins import Twin

Groups = tuple[tuple[int, ...], ...]

WORLD_SIZES = (1, 2, 4)
GROUPS = ((0, 2), (1, 3))
IN_GROUPS = "in groups [0, 2] and [1, 3]"
SETTINGS = "your code leaves torch's settings as they were"
_made: dict[Any, list[Any]] = {}  # the groups of each default group


def random_tensor(generator: torch.Generator, *shape: int) -> Tensor:
    """Return a float64 CPU tensor of this shape with normally distributed elements."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to construct the learner's module or call their function.

    groups: the ranks in each process group, or None for the default group, which contains all ranks.
    twin:   the condition that a variant of the case changes, or None for the original case. `OnRanks.batches` sets
            this field when it creates the variants, which are called twins.
    """

    groups: Groups | None = None
    twin: Twin | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that a check's `run` function should use for the modules and tensors it creates for this case."""
        return twins.dtype_of(self.twin)

    def describe(self, name: str) -> str:
        """Return the call as a learner would write it, or a note on what's special about this case."""
        return name


@dataclass(frozen=True)
class Place:
    """The position of a rank in its process group.

    index:      the rank's position in `ranks`.
    ranks:      all ranks in the process group.
    world_size: the total number of ranks across all groups.
    observed:   the observations of each rank in `ranks`. Only `right` receives these observations, because what's right
                may depend on the dropout masks that the ranks drew.
    """

    index: int
    ranks: tuple[int, ...]
    world_size: int
    observed: Sequence[Any] = ()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def traffic(self, *calls: tuple[str, int]) -> Traffic:
        """Return the traffic that a check expects on each rank of this group, as in `traffic(("all_reduce", 96))`.

        The number in each pair is the number of elements in the collective's message. A group with only one rank
        generates no traffic.
        """
        return Traffic.expected(self.world_size, *calls, group=self.ranks)

    def part(self, tensor: Tensor, dim: int = 0, blocks: int = 1) -> Tensor:
        """Split a tensor evenly along `dim` across the ranks of the group, and return this rank's shard.

        A tensor may consist of several blocks along `dim`. If so, the shard consists of a slice of each block.
        """
        slices = [block.chunk(self.size, dim)[self.index] for block in tensor.chunk(blocks, dim)]
        return torch.cat(slices, dim) if blocks > 1 else slices[0]


def title_of(case: Any, name: str) -> str:
    """Return a case's title for a headline, as in "f of x with 3 dimensions in bfloat16"."""
    notes = [case.describe(name), IN_GROUPS if case.groups else "", twins.note(case.twin)]
    return " ".join(filter(None, notes))


@dataclass(frozen=True)
class Batch:
    """Cases that share a launch.

    problems: for each case, a (problem, place) pair for every rank
    given:    for each case, the packed data for every rank
    """

    world_size: int
    cases: Sequence[Any]
    problems: Sequence[Sequence[tuple[Any, Place]]]
    given: Sequence[Sequence[Any]]

    def only(self, indices: Sequence[int]) -> "Batch":
        """Return a batch of some of the cases."""
        lists = (self.cases, self.problems, self.given)
        return Batch(self.world_size, *([each[index] for index in indices] for each in lists))


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


def on_a_rank(given: tuple[Any, Any, bool], cases: Sequence[Any], data: Sequence[Sequence[Any]]) -> list[Observed]:
    """Run an answer in several cases on this rank, and return its observations in each case.

    given: the check's `run` function, the answer, and whether `run` may return tensors that it created on the CPU
    data:  for each case, the packed data for every rank
    """
    run, answer, values_on_cpu = given
    dtype = torch.get_default_dtype()
    seen = []
    for case, mine in zip(cases, data, strict=True):
        # A twin creates its tensors on the same devices as the original case, so watching it would only take time
        watch = DefaultDevice() if case.twin is None else None
        try:
            with torch.enable_grad(), twins.observed_as(case.twin), watch or nullcontext():
                for _ in range(2 if case.twin is Twin.AGAIN else 1):
                    # Each run gets a copy of the data, because an answer may modify its arguments in place
                    data_of_rank = layouts.unpacked(*deepcopy(mine[dist.get_rank()]))
                    with messages_kept():
                        observed = run(answer, case, data_of_rank, make_group(case.groups))
                changed = [] if torch.is_grad_enabled() else ["gradients are switched off"]
                if torch.get_default_dtype() != dtype:
                    changed.append(f"the default dtype is {torch.get_default_dtype()}")
        finally:  # the next case starts with the original settings
            torch.set_default_dtype(dtype)
        claims = {} if watch is None else watch.claims({} if values_on_cpu else observed)
        if changed:
            claims[SETTINGS] = Claim(" and ".join(changed))
        seen.append(twins.observed(case.twin, observed) | claims)
    return seen
