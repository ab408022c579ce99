"""A check as data: what an exercise tries with an answer, and what's right.

    exercise("3.2", "f", takes=["CopyToRegion"], trials=[operator("f", COPY, ADD, of="CopyToRegion")], passed="...")

A trial runs one answer in many cases on ranks (`OnRanks`) or calls it in this process (`forms.alone.Alone`). The
questions for wrong answers are in the exercise's table, `mistakes.md`. If an answer fails, the known mistakes in the
table run alongside it on the same ranks and inputs, all of them in a single launch.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from tplab.course.checks import layouts, twins
from tplab.course.checks.cases import WORLD_SIZES, Batch, Place, member_of, on_a_rank, title_of
from tplab.course.checks.choose import (
    about_groups,
    about_report,
    about_variant,
    ask_about_group,
    choose,
    explained,
)
from tplab.course.checks.differences import Differences, compare_ranks
from tplab.course.checks.ledger import failed, fresh_generator, note_right, note_the_device
from tplab.course.checks.messages import one_sided
from tplab.course.checks.observation import Observed, Seen
from tplab.course.checks.reference_answers import reference_answers
from tplab.course.checks.run_answer import TIMEOUT, how_it_ended, run_cases, run_ranks
from tplab.course.checks.twins import Twin
from tplab.course.feedback.verdict import CheckFailed
from tplab.course.notebooks.mistakes import Table, table
from tplab.runtime import record

Answers = Mapping[str, Any]  # {name: the learner's function or class}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What all trials have in common.

    of:   the name of the answer that this trial is about, or several names for a trial that gets a tuple of answers. By
          default, it's all answers of the exercise
    part: the section of the table, if the answers of an exercise have a section each, as in "scatter" for "3.3 scatter"
    """

    of: str | tuple[str, ...] = ()
    part: str = ""

    def table(self, number: str) -> Table:
        return table(f"{number} {self.part}".strip())

    def answer(self, answers: Answers) -> Any:
        """Return the answer that this trial is about, or a tuple if there are several."""
        if isinstance(self.of, str):
            return answers[self.of]
        chosen = tuple(answers[name] for name in self.of or answers)
        return chosen if len(chosen) > 1 else chosen[0]

    def check(self, number: str, answers: Answers) -> None:
        """Raise CheckFailed if the answer is wrong."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OnRanks(Trial):
    """A trial that runs the answer in many cases on ranks. See `cases` for the words *case* and *place*.

    cases:       instances of subclasses of `Case`, or a function that takes a world size and returns such instances.
                 Cases with process groups run only on four ranks
    draw, give, run    as in `cases`
    right:       (case, problem, place) -> the observations that are right on the rank at this place
    terms:       (case, problem, size) -> tensors by name, each as a list with one tensor for each of `size` ranks. A
                 wrong tensor is often a combination of these, such as the sum of x without one rank's
    world_sizes: in the order in which they're tried. Put the one that exposes mistakes best first
    without:     the variants of the case (its twins) that make no sense for this exercise, or a function that returns
                 these variants for a given case
    layouts_differ: whether only every other rank gets non-contiguous tensors in the variant of each case that uses such
                 tensors. Use this for an exercise whose text says that a collective needs contiguous tensors
    timeout:     the seconds that a launch may take before it counts as an endless loop
    tol:         the tolerance, as in `differences.compare_ranks`
    values_on_cpu: whether `run` may return tensors that it has created on the CPU
    late:        whether every case also runs with messages that arrive at the last moment (see `late`). Use this if the
                 answer starts messages or collectives and waits for them later
    """

    cases: Sequence[Any] | Callable[[int], Sequence[Any]]
    run: Callable[[Any, Any, Any, Any], Observed]
    right: Callable[[Any, Any, Place], Observed]
    draw: Callable[[Any, torch.Generator, int], Any] = lambda case, generator, size: None
    give: Callable[[Any, Any, Place], Any] = lambda case, problem, place: problem
    terms: Callable[[Any, Any, int], Mapping[str, Sequence[Any]]] = lambda case, problem, size: {}
    world_sizes: Sequence[int] = WORLD_SIZES
    timeout: float = TIMEOUT
    tol: float = 1e-9
    without: Collection[Twin] | Callable[[Any], Collection[Twin]] = ()
    values_on_cpu: bool = False
    layouts_differ: bool = False
    late: bool = False

    def check(self, number: str, answers: Answers) -> None:
        answer, own = self.answer(answers), self.table(number)
        name = getattr(answer, "__name__", "the answer")
        for batch in self.batches():
            runs = run_cases(
                on_a_rank, batch.world_size, (self.run, answer, self.values_on_cpu), batch.cases, batch.given,
                note=lambda case: title_of(case, name), question=lambda case, failure: self._about(case, failure, own),
                timeout=self.timeout,
            )  # fmt: skip
            for index, observed in enumerate(runs):
                tried = TriedCase(self, batch, index)
                note = title_of(tried.case, name)
                differences, names = tried.compare(observed)
                note_the_device(number, batch.world_size, observed, note)
                if differences:
                    known = cache(partial(tried.known_mistakes, number))
                    raise failed(number, differences, names, tried.question(own, observed, differences, known), note)
                note_right(batch.world_size, observed, names, note)

    def batches(self) -> Iterator[Batch]:
        """Yield the cases to run at each world size, with new random problems. The very first case is yielded alone.

        On two ranks, the others include every variant of every case.
        """
        for world_size in self.world_sizes:
            generator = fresh_generator()
            wanted = self.cases(world_size) if callable(self.cases) else self.cases
            here = [case for case in wanted if case.groups is None or world_size == 4]
            if world_size == twins.WORLD_SIZE:
                here += [
                    replace(case, twin=twin)
                    for twin in Twin
                    if self.late or twin is not Twin.LATE
                    for case in wanted
                    if case.groups is None
                    and twin not in (self.without(case) if callable(self.without) else self.without)
                ]
            for some in filter(None, (here[:1], here[1:]) if world_size == self.world_sizes[0] else (here,)):
                problems = [self._problems(case, world_size, generator) for case in some]
                given = [
                    [self._packed(case, problem, place) for problem, place in rows]
                    for case, rows in zip(some, problems, strict=True)
                ]
                yield Batch(world_size, some, problems, given)

    def _problems(self, case: Any, world_size: int, generator: torch.Generator) -> list[tuple[Any, Place]]:
        """Return a (problem, place) pair for every rank. Ranks in the same process group work on the same problem."""
        members = member_of(world_size, case.groups)
        size = len(members[0][1])
        drawn = [twins.rounded(case.twin, self.draw(case, generator, size)) for _ in case.groups or (0,)]
        return [(drawn[i], Place(ranks.index(rank), ranks, world_size)) for rank, (i, ranks) in enumerate(members)]

    def _packed(self, case: Any, problem: Any, place: Place) -> Any:
        index = place.index if self.layouts_differ else 0
        return layouts.packed(twins.given(case.twin, self.give(case, problem, place), index))

    def _about(self, case: Any, failure: CheckFailed, own: Table) -> str:
        """Return the question about a run that failed, or "" for the general one."""
        ended = how_it_ended(failure.__cause__)
        if case.twin:
            return "" if ended == "late" else twins.question(case.twin, failure.report)
        ask = about_report(own, failure.report, ended, note=title_of(case, "answer"), in_groups=bool(case.groups))
        return ask_about_group(ask) if ask and case.groups else ask


@dataclass(frozen=True)
class TriedCase:
    """One case of a batch: what's right in it, and the question for an answer that's wrong in it."""

    trial: OnRanks
    batch: Batch
    index: int

    @property
    def case(self) -> Any:
        return self.batch.cases[self.index]

    def right(self, observed: Seen) -> Seen:
        """Return what's right on each rank, which may depend on what the ranks observed."""
        found = []
        for problem, place in self.batch.problems[self.index]:
            place = replace(place, observed=[observed[rank] for rank in place.ranks])
            found.append(twins.expected(self.case.twin, self.trial.right(self.case, problem, place)))
        return found

    def compare(self, observed: Seen) -> tuple[Differences, list[str]]:
        """Return the differences from what's right, and the names of all values that were compared."""
        case, (problem, _) = self.case, self.batch.problems[self.index][0]
        return compare_ranks(
            self.batch.world_size, observed, self.right(observed), tol=twins.tolerance(case.twin, self.trial.tol),
            note=title_of(case, "answer"),
            terms={} if case.twin or case.groups else self.trial.terms(case, problem, self.batch.world_size),
        )  # fmt: skip

    def question(
        self, own: Table, observed: Seen, differences: Differences, known: Callable[[], Mapping[str, Seen]]
    ) -> str:
        """Return the question for an answer that's wrong in this case.

        known: returns what the known mistakes observe, by name. It's only called if the question depends on them
        """
        twin, groups = self.case.twin, self.case.groups
        if twin:
            return about_variant(differences)
        if groups and (ask := about_groups(own)):
            return ask_about_group(ask)
        right = self.right(observed)
        ask = choose(
            own, differences, lambda mistake: explained(known().get(mistake.name), observed, differences, right)
        )
        return ask_about_group(ask) if groups else ask

    def known_mistakes(self, number: str, timeout: float = TIMEOUT) -> dict[str, Seen]:
        """Run the known mistakes of the trial's table. Return what the ranks observed, unless a mistake fails."""
        mistakes = [mistake for mistake in self.trial.table(number).mistakes if not mistake.fails]
        answers = [self.trial.answer(reference_answers(number, mistake.of)) for mistake in mistakes]
        try:
            seen = observed_by_each(self.trial, answers, self.batch.only([self.index]), timeout)
        except CheckFailed:  # on a machine where one of them doesn't end, symptoms have to do
            return {}
        names = [mistake.name for mistake in mistakes]
        return {name: ranks for name, (ranks,) in zip(names, seen, strict=True) if not ended(ranks)}


