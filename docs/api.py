"""Writes the API reference of the book: a page per room, from the docstrings of what the room exports."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import tplab

KINDS = (FunctionType, classmethod, staticmethod, property)


def write_reference(folder: Path) -> None:
    """Write one page per room, plus `tplab` itself, into `folder`, which must exist."""
    for room in rooms():
        (folder / f"{room.__name__}.md").write_text(page(room), encoding="utf-8")


def rooms() -> list[ModuleType]:
    """`tplab` and the rooms that export something."""
    names = sorted(found.name for found in pkgutil.iter_modules(tplab.__path__) if found.ispkg)
    found = [tplab, *(importlib.import_module(f"tplab.{name}") for name in names)]
    return [room for room in found if getattr(room, "__all__", None)]


def page(room: ModuleType) -> str:
    """The page of a room in Markdown: its own docstring, then a section for each exported name."""
    sections = [f"# {room.__name__}", prose(inspect.getdoc(room) or "")]
    for name in room.__all__:
        sections.append(section(name, getattr(room, name)))
    return "\n\n".join(part for part in sections if part) + "\n"


def section(name: str, value: Any) -> str:
    """The section of one name: a function, a class with its public methods, or a constant."""
    heading = f"## {name}"
    if not isinstance(value, FunctionType | type):
        own = type(value).__module__.startswith("tplab.")
        shown = f"{name}: {type(value).__name__}" if own else constant(name, value)
        return "\n\n".join([heading, code(shown), *([prose(documentation(type(value)))] if own else [])])
    parts = [heading, code(signature(name, value)), prose(documentation(value))]
    for method, found in members(value) if isinstance(value, type) else []:
        shown = method if isinstance(found, property) else signature(method, getattr(found, "__func__", found))
        parts += [f"### {name}.{method}", code(shown), prose(documentation(found))]
    return "\n\n".join(part for part in parts if part)


def constant(name: str, value: Any) -> str:
    """The name with its value. Of a long value, only the elements or the keys, one per line."""
    shown = f"{name} = {value!r}"
    if len(shown) <= 100 or not isinstance(value, Mapping | Sequence) or isinstance(value, str):
        return shown
    kinds = sorted({type(entry).__name__ for entry in (value.values() if isinstance(value, Mapping) else value)})
    what = f"{type(value).__name__} of {' and '.join(kinds)}" + " with these keys" * isinstance(value, Mapping)
    return "\n".join([f"{name}: {what}", "", *map(repr, value)])


def members(kind: type) -> list[tuple[str, Any]]:
    """The documented public methods and properties that a class defines itself, but not what Python or a base adds."""
    return [
        (name, value)
        for name, value in vars(kind).items()
        if not name.startswith("_") and isinstance(value, KINDS) and documentation(value)
        if getattr(value, "__module__", "tplab").startswith("tplab")
    ]


def documentation(value: Any) -> str:
    """The docstring that the object itself has, not one that it inherits or that `dataclass` makes up."""
    text = inspect.cleandoc(vars(value).get("__doc__") or "") if isinstance(value, type) else value.__doc__ or ""
    made_up = isinstance(value, type) and text.startswith(f"{value.__name__}(")
    return "" if made_up else inspect.cleandoc(text)


def signature(name: str, value: Any) -> str:
    """The name with its arguments and their types, one per line if they are many."""
    try:
        shown = str(inspect.signature(value))
    except (ValueError, TypeError):  # an enumeration or a TypedDict
        return name
    shown = re.sub(r"<(?:function|class) '?([\w.]+)'?[^>]*>", r"\1", shown)
    shown = re.sub(r"\b(?:collections\.abc|typing|torch\.nn\.parameter|tplab(?:\.[a-z_]\w*)+)\.(?=[A-Z])", "", shown)
    return f"{name}{shown}" if len(name + shown) <= 100 else f"{name}(\n    {split_arguments(shown)}"


def split_arguments(shown: str) -> str:
    """The arguments of a signature "(a, b) -> c", one per line."""
    lines, depth, start = [], 0, 1
    for place, letter in enumerate(shown):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 1 and letter == ",":
            lines.append(shown[start : place + 1].strip())
            start = place + 1
        elif depth == 0:
            return "\n    ".join([*lines, shown[start:place].strip() + ","]) + f"\n{shown[place:]}"
    raise ValueError(f"not a signature: {shown}")


def prose(docstring: str) -> str:
    """A docstring as Markdown: paragraphs stay text; examples and aligned tables become code blocks."""
    blocks = []
    for block in re.split(r"\n\s*\n", docstring):
        lines = block.splitlines()
        laid_out = any(line.startswith("    ") or re.search(r"\S {2,}\S", line) for line in lines)
        blocks.append(code(block) if laid_out else block.replace("<", "&lt;").replace("$", r"\$"))
    return "\n\n".join(blocks)


def code(text: str) -> str:
    return f"```text\n{inspect.cleandoc(text)}\n```"
