"""When an answer fails its check, find out whether it depends on an earlier answer that's incorrect.

The learner should fix the earlier answer first.
"""

import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

from tplab.course.notebooks.cells import Cell
from tplab.course.notebooks.reference import find_reference
from tplab.course.notebooks.source import passed_names


def earlier_answers(number: str, answers: tuple[Any, ...]) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield the earlier exercises that the given answers depend on, directly or indirectly.

    The exercises are in the order in which they appear in the chapter. Each item is a tuple (exercise, name, answers).
    `answers` contains the learner's functions and classes that solve this exercise. `name` is the name of one of
    these functions or classes that the given answers use.
    """
    namespace = next((function.__globals__ for answer in answers for function in functions_of(answer)), {})
    everything = _used(answers, namespace)
    for exercise, names in _answers_before(number, find_reference(number)):
        used = [name for name in everything if name in names]
        if used and all(name in namespace for name in names):
            yield exercise, used[0], tuple(namespace[name] for name in names)


def blame(number: str, answers: tuple[Any, ...], passes: Callable[[str, tuple[Any, ...]], bool]) -> str:
    """Return a message about the first exercise in `earlier_answers` whose check fails, or "" if there's none.

    `passes` is a function that takes an exercise and its answers and runs the check.
    """
    for exercise, name, earlier in earlier_answers(number, answers):
        uses = f"Your answer uses `{name}` from exercise {exercise}"
        try:
            right = passes(exercise, earlier)
        except NotImplementedError:
            return f"{uses}, which you haven't written yet. Write `{name}` first, and then rerun this check."
        if not right:
            return (
                f"{uses}, but your answer to exercise {exercise} doesn't pass its own check. Fix exercise {exercise} "
                "first, and then rerun this check."
            )
    return ""


def _answers_before(number: str, reference: list[Cell]) -> Iterator[tuple[str, list[str]]]:
    """Yield every exercise before exercise `number`, together with the names of the exercise's answers.

    These are the names that the exercise's check cell passes to `check`.
    """
    for cell in reference:
        if cell.marks.get("check") == number:
            return
        if "check" in cell.marks:
            yield cell.marks["check"], passed_names(cell.source)


def _used(answers: tuple[Any, ...], namespace: dict[str, Any]) -> list[str]:
    """Return the global names that the answers use, directly or indirectly.

    Names that the answers themselves use come first. If one of these names refers to a function or class that the
    learner wrote, the names that it uses are added at the end, and so on recursively.
    """
    found: dict[str, None] = {}
    waiting = list(answers)
    while waiting:
        new = dict.fromkeys(name for name in _globals_of(waiting.pop(0), namespace) if name not in found)
        found |= new
        waiting += [namespace[name] for name in new if getattr(namespace.get(name), "__module__", "") == "__main__"]
    return list(found)


def _globals_of(answer: Any, namespace: dict[str, Any]) -> Iterator[str]:
    """Yield the global names that an answer uses, but not the names of attributes.

    An attribute doesn't count even if it has the same name as an answer.
    """
    for base in getattr(answer, "__bases__", ()):
        yield from (name for name, value in namespace.items() if value is base)
    for function in functions_of(answer):
        yield from _loaded(function.__code__)
        yield from (name for name, value in namespace.items() if any(value is each for each in _held(function)))


def _held(function: FunctionType) -> Iterator[Any]:
    """Yield the default values of a function's arguments and the values of its closure variables."""
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # raised if the closure's cell is empty
            yield cell.cell_contents


def _loaded(code: CodeType) -> Iterator[str]:
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _loaded(inner)


def functions_of(answer: Any) -> Iterator[FunctionType]:
    """Yield the functions in an answer, including the getters and setters of properties.

    Unwrap decorated functions first, because a decorator's code isn't part of the answer.
    """
    own = vars(answer).values() if isinstance(answer, type) else (answer,)
    for value in own:
        parts = [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
        for part in parts:
            function = inspect.unwrap(part) if callable(part) else part
            if isinstance(function, FunctionType):
                yield function
