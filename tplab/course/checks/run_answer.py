"""Run the learner's code. If the code fails, report what the check tried, which exception the code raised, and where.

as_failure   turn an exception raised in this process into a CheckFailed
run_ranks    run a program on p ranks
run_cases    run several cases of a program on p ranks, and name the case that failed
called_as    show the call if the learner's function raises an exception on a rank
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from tplab.course.checks.ledger import current
from tplab.course.checks.observation import portable
from tplab.course.feedback.tracebacks import readable_report, readable_traceback
from tplab.course.feedback.verdict import CheckFailed
from tplab.course.notebooks.mistakes import shared
from tplab.course.notebooks.numbering import EXERCISE
from tplab.runtime import Deadlock, RankError, Results, launch

TIMEOUT = 60.0  # seconds that a launch may take if the check doesn't say otherwise
PLACE = 8  # bytes per rank in the file that says which case it has begun
_STUB = re.compile(rf"exercise {EXERCISE}")
_DTYPES_MEET = re.compile(
    r"different dtypes|same dtype|dtypes? to match|scalar type|grad_dtype|dtypes? (do not|don't) match"
)


def as_failure(
    number: str, error: Exception | SystemExit, what: str = "your code raised", question: str = ""
) -> Exception:
    """Convert an exception raised by the learner's code into the one that the check should raise.

    Most exceptions are converted to CheckFailed, but a stub's NotImplementedError stays a NotImplementedError. The
    failure asks `question`, unless the exception is about dtypes. Without a question, it asks a general one.
    """
    if isinstance(error, CheckFailed):
        return error
    if isinstance(error, NotImplementedError) and _STUB.fullmatch(str(error)):
        return NotImplementedError(str(error))
    report = readable_traceback(error)
    headline = f"Exercise {number}: {what} {type(error).__name__}."
    return CheckFailed(headline, report=report, question=_about(report, question))


def _about(report: str, question: str = "") -> str:
    """Return a question about dtypes if the report complains about dtypes. Otherwise, return `question`.

    If there's none, return a general question, which depends on whether the report mentions any line of code.
    """
    if _DTYPES_MEET.search(report):
        return shared("mixed dtypes")
    return question or shared("failed" if ", line " in report else "called")


def run_ranks(
    program: Callable[..., Any],
    p: int,
    *args: Any,
    note: str = "",
    timeout: float = TIMEOUT,
) -> Results:
    """Run a check's program on p ranks with `launch`. results[r] is what program(*args) returned on rank r.

    If a rank fails, `run_ranks` raises CheckFailed with the launcher's report and a general question. If the ranks
    don't finish within `timeout` seconds, the question is about an endless loop. If a rank calls a stub, `run_ranks`
    raises the stub's NotImplementedError. `note` says what the check tried, for the headline, as in
    "ColumnParallelLinear(12, 8)".
    """
    try:
        return launch(_portable_result, p, args=(program, args), timeout=timeout)
    except RankError as error:
        message = str(error.cause_message or "").strip()
        if error.cause_type == "NotImplementedError" and _STUB.fullmatch(message):
            raise NotImplementedError(message) from None
        raise _failed_run(error, p, note) from error


def how_it_ended(error: BaseException | None) -> str:
    """Return how a failed launch ended: "late", "stuck" if the ranks were waiting for each other, or "crash"."""
    if isinstance(error, RankError) and error.cause_type == "timeout":
        return "late"
    return "stuck" if isinstance(error, Deadlock) else "crash"


def _failed_run(error: RankError, p: int, tried: str) -> CheckFailed:
    """Return the failure for a launch that failed."""
    report, ended, ledger = readable_report(str(error)), how_it_ended(error), current()
    if ended == "crash":
        where = "a rank" if error.rank is None else f"rank {error.rank}"
        what, question = f"your code fails on {where}", _about(report)
    else:
        waiting = "the ranks are waiting for each other"
        what, question = waiting if ended == "stuck" else "the ranks didn't finish in time", shared(ended)
    where = ", ".join(filter(None, [ledger.exercise and f"Exercise {ledger.exercise}", f"p = {p}", tried]))
    return CheckFailed(f"{where}: {what}.", report=report, question=question)


@dataclass(frozen=True)
class Watched:
    """Cases for ranks. While a rank goes through them, it writes the index of each case that it begins into a file."""

    cases: Sequence[Any]
    path: str

    def __iter__(self) -> Iterator[Any]:
        with open(self.path, "r+b") as file:
            for index, case in enumerate(self.cases):
                os.pwrite(file.fileno(), index.to_bytes(PLACE, "little"), PLACE * dist.get_rank())
                yield case

    def reached(self, p: int, error: BaseException | None) -> int:
        """Return the index of the case that failed: the one that the rank which raised an error had begun.

        If no rank raised one, it's the earliest case that one of the p ranks was in.
        """
        with open(self.path, "rb") as file:
            begun = [int.from_bytes(file.read(PLACE), "little") for _ in range(p)]
        if isinstance(error, RankError) and not isinstance(error, Deadlock) and error.rank is not None:
            return begun[error.rank]
        return min(begun)


def run_cases(
    program: Callable[..., Any],
    p: int,
    answer: Any,
    cases: Sequence[Any],
    data: Sequence[Any],
    *,
    note: Callable[[Any], str],
    question: Callable[[Any, CheckFailed], str],
    timeout: float = TIMEOUT,
) -> Iterator[list[Any]]:
    """Run `program(answer, cases, data)` on p ranks, and yield each case's results from all ranks.

    The program goes through the cases in order and returns a list with one result per case. All cases share one launch.
    If that launch fails, `run_cases` looks up which case the ranks had reached. It runs the cases before this one, this
    case alone, and the cases after it, until a case fails on its own. The failure message uses `note` to describe the
    failing case. It asks the question that `question` returns for the case and its failure, or the general one from
    `run_ranks` if that's "".

    Always exhaust the iterator. Some answers fail only when several cases run one after another. For such an answer,
    `run_cases` raises CheckFailed only after it has yielded all cases.
    """

    def run(some: Sequence[Any], theirs: Sequence[Any]) -> Iterator[list[Any]]:
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(PLACE * p))
            file.flush()
            watched, alone = Watched(some, file.name), len(some) == 1
            try:
                tried = note(some[0]) if alone else ""
                seen = run_ranks(program, p, answer, watched, theirs, note=tried, timeout=timeout)
                failure = None
            except CheckFailed as error:
                failure, at = error, watched.reached(p, error.__cause__)
        if failure is None:
            yield from ([on_rank[index] for on_rank in seen] for index in range(len(some)))
            return
        for part in () if alone else (slice(0, at), slice(at, at + 1), slice(at + 1, None)):
            if some[part]:
                yield from run(some[part], theirs[part])
        if len(some) in (1, len(cases)):
            failure.question = question(some[0], failure) or failure.question
            raise failure
        # These cases fail only if they run one after another, but a later case may fail on its own

    yield from run(cases, data)


@contextmanager
def called_as(call: str) -> Iterator[None]:
    """Context manager that attaches a note showing the call if the learner's function raises an exception on a rank."""
    try:
        yield
    except Exception as error:
        if not _STUB.fullmatch(str(error)):
            error.add_note(f"The call was {call}.")
        raise


def _portable_result(program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return portable(program(*args))
