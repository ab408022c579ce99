"""The check of a function that needs no ranks: it's called in this process, and so are the known mistakes."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from tplab.course.checks import twins
from tplab.course.checks.choose import about_report, about_variant, choose, explained
from tplab.course.checks.describe import describe
from tplab.course.checks.differences import Differences, compare_ranks
from tplab.course.checks.ledger import current, failed, fresh_generator, note_right, note_the_device
from tplab.course.checks.observation import Claim, Observed, Seen
from tplab.course.checks.reference_answers import reference_answers
from tplab.course.checks.run_answer import as_failure
from tplab.course.checks.trials import Answers, Trial
from tplab.course.checks.twins import Twin
from tplab.course.feedback.verdict import CheckFailed, names
from tplab.course.notebooks.mistakes import Mistake, Table


@dataclass(frozen=True)
class Call:
    """One call of the answer.

    given: whatever `run` and `right` need to know about the call
    note:  the call in words, for the headline
    p:     the number of ranks that the call is about, or 0 if it isn't about ranks
    alone: whether the call has a single result. Otherwise, it has one for each of the p ranks
    twin:  the condition that this call changes, such as the dtype, or None
    shows: what a learner whose answer fails should see beside the differences, such as the shapes of all weights, or a
           function that draws it from what was observed
    """

    given: Any
    note: str
    p: int = 0
    alone: bool = True
    twin: Twin | None = None
    shows: str | Callable[[Seen], str] = ""


@dataclass(frozen=True, kw_only=True)
class Alone(Trial):
    """A trial that calls the answer in this process.

    calls: (generator) -> the calls to try
    run:   (answer, call) -> what was observed, for each rank or, if the call is `alone`, once
    right: (call) -> the right observations, in the same form
    tol:   the tolerance, as in `differences.compare_ranks`
    """

    calls: Callable[[torch.Generator], Iterable[Call]]
    run: Callable[[Any, Call], Seen]
    right: Callable[[Call], Seen]
    tol: float = 1e-9

    def check(self, number: str, answers: Answers) -> None:
        answer, own = self.answer(answers), self.table(number)
        for call in self.calls(fresh_generator()):
            note = f"{call.note} {twins.note(call.twin)}".strip()
            observed = self._observed(number, own, answer, call, note)
            expected = self.right(call)
            differences, names = compare_ranks(
                call.p, observed, expected, tol=twins.tolerance(call.twin, self.tol), alone=call.alone, note=note
            )
            note_the_device(number, call.p, observed, note)
            if differences:
                ask = self._question(number, own, call, observed, expected, differences)
                failure = failed(number, differences, names, ask, note)
                failure.report = call.shows(observed) if callable(call.shows) else call.shows
                raise failure
            note_right(call.p, observed, names, note, call.alone)

    def _observed(self, number: str, own: Table, answer: Any, call: Call, note: str) -> Seen:
        try:
            return self._run(answer, call)
        except Exception as error:
            failure = as_failure(number, error, f"{note} raised", twins.question(call.twin) if call.twin else "")
            if isinstance(failure, CheckFailed) and not call.twin:
                failure.question = about_report(own, failure.report, "crash", note=note) or failure.question
            raise failure from (None if failure is error else error)

    def _run(self, answer: Any, call: Call) -> Seen:
        """Run an answer on a copy of what it's given, because it may write into that."""
        return self.run(answer, replace(call, given=deepcopy(call.given)))

    def _question(
        self, number: str, own: Table, call: Call, observed: Seen, expected: Seen, differences: Differences
    ) -> str:
        if call.twin:
            return about_variant(differences)

        @cache
        def known(mistake: Mistake) -> Seen | None:
            try:
                with warnings.catch_warnings(action="ignore"):  # nobody wrote these answers
                    return self._run(self.answer(reference_answers(number, mistake.of)), call)
            except Exception:  # the mistake ends in an error here, so the answer does something else
                return None

        return choose(
            own, differences,
            lambda mistake: 0 if mistake.fails else explained(known(mistake), observed, differences, expected),
        )  # fmt: skip


def one(observed: Observed) -> Seen:
    """Return the observations of a call that's `alone`."""
    return [observed]


def refusals(says: str, calls: Sequence[tuple[str, Callable[[Any], Any], Sequence[object]]], **options: Any) -> Alone:
    """Return the trial that every one of the calls raises ValueError.

    says:  what's true of a right answer, as in "a size that can't be divided evenly is refused"
    calls: (the call in words, a function that takes the answer and makes the call, what the error's message must name)
    """

    def run(answer: Any, call: Call) -> Seen:
        make, named = call.given
        claim = Claim(_not_refused(partial(make, answer), named))
        current().compared["the error"] = None
        return one({says: claim})

    return Alone(
        calls=lambda generator: [Call((make, named), words) for words, make, named in calls], run=run,
        right=lambda call: [{}], **options,
    )  # fmt: skip


def _not_refused(call: Callable[[], Any], named: Sequence[object]) -> str:
    """Return why a call doesn't raise ValueError with a message that names what it must, or "" if it does.

    An error from min() or max() doesn't count, because its message is about an empty list instead of the actual cause.
    """
    try:
        returned = call()
    except NotImplementedError:
        raise
    except ValueError as error:
        unsaid = [str(item) for item in named if str(item) not in str(error)]
        if str(error).startswith(("min() ", "max() ")):
            return "it raises ValueError, but the message complains about an empty list instead of the actual cause"
        return f"it raises ValueError, but the message doesn't mention {names(unsaid)}" if unsaid else ""
    except Exception as error:
        return f"it should raise ValueError, but it raised {type(error).__name__}"
    return f"it should raise ValueError, but it returned {describe(returned)}"


def in_other_conditions(call: Call) -> Iterable[Call]:
    """Yield the call, and the same call in float32, in bfloat16, and on tensors that aren't contiguous."""
    for twin in twins.ALONE:
        yield replace(call, twin=twin)
