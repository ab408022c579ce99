"""Find the part of a value that can't be sent to another process, and describe where it is.

A description reads, for example, "args[1]['model'].lock, of type lock".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

_DEEPEST = 6
_MOST_PARTS = 1000  # how many parts of a container are searched


def find_culprit(value: object, name: str, can_be_sent: Callable[[object], bool]) -> str:
    """Return the name and type of the innermost part of `value` that can't be sent."""
    for _ in range(_DEEPEST):
        part = next(((label, part) for label, part in _parts(value, name) if not can_be_sent(part)), None)
        if part is None:
            break
        name, value = part
    return f"{name}, of type {type(value).__name__}"


def _parts(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, MethodType):
        yield f"{name}.__self__", value.__self__
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in list(value.items())[:_MOST_PARTS])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | range):
        yield from ((f"{name}[{index}]", part) for index, part in enumerate(value[:_MOST_PARTS]))
    elif isinstance(value, set | frozenset):
        yield from ((f"an element of {name}", part) for part in list(value)[:_MOST_PARTS])
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from ((f"{name}.{attribute}", part) for attribute, part in vars(value).items())


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the closure variables, global variables and default values that a function uses, each with its name."""
    of = f"of {function.__name__}" if function.__name__ != "<lambda>" else "of the lambda"
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"the variable {name} that the body {of} uses", cell.cell_contents
        except ValueError:  # the variable hasn't been assigned yet
            continue
    for name in _globals_of(function):
        yield f"the global variable {name} that the body {of} uses", function.__globals__[name]
    for part in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"a default value {of}", part


def _globals_of(function: FunctionType) -> list[str]:
    codes, names = [function.__code__], list[str]()
    while codes:
        code = codes.pop()
        names += [name for name in code.co_names if name in function.__globals__ and name not in names]
        codes += [constant for constant in code.co_consts if isinstance(constant, type(code))]
    return names
