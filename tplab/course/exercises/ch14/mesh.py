"""The check for exercise 14.3, a rank's position in a (dp, pp, tp) mesh and the ranks that share a group with it."""

from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from tplab.course import checks
from tplab.runtime import device

Size = tuple[int, int, int]

AXES = ("dp", "pp", "tp")
SMALL = [(2, 2, 2), (1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)]
LARGER = [(3, 2, 4), (4, 3, 2), (2, 4, 8)]
ON_RANKS: dict[int, tuple[Size, tuple[str, ...]]] = {  # few meshes, because creating a group takes time
    1: ((1, 1, 1), ("tp",)),
    2: ((1, 2, 1), ("pp",)),
    4: ((2, 1, 2), ("tp", "dp")),
}
FORM = "every result has the form that was asked for"
IS_GROUP = "my_group gives a process group that this rank is in"
BY_ALL = "all ranks make the same groups in the same order"


def right_coordinates(size: Size) -> list[dict[str, int]]:
    """Return the coordinates of all ranks, found by counting. dp changes slowest and tp fastest."""
    return [dict(zip(AXES, place, strict=True)) for place in product(*map(range, size))]


def right_groups(axis: str, size: Size) -> list[list[int]]:
    """Return groups of ranks that agree in the other two coordinates, in axis order and sorted by their first rank."""
    places = right_coordinates(size)
    rest = [name for name in AXES if name != axis]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(tuple(place[name] for name in rest), []).append(rank)
    return sorted(groups.values())


def named(size: Size) -> str:
    return "dp = {}, pp = {}, tp = {}".format(*size)


def arithmetic(coordinates: Callable[..., Any], axis_groups: Callable[..., Any], size: Size) -> None:
    """Check `coordinates` and `axis_groups` for one mesh, in this process."""
    p = size[0] * size[1] * size[2]
    said: checks.Observed = {"coordinates": []}
    for rank in range(p):
        with checks.calling(f"coordinates({rank}, {', '.join(map(str, size))})"):
            said["coordinates"].append(coordinates(rank, *size))
    for axis in AXES:
        with checks.calling(f'axis_groups("{axis}", {", ".join(map(str, size))})'):
            said[f"groups of {axis}"] = axis_groups(axis, *size)
    said = {name: as_lists(value) for name, value in said.items()}
    right: checks.Observed = {"coordinates": right_coordinates(size)}
    right |= {f"groups of {axis}": right_groups(axis, size) for axis in AXES}
    said[FORM] = checks.Claim(wrong_form(said))
    if not said[FORM]:
        for axis in AXES:
            said[f"groups of {axis}"] = sorted(said[f"groups of {axis}"])
    checks.verify("14.3", p, [said], [right], questions=[question(said, size)], note=named(size), alone=True)


def as_lists(value: Any) -> Any:
    """Convert tuples and ranges to lists, and tensors to nested lists. Anything else is returned unchanged."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple, range)):
        return [as_lists(item) for item in value]
    return value


def wrong_form(said: checks.Observed) -> str:
    for place in said["coordinates"]:
        if not isinstance(place, dict) or set(place) != set(AXES):
            return f"coordinates gives {place!r}"[:100]
    for axis in AXES:
        groups = said[f"groups of {axis}"]
        if not isinstance(groups, list) or not all(isinstance(group, list) and group for group in groups):
            return f'axis_groups("{axis}", ...) gives {groups!r}'[:100]
        if not all(isinstance(rank, int) for group in groups for rank in group):
            return f'axis_groups("{axis}", ...) holds something else than ranks: {groups!r}'[:100]
    return ""


def question(said: checks.Observed, size: Size) -> checks.Question:
    """Return the question to ask about wrong results of `coordinates` and `axis_groups`."""
    if said[FORM]:
        return FORM_QUESTION
    dp, pp, tp = size
    places, ranks = said["coordinates"], list(range(dp * pp * tp))
    reversed_order = [dict(zip(AXES, place[::-1], strict=True)) for place in product(range(tp), range(pp), range(dp))]
    exchanged = [{"dp": i, "pp": d, "tp": t} for d, i, t in product(range(pp), range(dp), range(tp))]
    if places != right_coordinates(size):
        return TP_SLOWEST if places == reversed_order else EXCHANGED if places == exchanged else COORDINATES
    if any(sorted(rank for group in said[f"groups of {axis}"] for rank in group) != ranks for axis in AXES):
        return NOT_ONCE
    neighbors = [[rank, rank + 1] for rank in ranks[::2]]
    pipeline_of_neighbors = said["groups of tp"] == right_groups("tp", size) and said["groups of pp"] == neighbors
    return PIPELINE_OF_NEIGHBORS if pipeline_of_neighbors else OTHER_RANKS


FORM_QUESTION = checks.Question(
    lambda d: True,
    '`coordinates` returns {"dp": .., "pp": .., "tp": ..}, `axis_groups` a list of lists of ranks, one for each group. '
    "What does each last line return?",
)
TP_SLOWEST = checks.Question(
    lambda d: True,
    "Here neighbouring ranks differ in dp, and tp moves slowest. Which of the three sends most, and so should be "
    "between neighbours?",
)
EXCHANGED = checks.Question(
    lambda d: True,
    "dp and pp have changed places. Which one moves slowest when you count through the ranks?",
)
COORDINATES = checks.Question(
    lambda d: True,
    "Count through the ranks: tp goes 0, 1, .. first, then pp moves by one, and dp last. By what do you divide the "
    "rank for each of the three, and what is left over?",
)
NOT_ONCE = checks.Question(
    lambda d: True,
    "Every rank is in exactly one group of each axis, also in a group of its own where the axis has one rank. Which "
    "ranks are missing in yours, or there twice?",
)
PIPELINE_OF_NEIGHBORS = checks.Question(
    lambda d: True,
    "Neighbours are tensor-parallel. How far apart are the ranks of a pipeline?",
)
OTHER_RANKS = checks.Question(
    lambda d: True,
    "The ranks of a group agree in the two other coordinates and differ in this one; they stand in its order. Compare "
    "your groups with your coordinates.",
)


def meet(my_group: Callable[..., Any], size: Size, axes: tuple[str, ...]) -> list[checks.Observed]:
    """Record, for each axis, which groups this rank creates, which group it's in, and a sum over that group."""
    seen = []
    for axis in axes:
        made = asked_for(my_group, axis, size)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, made)
        if any(other != made for other in everyone):  # otherwise, ranks might wait for each other forever
            seen.append({"made": made})
            continue
        with checks.called_as(f'my_group("{axis}", {", ".join(map(str, size))})'):
            group = my_group(axis, *size)
        is_one = isinstance(group, dist.ProcessGroup)
        observed: checks.Observed = {"made": made}
        observed[IS_GROUP] = checks.Claim("" if is_one else f"rank {dist.get_rank()} got {group!r}"[:80])
        if is_one:
            total = torch.tensor([float(10 ** dist.get_rank())], dtype=torch.float64, device=device())
            dist.all_reduce(total, group=group)
            observed |= {"ranks of the group": dist.get_process_group_ranks(group), "sum over the group": total}
        seen.append(observed)
    return seen


