"""One answer, many cases: run it on 1, 2 and 4 ranks, in groups too, and compare every rank with plain torch.

A check consists of its cases and four functions; `check_cases` does the rest.

    draw    (case, generator, size)        the full problem that the `size` ranks of one group work on
    give    (case, problem, place)         what the rank at this place gets of it
    run     (answer, case, given, group)   the answer at work on a rank; returns what was observed
    expect  (case, problem, place)         what is right there, and what known mistakes would give

The first case runs in a launch of its own, because its message is the clearest. The others share a second launch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.checks.check_vocabulary import (
    IN_GROUPS,
    ask_about_group,
    by_name,
    group_question,
    make_group,
    member_of,
)
from tplab.course.checks.exercises import WORLD_SIZES, fresh_generator
from tplab.course.checks.observation import Observed
from tplab.course.checks.recorded_traffic import Traffic
from tplab.course.checks.run_answer import run_cases
from tplab.course.checks.verification import Question, verify
from tplab.course.feedback.verdict import CheckFailed

Groups = tuple[tuple[int, ...], ...]
Mistakes = dict[str, dict[str, Any]]  # {observation: {what the mistake is: what it gives}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to build or call the answer.

    groups: the ranks of each process group, for a case on four ranks; None: all ranks, in the default group
    """

    groups: Groups | None = None

    def describe(self, name: str) -> str:
        """The call as a learner would write it, or what is special about it."""
        return name


@dataclass(frozen=True)
class Place:
    """Where a rank stands: `index` among the `ranks` of its group, which is part of `world_size` ranks.

    observed: what the ranks of the group observed, by index; only known to `expect`, which may need drawn masks
    """

    index: int
    ranks: tuple[int, ...]
    world_size: int
    observed: tuple[Any, ...] = ()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def traffic(self, *calls: tuple[str, int]) -> Traffic:
        """What a rank of this group should send, as (collective, elements); nothing where it is alone."""
        return Traffic.expected(self.world_size, *calls, group=self.ranks)

    def part(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a tensor that is split evenly over its group."""
        return tensor.chunk(self.size, dim)[self.index]


@dataclass(frozen=True)
class Expected:
    """For one rank: the right value of each observation, and what known mistakes would give."""

    right: Observed
    mistakes: Mistakes = field(default_factory=dict)


def check_cases(
    number: str,
    answer: Any,
    cases: Sequence[Any] | Callable[[int], Sequence[Any]],
    *,
    draw: Callable[[Any, torch.Generator, int], Any],
    run: Callable[[Any, Any, Any, Any], Observed],
    expect: Callable[[Any, Any, Place], Expected],
    give: Callable[[Any, Any, Place], Any] = lambda case, problem, place: problem,
    questions: Sequence[Question] | Callable[[Any, Sequence[Observed]], Sequence[Question]],
    crash: str | None | Callable[[Any], str | None] = None,
    stuck: str | None | Callable[[Any], str | None] = None,
    whose_group: str = "",
    ask_instead: Callable[[CheckFailed], str | None] = lambda failure: None,
    world_sizes: Sequence[int] = WORLD_SIZES,
    tol: float = 1e-9,
) -> None:
    """Run every case at each world size, and raise CheckFailed about the first that is wrong.

    cases:        subclasses of Case, or a function from the world size to them; those in groups run on four ranks only
    questions:    the first that fits is asked; also as a function of the case and what all ranks observed
    crash:        asked where the answer raises, also as a function of the case
    stuck:        asked where the ranks wait for each other, likewise
    whose_group:  asked where only a case in groups goes wrong: which call was not given its group?
    ask_instead:  a better question for a run that failed, if its report gives one
    world_sizes:  in this order, so that the world size that shows a mistake best comes first
    tol:          as for `verify`
    """
    name = getattr(answer, "__name__", "the answer")

    def note(case: Any) -> str:
        return " ".join(filter(None, [case.describe(name), IN_GROUPS if case.groups else ""]))

    def asked(question: str | None | Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        def choose(case: Any) -> str | None:
            if case.groups and whose_group:
                return ask_about_group(whose_group)
            return question(case) if callable(question) else question

        return choose

    for world_size in world_sizes:
        generator = fresh_generator()
        wanted = cases(world_size) if callable(cases) else cases
        here = [case for case in wanted if case.groups is None or world_size == 4]
        for batch in filter(None, (here[:1], here[1:])):
            problems = [_problems(case, world_size, draw, generator) for case in batch]
            given = [[give(case, *problem) for problem in rows] for case, rows in zip(batch, problems, strict=True)]
            runs = run_cases(
                _on_a_rank, world_size, (run, answer), batch, given,
                note=note, question=asked(crash), stuck=asked(stuck), ask_instead=ask_instead,
            )  # fmt: skip
            for case, rows, observed in zip(batch, problems, runs, strict=True):
                expected = [
                    expect(case, problem, replace(place, observed=tuple(observed[rank] for rank in place.ranks)))
                    for problem, place in rows
                ]
                own = questions(case, observed) if callable(questions) else questions
                verify(
                    number, world_size, observed, [one.right for one in expected],
                    lookalikes=by_name([one.mistakes for one in expected]),
                    questions=[group_question(whose_group), *own] if case.groups and whose_group else own,
                    note=note(case), tol=tol,
                )  # fmt: skip


def _problems(case: Any, world_size: int, draw: Any, generator: torch.Generator) -> list[tuple[Any, Place]]:
    """For each rank: the problem that its group works on, and where the rank stands."""
    members = member_of(world_size, case.groups)
    drawn = [draw(case, generator, len(members[0][1])) for _ in case.groups or (0,)]
    return [(drawn[i], Place(ranks.index(rank), ranks, world_size)) for rank, (i, ranks) in enumerate(members)]


def _on_a_rank(given: tuple[Any, Any], cases: Sequence[Any], data: Sequence[Sequence[Any]]) -> list[Observed]:
    run, answer = given
    return [
        run(answer, case, mine[dist.get_rank()], make_group(case.groups))
        for case, mine in zip(cases, data, strict=True)
    ]
