"""Code that runs between cells in the kernel of `tplab check`, and takes the answers out to be checked elsewhere.

    start()                            called before the first cell
    remember(["Layer"], "4.1")         called after the setup and each exercise's cell; saves what these names refer to
    hand_over("4.1", ["Layer"], [])    returns the answers as text, which `clean_check` turns back into objects

No check runs in this kernel, so nothing that a notebook does to itself affects a verdict. For example, a notebook may
define its own `check`, patch tplab or torch, rewrite cells with an IPython hook, or import the course's layer over the
learner's. We don't protect against notebooks that change files on disk or deceive this very module, because anyone who
writes one knows that the answer is wrong.
"""

import base64
import builtins
import linecache
import re
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$")  # the file name that IPython gives the source of a cell
_builtins: dict[str, Any] = {}
_answers: dict[str, Any] = {}
_cells: dict[str, str] = {}  # file name of a cell -> what reports call the cell


def start() -> None:
    """Save Python's builtins, and disable everything that ends the kernel, because no later check could run then."""
    _builtins.update(vars(builtins))
    shell = InteractiveShell.instance()
    shell.user_ns.update(exit=_refuse_to_end, quit=_refuse_to_end)  # IPython's versions can't be serialized
    shell.ask_exit = _refuse_to_end  # type: ignore[attr-defined]  # called by %exit and %quit
    if hasattr(shell, "kernel"):
        shell.kernel.do_shutdown = _refuse_to_end


def _refuse_to_end(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("this line would end the kernel, and with it all that the notebook has computed: take it out")


def remember(names: list[str], exercise: str = "") -> None:
    """Save the objects that these names refer to now, so that it doesn't matter what later cells bind to them."""
    namespace = InteractiveShell.instance().user_ns
    for name in names:
        if name in namespace:
            _answers[name] = namespace[name]
            if exercise:
                _name_its_cell(namespace[name], exercise)


def _name_its_cell(value: Any, exercise: str) -> None:
    """Make reports say "your cell of exercise 4.2, line 7", because cell numbers differ in the learner's notebook."""
    for part in [value, *vars(value).values()] if isinstance(value, type) else [value]:
        function = getattr(part, "__func__", part)  # unwraps static and class methods
        if isinstance(function, FunctionType):
            _cells[function.__code__.co_filename] = f"your cell of exercise {exercise}"


def hand_over(number: str, names: list[str], earlier: list[str]) -> str:
    """Return the answers to an exercise, along with the sources of the notebook's cells, as text.

    The text also includes the earlier answers that they use, so that a check can tell if one of those is wrong.
    Raises NameError for a name that no cell has bound, and TypeError for an answer that can't be serialized.
    """
    vars(builtins).update(_builtins)
    sys.settrace(None)
    sys.setprofile(None)
    from tplab.runtime import transport  # imported here because it needs torch, which the setup has imported by now

    namespace = InteractiveShell.instance().user_ns
    known = {name: _answers.get(name, namespace.get(name)) for name in names if name in _answers or name in namespace}
    if missing := [name for name in names if name not in known]:
        raise NameError(f"name '{missing[0]}' is not defined")
    sources = {file: entry[2] for file, entry in linecache.cache.items() if _CELL.search(file) and len(entry) == 4}
    about = {"path": list(sys.path), "folder": str(Path.cwd()), "cells": _cells, "sources": sources}
    try:
        answers = transport.dumps((known, {name: _answers[name] for name in earlier if name in _answers}))
        return base64.b64encode(transport.dumps((about, answers))).decode()
    except Exception as error:
        raise TypeError(
            f"{' and '.join(names)} can't be handed to the process that checks exercise {number}: {error}. "
            "Does a function of yours use IPython's `!` or `%`, or an open file, a lock or a generator from another "
            "cell?"
        ) from None
