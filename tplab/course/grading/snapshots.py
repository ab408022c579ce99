"""Keep what modules, classes, functions and objects consist of, and put it back: the means by which guard.py works.

kept = Kept()
kept.module(checking); kept.cls(Verdict); kept.function(fail)
kept.put_back()      {"tplab.course.checks.exercises.fail": ...}: what had been changed, and what stood there
"""

import builtins
from collections.abc import Callable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

_GONE = object()
_PARTS = ("__code__", "__defaults__", "__kwdefaults__")


@dataclass
class Space:
    """The names of a module, a class or an object, as they were.

    kept:   what must stay
    known:  every name there was; a new one is taken away where `hides` says that it stands before something else
    """

    name: str
    owner: Any
    kept: dict[str, Any]
    hides: Callable[[str], bool]
    known: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.known = set(vars(self.owner))

    def put_back(self) -> dict[str, Any]:
        now = dict(vars(self.owner))
        changed = [key for key, value in self.kept.items() if now.get(key, _GONE) is not value]
        new = [key for key in now if key not in self.known and self.hides(key)]
        for key in changed:
            setattr(self.owner, key, self.kept[key])
        for key in new:
            delattr(self.owner, key)
        return {f"{self.name}.{key}": now.get(key) for key in (*changed, *new)}


class Kept:
    """Everything that was kept so far."""

    def __init__(self) -> None:
        self._spaces: list[Space] = []
        self._functions: list[tuple[str, FunctionType, tuple]] = []
        self._lists: list[tuple[str, Any, str, list]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._owners: set[int] = set()

    def module(self, module: ModuleType, keeps: Callable[[str, Any], bool], *, whole: bool = False) -> None:
        """A module's names for which `keeps(name, value)` is true. whole: nor may a new one hide a builtin."""
        own = {key: value for key, value in vars(module).items() if not key.startswith("__") and keeps(key, value)}
        self._keep(Space(module.__name__, module, own, lambda key: whole and hasattr(builtins, key)))

    def cls(self, cls: type) -> None:
        """The methods and properties of a class."""

        def hides(key: str) -> bool:
            return any(_is_part(vars(base).get(key)) for base in cls.__mro__[1:])

        own = {key: value for key, value in vars(cls).items() if _is_part(value)}
        self._keep(Space(f"{cls.__module__}.{cls.__qualname__}", cls, own, hides))

    def methods_of(self, item: Any) -> None:
        """An object's methods: those of its classes, and that it hides none of them by one of its own."""
        for cls in type(item).__mro__[:-1]:
            self.cls(cls)
        own = {key: value for key, value in vars(item).items() if isinstance(value, FunctionType)}
        self._keep(Space(type(item).__name__, item, own, lambda key: is_code(getattr(type(item), key, None))))

    def function(self, function: FunctionType) -> None:
        """The code and the defaults of a function."""
        if id(function) not in self._owners:
            self._owners.add(id(function))
            parts = tuple(getattr(function, part) for part in _PARTS)
            self._functions.append((f"{function.__module__}.{function.__qualname__}", function, parts))

    def list_in(self, owner: Any, key: str) -> None:
        """A list that is an attribute of an object, or an item of a dictionary."""
        self._lists.append((key, owner, key, list(_get(owner, key))))

    def attribute(self, owner: Any, key: str) -> None:
        """What one attribute of an object is."""
        self._attributes.append((owner, key, getattr(owner, key)))

    def put_back(self) -> dict[str, Any]:
        """Put everything back; returns the names of what had been changed, and what stood there."""
        changed: dict[str, Any] = {}
        for space in self._spaces:
            changed |= space.put_back()
        for name, function, parts in self._functions:
            for key, part in zip(_PARTS, parts, strict=True):
                if getattr(function, key) is not part:
                    changed[name] = getattr(function, key)
                    setattr(function, key, part)
        for owner, key, value in self._attributes:
            if getattr(owner, key) is not value:
                changed[key] = getattr(owner, key)
                setattr(owner, key, value)
        for name, owner, key, items in self._lists:
            if list(_get(owner, key)) != items:
                changed[name] = list(_get(owner, key))
                _get(owner, key)[:] = items
        return changed

    def _keep(self, space: Space) -> None:
        if id(space.owner) not in self._owners:
            self._owners.add(id(space.owner))
            self._spaces.append(space)


def _get(owner: Any, key: str) -> Any:
    return owner[key] if isinstance(owner, dict) else getattr(owner, key)


def _is_part(value: Any) -> bool:
    return callable(value) or isinstance(value, property | classmethod)


def is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | BuiltinFunctionType | type)
