"""Run the check for an exercise, as in `check("4.1", ColumnParallelLinear)`.

The modules in a chapter's package `tplab/course/exercises/chNN/` register its checks with `trials.exercise`:

    exercise("4.1", "...", takes=["ColumnParallelLinear"], trials=COLUMN.trials([Built()]), passed="...")

Inputs are random and differ between ranks. A check computes the expected values with plain PyTorch in float64, in a
single process. It compares every observation on every rank before it reports anything.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from tplab.course.checks.ledger import Ledger, open_ledger
from tplab.course.checks.run_answer import as_failure
from tplab.course.checks.trials import EXERCISES, Exercise, Trial
from tplab.course.checks.used_functions import tplabs_own, wrong_part
from tplab.course.feedback.tracebacks import readable_traceback
from tplab.course.feedback.verdict import CheckFailed, CheckPassed
from tplab.course.feedback.waiting import watch
from tplab.course.notebooks.numbering import package, parse_chapter
from tplab.runtime.failures import Interrupted

_failed: dict[str, tuple[Any, ...]] = {}  # exercise -> the answers that failed its check when it last ran


def registered(number: str) -> Exercise:
    """Return an exercise of a chapter. Raises ValueError if there is none with this number."""
    chapter_module(number)
    if number not in EXERCISES:
        raise ValueError(f"there is no exercise {number!r} in this chapter")
    return EXERCISES[number]


def chapter_module(number: str | int) -> Any:
    """Import the package `tplab.course.exercises.chNN` that a chapter or an exercise belongs to, and return it.

    Raises ValueError if there's no such chapter.
    """
    text = str(number).split(".")[0]
    chapter = parse_chapter(text) if isinstance(number, str) else number
    name = "" if chapter is None else f"tplab.course.exercises.{package(chapter)}"
    try:
        return importlib.import_module(name)
    except (ModuleNotFoundError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != name:
            raise
        raise ValueError(
            f"there is no chapter {text!r}. Write the number as it appears in the heading, for example '4.1'"
        ) from None


def check(number: str, *answers: Any, seed: int | None = None) -> CheckPassed:
    """Check the learner's answer to an exercise and return the verdict.

    Raises CheckFailed if the answer is wrong, and NotImplementedError("exercise 4.1") if the answer is still a stub.
    On a notebook page, an unobtrusive box appears instead of the NotImplementedError (see `feedback.waiting`). Raises
    ValueError for an unknown exercise, and TypeError for the wrong number of answers. To repeat a failed check with the
    same inputs, pass the `seed` from its message.
    """
    exercise = registered(number)
    if len(answers) != len(exercise.takes):
        raise TypeError(
            f"the check for exercise {number} takes {', '.join(exercise.takes)}, but you passed {len(answers)} answers"
        )
    try:
        ledger = try_answers(number, answers, seed)
    except CheckFailed as failure:
        _failed.pop(number, None)  # an answer may use an earlier version of itself
        failure.question = wrong_part(answers, _failed) or failure.question
        _failed[number] = answers
        raise
    _failed.pop(number, None)
    if not ledger.compared:
        raise RuntimeError(f"the check of exercise {number} compared nothing")
    note = exercise.passed
    if own := tplabs_own(answers, exercise.theirs):
        note = f"Your answer passes, but it uses tplab's own {own}. Now write {own} yourself. {note}".strip()
    return CheckPassed(number, exercise.title, note, ledger.told())


def try_answers(number: str, answers: tuple[Any, ...], seed: int | None, trials: Sequence[Trial] = ()) -> Ledger:
    """Try answers in all trials of an exercise, or only in the given ones. Return the ledger.

    Raises CheckFailed if the answer is wrong, and NotImplementedError if the answer is still a stub.
    """
    exercise = registered(number)
    given = dict(zip(exercise.takes, answers, strict=True))
    with open_ledger(number, seed) as ledger:
        try:
            with torch.enable_grad():
                for trial in trials or exercise.trials_of(given):
                    trial.check(number, given)
            if ledger.afterwards:
                raise ledger.afterwards
        except KeyboardInterrupt as stop:
            here = str(stop) or readable_traceback(stop).strip("\n").removesuffix("\nKeyboardInterrupt")
            raise Interrupted(f"the check of exercise {number} was stopped here:\n{here}") from None
        except (Exception, SystemExit) as error:
            failure = as_failure(number, error)
            if isinstance(failure, CheckFailed):
                failure.exercise = number
            if isinstance(failure, CheckFailed) and ledger.generators:
                arguments = ", ".join([f'"{number}"', *map(_name, answers), f"seed={ledger.seed}"])
                failure.footnote = f"To try the same inputs again: check({arguments})"
            raise failure from (None if failure is error else error)
    return ledger


def _name(answer: Any) -> str:
    """Return the name of the learner's function or class, or "..." for anything without a name."""
    name = getattr(answer, "__name__", "")
    return name if name.isidentifier() else "..."


watch()  # the first cell of every chapter imports this module, so this call takes effect before any other cell runs
