"""Find out what an answer uses: tplab's own implementation of the exercise, or an earlier answer that's wrong.

An answer that uses tplab's own implementation passes, but the verdict asks the learner to write it themselves. If a
wrong answer uses one that failed its own check before, the learner should fix the earlier one first.
"""

import dis
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any


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
        for used in map(_used, _functions_of(answer)):
            through_a_module = any(isinstance(value, ModuleType) and _is_tplabs(value) for value in used.values())
            through_a_module |= any(each.startswith("tplab.") for each in used)  # an import within a function
            found += [each for each in used if each in wanted and (through_a_module or _is_tplabs(used[each]))]
        if found:
            return str(found[0])
    return ""


def wrong_part(answers: Sequence[Any], failed: Mapping[str, Sequence[Any]]) -> str:
    """Return a message about the first exercise whose wrong answer these answers use, or "" if there's none.

    failed: {exercise: the answers that failed its check when it last ran}
    """
    functions = [function for answer in answers for function in _functions_of(answer)]
    used = [(name, each.__globals__.get(name)) for each in functions for name in _globals_in(each)]
    for exercise, wrong in failed.items():
        for name, value in used:
            if (
                value is not None
                and any(value is each for each in wrong)
                and not any(value is each for each in answers)
            ):
                return (
                    f"Your answer uses `{name}` from exercise {exercise}, but your answer to exercise {exercise} "
                    f"doesn't pass its own check. Fix exercise {exercise} first, and then rerun this check."
                )
    return ""


def _used(function: FunctionType) -> dict[str, Any]:
    """Return {name: value} for the names and attributes that a function uses. The value is None if it isn't global."""
    names = [name for code in _codes_in(function.__code__) for name in code.co_names]
    return {name: function.__globals__.get(name) for name in names}


def _globals_in(function: FunctionType) -> Iterator[str]:
    """Yield the global names that a function uses. Attributes don't count, even if they have an answer's name."""
    for code in _codes_in(function.__code__):
        yield from (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


def _functions_of(answer: Any) -> Iterator[FunctionType]:
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


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of any functions nested in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes_in(inner)


def _is_tplabs(value: Any) -> bool:
    """Return whether this is one of tplab's modules, or a function or class of one."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return f"{module}.".startswith("tplab.")
