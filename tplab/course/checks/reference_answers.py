"""The reference answers of an exercise, as they are or with a known mistake."""

import builtins
import linecache
from collections.abc import Callable
from functools import cache
from typing import Any

from tplab.course.notebooks.cells import Cell
from tplab.course.notebooks.ipython_syntax import to_python
from tplab.course.notebooks.reference import find_reference
from tplab.course.notebooks.source import passed_names


def reference_answers(number: str, change: Callable[[str], str] = lambda source: source) -> dict[str, Any]:
    """Return {name: answer} for the answers that the check of an exercise takes.

    change: changes the source of the reference answer

    The setup and the earlier exercises run only once, so answers share these. Raises ValueError if the chapter has no
    check with this number, and whatever the changed source raises.
    """
    cells = _cells(number)
    namespace = dict(_namespace_before(number))
    for cell in cells:
        if cell.marks.get("exercise") == number:
            run_cell(change(cell.source), namespace, f"<a known mistake in {number}>")
        elif cell.marks.get("check") == number:
            return {name: namespace[name] for name in passed_names(cell.source)}
    raise ValueError(f"there is no check {number}")


@cache
def _cells(number: str) -> list[Cell]:
    return find_reference(number)


@cache
def _namespace_before(number: str) -> dict[str, Any]:
    """Run a chapter's setup and exercises up to an exercise."""
    namespace = new_namespace()
    for cell in _cells(number):
        if cell.marks.get("exercise") == number:
            break
        if "exercise" in cell.marks or "setup" in cell.metadata.get("tags", []):
            run_cell(cell.source, namespace, f"<reference for {number}>")
    return namespace


def new_namespace() -> dict[str, Any]:
    """Return the namespace of an empty `__main__` module, whose functions travel to the ranks by value."""
    return {"__name__": "__main__", "__builtins__": builtins}


def run_cell(source: str, namespace: dict[str, Any], name: str) -> None:
    """Run a cell's source in a namespace. Tracebacks show its lines as those of a file with this name."""
    text = to_python(source)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), namespace)
