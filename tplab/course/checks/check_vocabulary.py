"""This module contains helpers that the checks of several chapters share, so that no chapter imports from another.

- random inputs: random_tensor
- two groups on four ranks: GROUPS, IN_GROUPS, member_of, make_group, and group_question for an ignored group
- when to ask a question: kind_is, has_kind, has_no_gradient, differs, changed, and INPUTS_QUESTION
- values that common mistakes would produce: Lookalikes, by_name

An observation is a named value that a check compares on every rank, such as "dx".
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.checks.verification import Differences, Question

Lookalikes = Mapping[str, Mapping[str, Sequence[Tensor]]]


def random_tensor(generator: torch.Generator, *shape: int) -> Tensor:
    """Return a float64 CPU tensor of this shape with normally distributed elements."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


GROUPS = ((0, 2), (1, 3))
IN_GROUPS = "in groups [0, 2] and [1, 3]"


def member_of(p: int, groups: Sequence[Sequence[int]] | None) -> list[tuple[int, tuple[int, ...]]]:
    """For each rank from 0 to p - 1, return the index of its group and the ranks in that group."""
    groups = groups or (tuple(range(p)),)
    return [next((i, tuple(g)) for i, g in enumerate(groups) if rank in g) for rank in range(p)]


def make_group(groups: Sequence[Sequence[int]] | None) -> Any:
    """Create every group, because each rank must call `new_group` for all of them, and return this rank's group.

    If there are no groups, return None.
    """
    made = [dist.new_group(list(ranks)) for ranks in groups or ()]
    return next((group for group, ranks in zip(made, groups or (), strict=True) if dist.get_rank() in ranks), None)


def by_name(rows: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, list[Any]]]:
    """Merge every rank's {name: {description: value}} into a single {name: {description: [value on rank 0, ...]}}."""
    return {name: {label: [row[name][label] for row in rows] for label in rows[0][name]} for name in rows[0]}


def kind_is(name: str, *kinds: str) -> Callable[[Differences], bool]:
    """Return a predicate that tests whether `name` differs in one of these ways, and in no other way on any rank."""
    return lambda differences: differences.kind(name) in kinds


def has_kind(name: str, *kinds: str) -> Callable[[Differences], bool]:
    """Return a predicate that tests whether `name` differs in one of these ways on some rank."""
    return lambda d: any(difference.name == name and difference.kind in kinds for difference in d)


def has_no_gradient(*names: str) -> Callable[[Differences], bool]:
    """Return a predicate that tests whether any of these gradients is None, zero or not computed on some rank."""
    return lambda d: any(
        difference.name in names and (difference.kind in ("none", "zeros") or difference.kind == "not run")
        for difference in d
    )


def differs(*names: str) -> Callable[[Differences], bool]:
    """Return a predicate that tests whether all of these observations differ. Other observations may differ too."""
    return lambda d: set(names) <= d.names


def changed(differences: Differences) -> bool:
    """Return whether the learner's code wrote into one of the caller's tensors."""
    return "changed" in differences.kinds()


_TWO_GROUPS = "In this run, the four ranks form two groups of two, and each group has its own data."


def ask_about_group(ask: str) -> str:
    """Return the question for an answer that's wrong only in groups. `ask` points to the call that lacks its group."""
    return f"{_TWO_GROUPS} {ask}"


def group_question(ask: str) -> Question:
    return Question(lambda d: True, ask_about_group(ask))


INPUTS_QUESTION = Question(
    changed,
    "The caller still needs the tensors that were passed to your code, for example for a residual connection. Which "
    "line writes into one of these tensors instead of creating a new one?",
)
