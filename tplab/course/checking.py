"""Exercises and their checks: what `check("4.1", ColumnParallelLinear)` does, and the pieces that check authors use.

A check is a function in a module of the chapter's package `tplab/course/chNN/`:

    @exercise("4.1", "ColumnParallelLinear: forward")
    def column_forward(layer_class) -> Verdict:
        for p in WORLD_SIZES:
            generator = fresh_generator()
            x, dy, ... = torch.randn(..., generator=generator, dtype=torch.float64), ...
            seen = run_ranks(program, p, layer_class, x, dy)       # what `observe` returned on each rank
            expected = [{"out": ..., "dx": ..., "forward traffic": Traffic.expected(p)} for rank in range(p)]
            verify("4.1", p, seen, expected, questions=[Question("dx", "Who adds up the ranks' parts of dx?")])
        return Verdict("with a bias that is not zero")

Inputs are random and different on every rank, expected values come from plain torch in float64 on one process, and
every observation is compared on every rank before anything is said.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from tplab.course.ledger import current, open_ledger
from tplab.course.observing import Observed, Snapshot, observe, portable
from tplab.course.reports import has_frames, readable_report, readable_traceback
from tplab.course.traffic import Call, Traffic, traffic
from tplab.course.verdict import CheckFailed, Verdict, names
from tplab.course.verifying import Differences, Question, verify
from tplab.runtime import Deadlock, RankError, Results, launch

__all__ = [
    "WORLD_SIZES",
    "Call",
    "CheckFailed",
    "Differences",
    "Observed",
    "Question",
    "Snapshot",
    "Traffic",
    "Verdict",
    "chapter_module",
    "check",
    "exercise",
    "fail",
    "fresh_generator",
    "must_refuse",
    "observe",
    "run_ranks",
    "traffic",
    "verify",
]

WORLD_SIZES = (1, 2, 4)

_STUB = re.compile(r"exercise \d+\.\w+")
_FAILED = "Read the last line first, then the line of your own code above it. What did that line expect to find?"
_CALLED = "What does the docstring of the exercise say goes in, and what comes out?"
_STUCK = "Does every rank enter the same collectives in the same order, with tensors of the same shape?"


@dataclass(frozen=True)
class Exercise:
    number: str
    title: str
    function: Callable[..., Verdict]


_exercises: dict[str, Exercise] = {}


def exercise(number: str, title: str) -> Callable[[Callable[..., Verdict]], Callable[..., Verdict]]:
    """Register a function as the check of an exercise."""

    def register(function: Callable[..., Verdict]) -> Callable[..., Verdict]:
        _exercises[number] = Exercise(number, title, function)
        return function

    return register


def chapter_module(number: str | int) -> Any:
    """The package `tplab.course.chNN` of a chapter, or of the chapter that an exercise's number starts with."""
    text = str(number).split(".")[0]
    name = f"tplab.course.ch{int(text):02d}" if text.isdecimal() else ""
    try:
        return importlib.import_module(name)
    except (ModuleNotFoundError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != name:
            raise
        raise ValueError(
            f"there is no chapter {text!r}: write the number as in the heading, for example '4.1'"
        ) from None


def check(number: str, *answers: Any, seed: int | None = None) -> Verdict:
    """Check the learner's answer to an exercise.

    Returns a verdict. Raises CheckFailed with the explanation, or NotImplementedError("exercise 4.1") where the answer
    is still the stub, here or on a rank. `seed`: the inputs of an earlier failure, named in its message.
    """
    chapter_module(number)
    if number not in _exercises:
        raise ValueError(f"there is no exercise {number!r} in this chapter")
    asked = _exercises[number]
    with open_ledger(number, seed) as ledger:
        try:
            with torch.enable_grad():
                verdict = asked.function(*answers)
        except Exception as error:
            failure = _failure(number, error)
            if isinstance(failure, CheckFailed):
                failure.exercise = number
            if isinstance(failure, CheckFailed) and ledger.generators:
                arguments = ", ".join([f'"{number}"', *map(_name, answers), f"seed={ledger.seed}"])
                failure.footnote = f"The same inputs again: check({arguments})"
            raise failure from (None if failure is error else error)
    if not isinstance(verdict, Verdict):
        raise TypeError(f"the check of exercise {number} must return a Verdict, not {type(verdict).__name__}")
    if not ledger.compared:
        raise RuntimeError(f"the check of exercise {number} compared nothing")
    where = f", on every rank at p = {', '.join(map(str, sorted(ledger.passed)))}" if ledger.passed else ""
    return replace(verdict, exercise=number, title=asked.title, compared=f"Right: {', '.join(ledger.compared)}{where}.")


def _name(answer: Any) -> str:
    """What the learner calls a function or a class; "..." for anything without such a name."""
    name = getattr(answer, "__name__", "")
    return name if name.isidentifier() else "..."


def _failure(number: str, error: Exception) -> Exception:
    """What `check` raises when the exercise's check raised `error`."""
    if isinstance(error, CheckFailed):
        return error
    if isinstance(error, NotImplementedError) and _STUB.fullmatch(str(error)):
        return NotImplementedError(str(error))
    report = readable_traceback(error)
    headline = f"Exercise {number}: your code raised {type(error).__name__}."
    return CheckFailed(headline, report=report, question=_FAILED if has_frames(report) else _CALLED)


def fresh_generator() -> torch.Generator:
    """Random inputs that are new in every check; the seed stands in every failure's message."""
    ledger = current()
    ledger.generators += 1
    return torch.Generator().manual_seed(ledger.seed * 1000 + ledger.generators)


def run_ranks(program: Callable[..., Any], p: int, *args: Any, question: str | None = None) -> Results:
    """`launch(program, p, args=args)` for checks: results[r] is what program(*args) returned on rank r.

    A rank that fails becomes CheckFailed with the launcher's report and the question; a stub on a rank becomes the
    stub's own NotImplementedError.
    """
    try:
        return launch(_portable_result, p, args=(program, args))
    except RankError as error:
        stub = _STUB.fullmatch(str(error.cause_message or "").strip())
        if error.cause_type == "NotImplementedError" and stub:
            raise NotImplementedError(stub[0]) from None
        stuck = isinstance(error, Deadlock)
        what = "the ranks wait for each other" if stuck else f"your code fails on rank {error.rank}"
        start = f"Exercise {current().exercise}, p = {p}" if current().exercise else f"p = {p}"
        report = readable_report(str(error))
        general = _STUCK if stuck else _FAILED if has_frames(report) else _CALLED
        headline = f"{start}: {what}{current().passed_before(p)}."
        raise CheckFailed(headline, report=report, question=question or general) from error


def _portable_result(program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return portable(program(*args))


def fail(number: str, what: str, question: str, report: str = "") -> NoReturn:
    """Fail a check for a reason that `verify` can't see."""
    raise CheckFailed(f"Exercise {number}: {what}", question=question, report=report)


def must_refuse(
    number: str,
    call: Callable[[], Any],
    question: str,
    *,
    error: type[Exception] = ValueError,
    says: Sequence[object] = (),
    what: str = "this",
) -> None:
    """`call` must raise `error`, with every item of `says` in its message.

    what: names the call in the failure's message, "divide(10, 4)"
    """
    try:
        result = call()
    except NotImplementedError:
        raise
    except error as raised:
        unsaid = [str(item) for item in says if str(item) not in str(raised)]
        if unsaid:
            fail(
                number,
                f"{what} raises {error.__name__}, but its message does not name {names(unsaid)}.",
                question,
                str(raised),
            )
    except Exception as raised:
        got = f"{type(raised).__name__}: {raised}"
        fail(number, f"{what} should raise {error.__name__}; it raised something else.", question, got)
    else:
        got = f"a tensor of shape {list(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)[:80]
        fail(number, f"{what} should raise {error.__name__}; it returned {got}.", question)
    current().compared["the refusal"] = None