def asked_for(my_group: Callable[..., Any], axis: str, size: Size) -> list[list[int]]:
    """Return the ranks of each group that `my_group` requests from dist.new_group, without creating any groups.

    Groups that are created with use_local_synchronization are left out.
    """
    made: list[list[int]] = []
    real = dist.new_group

    def new_group(ranks: Any = None, *args: Any, **options: Any) -> Any:
        if not options.get("use_local_synchronization"):
            made.append(list(range(dist.get_world_size()) if ranks is None else ranks))
        return object()

    dist.new_group = new_group
    try:
        with suppress(Exception):  # the real call will raise the same error
            my_group(axis, *size)
    finally:
        dist.new_group = real
    return made


def on_ranks(my_group: Callable[..., Any], p: int) -> None:
    size, axes = ON_RANKS[p]
    seen = checks.run_ranks(meet, p, my_group, size, axes, question=CRASH, stuck=MEMBERS_ONLY)
    for number, axis in enumerate(axes):
        observed = [on_rank[number] for on_rank in seen]
        for rank, mine in enumerate(observed):
            first, made = observed[0]["made"], mine["made"]
            mine[BY_ALL] = checks.Claim("" if first == made else f"rank 0 makes {first}, rank {rank} makes {made}")
        right = [expected_on(rank, axis, size) for rank in range(p)]
        checks.verify("14.3", p, observed, right, questions=GROUP_QUESTIONS, note=f"{named(size)}, axis {axis}")


def expected_on(rank: int, axis: str, size: Size) -> checks.Observed:
    ranks = next(group for group in right_groups(axis, size) if rank in group)
    total = torch.tensor([float(sum(10**other for other in ranks))], dtype=torch.float64)
    return {"ranks of the group": ranks, "sum over the group": total}


@checks.exercise("14.3", "Ranks of a mesh")
def ranks_of_a_mesh(
    coordinates: Callable[..., Any], axis_groups: Callable[..., Any], my_group: Callable[..., Any]
) -> checks.Verdict:
    for size in SMALL:
        arithmetic(coordinates, axis_groups, size)
    for p in checks.WORLD_SIZES:
        on_ranks(my_group, p)
    for size in LARGER:
        arithmetic(coordinates, axis_groups, size)
    return checks.Verdict("tp between neighbours, pp in between, dp across the largest distance.")


CRASH = (
    "`dist.new_group(ranks)` is called by every rank, also for a group that it is not in. What does it return there, "
    "and what do you do with that?"
)
MEMBERS_ONLY = (
    "`dist.new_group` has to be called by all ranks of the world, for every group, in the same order: also by those "
    "who are not in it. Which ranks call it in yours?"
)
GROUP_QUESTIONS = (
    checks.Question(lambda d: BY_ALL in d.names, MEMBERS_ONLY),
    checks.Question(
        lambda d: IS_GROUP in d.names,
        "Every rank makes all groups of the axis and keeps the one that it is in. `dist.new_group` gives the others "
        "something that is no group. Which of them do you return?",
    ),
    checks.Question(
        lambda d: True,
        "The group that came back holds other ranks than this rank's group of the axis. Do all ranks make all groups "
        "of the axis, in the same order, and does each keep the one with its own rank in it?",
    ),
)
