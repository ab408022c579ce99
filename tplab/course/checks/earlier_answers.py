"""When an answer fails, find an earlier answer that it uses and that is wrong itself: the place to look first."""

from collections.abc import Callable, Iterator
from typing import Any

from tplab.course.checks.own_functions import functions_of, names_used
from tplab.course.notebooks.cells import Cell
from tplab.course.notebooks.reference import find_reference
from tplab.course.notebooks.source import passed_names


def earlier_answers(number: str, answers: tuple[Any, ...]) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield the earlier exercises of the chapter whose answers these answers use, directly or through others, in order.

    Yields (exercise, name of the function or class that is used, all answers to that exercise).
    """
    namespace = next((function.__globals__ for answer in answers for function in functions_of(answer)), {})
    everything = _used(answers, namespace)
    for exercise, names in _answers_before(number, find_reference(number)):
        used = [name for name in names if name in everything]
        if used and all(name in namespace for name in names):
            yield exercise, used[0], tuple(namespace[name] for name in names)


def blame(number: str, answers: tuple[Any, ...], passes: Callable[[str, tuple[Any, ...]], bool]) -> str:
    """Return a sentence that names the first of these earlier answers for which `passes` is false, or ""."""
    for exercise, name, earlier in earlier_answers(number, answers):
        if not passes(exercise, earlier):
            return (
                f"Your answer uses `{name}` from exercise {exercise}, but your answer to exercise {exercise} doesn't "
                f"pass its own check. Fix exercise {exercise} first, and then run this check again."
            )
    return ""


def _answers_before(number: str, reference: list[Cell]) -> Iterator[tuple[str, list[str]]]:
    """Yield the exercises before this one, each with the names that its check cell passes."""
    for cell in reference:
        if cell.marks.get("check") == number:
            return
        if "check" in cell.marks:
            yield cell.marks["check"], passed_names(cell.source)


def _used(answers: tuple[Any, ...], namespace: dict[str, Any]) -> set[str]:
    """Return the names that the answers use, and those that what they use uses, as far as it is the learner's own."""
    found: set[str] = set()
    waiting = list(answers)
    while waiting:
        new = {name for function in functions_of(waiting.pop()) for name in names_used(function.__code__)} - found
        found |= new
        waiting += [namespace[name] for name in new if getattr(namespace.get(name), "__module__", "") == "__main__"]
    return found
