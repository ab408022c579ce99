"""Kernels that run a chapter: their environment, and another try where one can't start."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PACKAGE_ROOT = Path(__file__).resolve().parents[3]  # the folder that holds the package tplab
CELL_TIMEOUT = 120.0  # seconds for one cell
STARTS = 3  # of a kernel, before it counts as one that can't start
DIED = "Kernel died before replying"  # jupyter_client's words


def kernel_environment() -> dict[str, str]:
    """The environment of a kernel that runs a chapter: it finds the package also where that isn't installed."""
    environment = dict(os.environ, PYTHONHASHSEED="0")
    environment.pop("MPLBACKEND", None)  # a notebook draws inline
    environment.pop("JPY_SESSION_NAME", None)  # no page looks at this kernel, also where one looks at ours
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    return environment


def started(start: Callable[[], T]) -> T:
    """What `start` returns; tried again where its kernel ends before it has run anything.

    jupyter_client gives a kernel five ports that were free a moment ago. Where ranks open theirs meanwhile, one of
    them may be taken (2 in 405 starts met that beside launches that followed one another), and the kernel may end.
    """
    for _ in range(STARTS - 1):
        try:
            return start()
        except RuntimeError as error:
            if DIED not in str(error):
                raise
    return start()
