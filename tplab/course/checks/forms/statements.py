"""Statements about an answer that have to be true, such as "a size that can't be divided evenly is refused"."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tplab.course.checks.cases import Case
from tplab.course.checks.observation import Claim
from tplab.course.checks.trials import OnRanks
from tplab.course.checks.twins import Twin


@dataclass(frozen=True)
class Statement(Case):
    """A statement, which a failed check shows as the name of an observation.

    problem: takes the answer and returns why the statement isn't true, or "". It runs on every rank
    note:    what the check tries, for the headline, as in "scatter of 9 columns"
    """

    says: str
    problem: Callable[[Any], str]
    note: str

    def describe(self, name: str) -> str:
        return self.note


def statements(*said: Statement, **options: Any) -> OnRanks:
    """Return the trial of statements about an answer, on two ranks. For the options, see `OnRanks`."""
    return OnRanks(
        cases=said, run=lambda answer, case, given, group: {case.says: Claim(case.problem(answer))},
        right=lambda case, problem, place: {}, world_sizes=(2,), without=tuple(Twin), **options,
    )  # fmt: skip


def refuses(call: Callable[[Any], Any]) -> Callable[[Any], str]:
    """Return a problem for a `Statement`: whether call(answer) fails to raise ValueError."""

    def problem(answer: Any) -> str:
        try:
            returned = call(answer)
        except ValueError:
            return ""
        except AssertionError:
            return "it raised AssertionError instead of ValueError"
        shape = getattr(returned, "shape", None)
        return "it was accepted" + (f", and the result has shape {list(shape)}" if shape is not None else "")

    return problem
