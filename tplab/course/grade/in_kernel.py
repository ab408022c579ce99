"""Prepare the kernel in which `tplab check` runs a notebook. The first cell, which is hidden, calls `start`."""

from typing import Any

from ipykernel.compiler import get_file_name
from IPython.core.interactiveshell import InteractiveShell

from tplab.runtime.failures import name_cell


def start(names: dict[str, str]) -> None:
    """Name the cells with these sources in reports, and refuse to end the kernel on `exit()` or `%quit`.

    The kernel would end some time after such a line, perhaps while it runs a cell that isn't to blame.

    names: the source of a cell -> what reports call the cell. Its number differs in the learner's notebook
    """
    for source, name in names.items():
        name_cell(get_file_name(source), name)
    InteractiveShell.instance().ask_exit = _refuse  # type: ignore[attr-defined]


def _refuse(*args: Any) -> None:
    raise RuntimeError("this line would end the kernel, and with it all that the notebook has computed: take it out")