ERROR = "error"


def ended(observed: Seen) -> bool:
    """Return whether an answer ended in an error on any rank."""
    return any(ERROR in rank for rank in observed)


def observed_by_each(
    trial: OnRanks, answers: Sequence[Any], batch: Batch, timeout: float = TIMEOUT
) -> list[list[Seen]]:
    """Run several answers in a batch of cases. For each answer and each case, return what each rank observed.

    An answer that raises an exception observes {ERROR: text}. All answers share a launch, but a launch ends after an
    answer that leaves half of a message behind, because the other half might be an answer that runs after it.
    """
    found: list[list[Seen]] = []
    while left := answers[len(found) :]:
        given = trial.run, left, trial.values_on_cpu
        ranks = run_ranks(_each_on_a_rank, batch.world_size, given, batch.cases, batch.given, timeout=timeout)
        found += [
            [[rank[number][index] for rank in ranks] for index in range(len(batch.cases))]
            for number in range(len(ranks[0]))
        ]
    return found


def _each_on_a_rank(
    given: tuple[Any, Sequence[Any], bool], cases: Sequence[Any], data: Sequence[Sequence[Any]]
) -> list[list[Observed]]:
    run, answers, values_on_cpu = given
    seen: list[list[Observed]] = []
    for answer in answers:
        seen.append([])
        with record() as section, warnings.catch_warnings(action="ignore"):  # nobody wrote these answers
            for case, mine in zip(cases, data, strict=True):
                try:
                    seen[-1] += on_a_rank((run, answer, values_on_cpu), [case], [mine])
                except Exception as error:
                    seen[-1].append({ERROR: f"{type(error).__name__}: {error}"})
        if one_sided(section):
            break
    return seen


@dataclass(frozen=True)
class Exercise:
    """An exercise and its check.

    takes:  the names of the answers that the check takes, as the reference answer defines them
    trials: what the check tries, one after the other, or a function that takes {name: answer} and returns the trials
    passed: the sentences that the learner reads if the answer passes
    theirs: the names of tplab's functions that solve the exercise, in addition to those with an answer's name
    """

    number: str
    title: str
    takes: Sequence[str]
    trials: Sequence[Trial] | Callable[[Answers], Sequence[Trial]]
    passed: str
    theirs: Sequence[str] = ()

    def trials_of(self, answers: Answers) -> Sequence[Trial]:
        """Return what the check tries with these answers."""
        return self.trials(answers) if callable(self.trials) else self.trials


EXERCISES: dict[str, Exercise] = {}  # those of the chapters that were imported


def exercise(
    number: str,
    title: str,
    *,
    takes: Sequence[str],
    trials: Sequence[Trial] | Callable[[Answers], Sequence[Trial]],
    passed: str,
    theirs: Sequence[str] = (),
) -> None:
    """Register an exercise and its check. For the arguments, see `Exercise`."""
    EXERCISES[number] = Exercise(number, title, takes, trials, passed, theirs)
