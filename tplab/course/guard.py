"""Runs in the kernel of `tplab check`, in hidden cells: nothing that a notebook does may turn a check around.

    start(4)                          before the first cell: loads the course's code and keeps what it consists of
    remember(["Layer"], "4.1")        after an exercise's cell (and the setup): keeps what its names stand for
    before_check("4.1")               puts back what was kept: the course's functions, `check`, and the answers

So a cell that defines its own `check`, or assigns to a function in tplab, or imports the course's own layer over the
learner's, changes no verdict. What is changed in torch or in Python's builtins, and a notebook written to deceive
this very module, are out of scope: whoever does that knows that the answer is wrong.
"""

import importlib
import sys
from types import FunctionType, ModuleType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

_modules: dict[str, tuple[ModuleType, dict[str, Any]]] = {}
_functions: list[tuple[FunctionType, tuple]] = []
_classes: list[tuple[type, dict[str, Any]]] = []
_tables: list[tuple[dict, dict]] = []
_answers: dict[str, Any] = {}
_PARTS = ("__code__", "__defaults__", "__kwdefaults__")


def start(chapter: int) -> None:
    """Load what the checks of this chapter need and keep every function and class of the course."""
    for name in ("tplab.course.checking", "tplab.course.predictions", f"tplab.course.ch{chapter:02d}"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    _keep_modules()


def _keep_modules() -> None:
    """Keep what the course's modules consist of, of those that were not loaded before."""
    for name, module in list(sys.modules.items()):
        if name in _modules or name == __name__ or not (name == "tplab" or name.startswith("tplab.")):
            continue
        own = {key: value for key, value in vars(module).items() if not key.startswith("__")}
        kept = {key: value for key, value in own.items() if _is_code(key, value)}
        _modules[name] = module, kept
        for value in kept.values():
            _keep(value)
        if name.startswith("tplab.course"):  # the register of exercises
            _tables.extend((value, {}) for value in own.values() if isinstance(value, dict))
    for table, items in _tables:
        items.update({key: value for key, value in table.items() if key not in items})


def _is_code(name: str, value: Any) -> bool:
    """Functions, classes and constants stay as they are while a notebook runs; other variables may change."""
    return isinstance(value, FunctionType | type | ModuleType) or name.isupper()


def _keep(value: Any) -> None:
    if not str(getattr(value, "__module__", "")).startswith("tplab"):
        return
    if isinstance(value, FunctionType):
        _functions.append((value, tuple(getattr(value, part) for part in _PARTS)))
    elif isinstance(value, type):
        parts = {key: part for key, part in vars(value).items() if callable(part) or isinstance(part, property)}
        _classes.append((value, parts))
        for part in parts.values():
            if isinstance(part, FunctionType):
                _functions.append((part, tuple(getattr(part, name) for name in _PARTS)))


def remember(names: list[str], exercise: str = "") -> None:
    """Keep what these names of the notebook stand for now; after the setup, also the modules it has loaded."""
    if not exercise:
        _keep_modules()
    namespace = InteractiveShell.instance().user_ns
    for name in names:
        if name not in namespace:
            continue
        value = namespace[name]
        origin = str(getattr(value, "__module__", ""))
        if exercise and origin.startswith("tplab."):
            value = _Borrowed(name, origin, exercise)
        _answers[name] = value


class _Borrowed:
    """Stands for an answer that is the course's own function; the check of its exercise is refused."""

    def __init__(self, name: str, origin: str, exercise: str):
        self.exercise = exercise
        self.message = f"{name} is the course's own, from {origin}. Write yours in the cell of exercise {exercise}."


def before_check(number: str) -> None:
    """Put everything back that was kept. Raises AssertionError where the answer is not the learner's."""
    for name, (module, kept) in _modules.items():
        sys.modules[name] = module
        for key, value in kept.items():
            if vars(module).get(key) is not value:
                setattr(module, key, value)
    for cls, parts in _classes:
        for key, part in parts.items():
            if vars(cls).get(key) is not part:
                setattr(cls, key, part)
    for function, values in _functions:
        for name, part in zip(_PARTS, values, strict=True):
            if getattr(function, name) is not part:
                setattr(function, name, part)
    for table, items in _tables:
        table.update(items)
    for value in _answers.values():
        if isinstance(value, _Borrowed) and value.exercise == number:
            raise AssertionError(value.message)
    InteractiveShell.instance().user_ns.update(
        {name: value for name, value in _answers.items() if not isinstance(value, _Borrowed)}
    )
