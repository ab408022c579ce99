"""Detect an answer that calls tplab's own implementation of the exercise.

Such an answer passes, but the verdict asks the learner to write the implementation themselves.
"""

import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tplab.course.checks.earlier_answers import functions_of


def tplabs_own(answers: Sequence[Any], theirs: Collection[str] = ()) -> str:
    """Return the name of tplab's own solution if an answer is the solution itself, inherits from it, or calls it.

    Otherwise, return "". `theirs` contains the names of solutions that have a different name than the answer.
    """
    for answer in answers:
        name = getattr(answer, "__name__", "")
        if _is_tplabs(answer):
            return name
        wanted = {name, *theirs}
        bases = answer.__mro__[1:] if isinstance(answer, type) else ()
        found = [base.__name__ for base in bases if base.__name__ in wanted and _is_tplabs(base)]
        for function in functions_of(answer):
            found += [used for used in _of_tplab(function) if used in wanted]
        if found:
            return str(found[0])
    return ""


def _is_tplabs(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("tplab.")


def _names_used(code: types.CodeType) -> Iterator[str]:
    """Yield the global names and attributes used by a function and by any functions nested in it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_used(inner)


def _of_tplab(function: types.FunctionType) -> Iterator[str]:
    """Yield the names used by a function that refer, or might refer, to objects of tplab."""
    names = list(_names_used(function.__code__))
    values = {name: function.__globals__.get(name) for name in names}
    through_a_module = any(name.split(".")[0] == "tplab" or _is_module(values[name]) for name in names)
    yield from (name for name in names if through_a_module or _is_tplabs(values[name]))


def _is_module(value: Any) -> bool:
    """Return whether this is one of tplab's modules."""
    return isinstance(value, types.ModuleType) and value.__name__.split(".")[0] == "tplab"
