"""This module contains helpers that the checks of several chapters share, so that no chapter imports from another.

- random inputs: random_tensor
- two groups on four ranks: GROUPS, IN_GROUPS, member_of and make_group
- a question about a call that ignores its group: ask_about_group and group_question
- when to ask a question: kind_is, has_kind, has_no_gradient, differs, changed, and INPUTS_QUESTION
- values that common mistakes would produce: Lookalikes, by_name

An observation is a named value, such as "dx", that a check compares with its expected value on every rank.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.checks.differences import Differences
from tplab.course.checks.verification import Question
from tplab.course.notebooks.mistakes import shared

Lookalikes = Mapping[str, Mapping[str, Sequence[Tensor]]]


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


def by_name(rows: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, list[Any]]]:
    """Merge one {name: {description: value}} dictionary per rank into {name: {description: [value on rank 0, ...]}}."""
    return {name: {label: [row[name][label] for row in rows] for label in rows[0][name]} for name in rows[0]}


def kind_is(name: str, *kinds: str) -> Callable[[Differences], bool]:
    """Return a predicate that tests whether the observation `name` differs in one of these ways.

    The predicate is False if the observation differs in one way on some ranks and in another way on other ranks.
    """
    return lambda differences: differences.kind(name) in kinds


def has_kind(name: str, *kinds: str) -> Callable[[Differences], bool]:
    """Return a predicate that tests whether the observation `name` differs in one of these ways on any rank."""
    return lambda d: any(difference.name == name and difference.kind in kinds for difference in d)


def has_no_gradient(*names: str) -> Callable[[Differences], bool]:
    """Return a predicate that tests whether any of these gradients is absent on at least one rank.

    A gradient counts as absent if it's None, if all its elements are zero, or if the check couldn't compute it.
    """
    return lambda d: any(
        difference.name in names and (difference.kind in ("none", "zeros") or difference.kind == "not run")
        for difference in d
    )


def differs(*names: str) -> Callable[[Differences], bool]:
    """Return a predicate that tests whether all of these observations are wrong. Others may be wrong, too."""
    return lambda d: set(names) <= d.names


def changed(differences: Differences) -> bool:
    """Return whether the learner's code wrote into one of the caller's tensors."""
    return "changed" in differences.kinds()


def ask_about_group(ask: str) -> str:
    """Return the question `ask`, preceded by a sentence saying that the ranks form two groups in this run."""
    return f"{shared('two groups')} {ask}"


def group_question(ask: str) -> Question:
    return Question(lambda d: True, ask_about_group(ask))


INPUTS_QUESTION = Question(
    changed,
    "The caller still needs the tensors that were passed to your code, for example for a residual connection. Which "
    "line writes into one of these tensors instead of creating a new one?",
)
