"""Run every mistake of an exercise's table as an answer, and find out which question it gets.

Mistakes that run to their end share one launch per world size and batch of cases. A mistake marked "(fails)" runs by
itself, like a learner's answer, and so do all mistakes of an exercise whose trials depend on the answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

from tplab.course.checks import exercises
from tplab.course.checks.cases import Batch
from tplab.course.checks.check_vocabulary import ask_about_group
from tplab.course.checks.default_device import MADE_THERE
from tplab.course.checks.exercises import registered
from tplab.course.checks.ledger import open_ledger
from tplab.course.checks.reference_answers import reference_answers
from tplab.course.checks.trials import ERROR, OnRanks, judge, observed_by_each
from tplab.course.feedback.verdict import CheckFailed
from tplab.course.notebooks.mistakes import Mistake, Table, path_of, shared, tables
from tplab.course.notebooks.numbering import chapter_of

Observations = list[dict[str, Any]]  # of each rank, in a case
FEW = 6  # cases per launch: a launch costs about as much as the calls of one mistake in so many cases
PASSES, FAILS = "it passes", "it ends in an error, so it should be marked (fails)"


def questions(number: str, seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """Yield (mistake, the question it should get, the question it gets) for every mistake in an exercise's tables."""
    trials = registered(number).trials
    together = not callable(trials) and all(isinstance(trial, OnRanks) for trial in trials)
    sections = {trial.table(number).title: trial.table(number) for trial in trials} if together else {}
    for title, own in (sections or _sections_of(number)).items():
        here = [trial for trial in trials if trial.table(number).title == title] if together else []
        asked = _asked_together(number, own, here, crc32(f"{number} {seed}".encode()) % 10**6) if together else {}
        for row in own.rows:
            for mistake in row.mistakes:
                name = f"{mistake.where} {mistake.name}"
                gets = asked[mistake.name] if mistake.name in asked else _asked_alone(number, mistake, seed)
                yield name, row.ask, gets.removeprefix(ask_about_group(""))


def _sections_of(number: str) -> dict[str, Table]:
    found = tables(path_of(chapter_of(number)))
    return {title: each for title, each in found.items() if title.split()[0] == number}


def _asked_alone(number: str, mistake: Mistake, seed: int) -> str:
    answers = reference_answers(number, mistake.of)
    try:
        exercises._run(number, tuple(answers.values()), crc32(f"{mistake.name} {seed}".encode()) % 10**6)
    except CheckFailed as failure:
        return failure.question
    return PASSES


def _asked_together(number: str, own: Table, trials: list[OnRanks], seed: int) -> dict[str, str]:
    """Return {mistake: question} for the mistakes of a table that run to their end."""
    mistakes = {mistake.name: reference_answers(number, mistake.of) for mistake in own.mistakes if not mistake.fails}
    asked: dict[str, str] = {}
    on_the_cpu: set[str] = set()
    with open_ledger(number, seed):
        for trial in trials:
            answers = {name: trial.answer(named) for name, named in mistakes.items()}
            for batch in _in_small(trial.batches(trial.answer(reference_answers(number)))):
                seen = Seen(trial, batch, answers, [name for name in answers if name not in asked])
                for name in seen.waiting:
                    asked |= _first_question(trial, own, batch, name, seen)
                    on_the_cpu |= {name} if any(_on_the_cpu(case) for case in seen.waiting[name]) else set()
    return {name: asked.get(name, shared("device") if name in on_the_cpu else PASSES) for name in mistakes}


def _in_small(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Split batches into cases and their twins, a few at a time, because most mistakes have their question soon."""
    for batch in batches:
        for twins in (False, True):
            chosen = [index for index, case in enumerate(batch.cases) if bool(case.twin) == twins]
            for start in range(0, len(chosen), FEW):
                few = chosen[start : start + FEW]
                lists = (batch.cases, batch.problems, batch.given)
                yield Batch(batch.world_size, *([each[index] for index in few] for each in lists))


class Seen:
    """What mistakes observe in a batch of cases.

    Those that wait for their question run in all cases. The others are only what a wrong answer is compared with, so
    they run in a case when somebody asks for them.
    """

    def __init__(self, trial: OnRanks, batch: Batch, answers: Mapping[str, Any], waiting: Sequence[str]) -> None:
        self.trial, self.batch = trial, batch
        self.waiting = {**dict.fromkeys(waiting, []), **self._run(batch, {name: answers[name] for name in waiting})}
        self.others = {name: answer for name, answer in answers.items() if name not in waiting}
        self._by_case: dict[int, dict[str, list[Observations]]] = {}

    def known(self, mistake: Mistake, index: int) -> Observations | None:
        """Return what each rank observed in a case, or None if the mistake didn't run to its end."""
        if mistake.name in self.others and index not in self._by_case:
            case = replace(self.batch, cases=[self.batch.cases[index]], given=[self.batch.given[index]])
            self._by_case[index] = self._run(case, self.others)
        if mistake.name in self.others:
            ranks = self._by_case[index].get(mistake.name, [None])[0]
        else:
            ranks = self.waiting[mistake.name][index] if self.waiting.get(mistake.name) else None
        return None if ranks is None or any(ERROR in rank for rank in ranks) else ranks

    def _run(self, batch: Batch, answers: Mapping[str, Any]) -> dict[str, list[Observations]]:
        """Return, for each answer, what each rank observed in each case. An answer that ends the launch is left out."""
        if not answers:
            return {}
        try:
            return dict(zip(answers, observed_by_each(self.trial, list(answers.values()), batch), strict=True))
        except CheckFailed:
            names = list(answers)
            if len(names) == 1:
                return {}
            halves = names[: len(names) // 2], names[len(names) // 2 :]
            runs = [self._run(batch, {each: answers[each] for each in half}) for half in halves]
            return runs[0] | runs[1]


def _first_question(trial: OnRanks, own: Table, batch: Batch, name: str, seen: Seen) -> dict[str, str]:
    if not seen.waiting[name]:
        return {name: FAILS}
    for index, observed in enumerate(seen.waiting[name]):
        if any(ERROR in rank for rank in observed):
            return {name: f"{FAILS}: {observed}"}
        differences, _, ask = judge(trial, own, batch, index, observed, partial(seen.known, index=index))
        if differences:
            return {name: ask}
    return {}


def _on_the_cpu(observed: Observations) -> bool:
    return any(rank.get(MADE_THERE) for rank in observed)
