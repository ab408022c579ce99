"""Start kernels that run a chapter: set their environment, and retry if a kernel can't start."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PACKAGE_ROOT = Path(__file__).resolve().parents[3]  # the folder that contains the tplab package
HAS_GPU = os.path.exists("/dev/nvidiactl")
CELL_TIMEOUT = 300.0 if HAS_GPU else 120.0  # seconds for one cell; NCCL alone takes seconds to start in each launch
STARTS = 3  # attempts before giving up on a kernel
DIED = "Kernel died before replying"  # jupyter_client's wording


def kernel_environment() -> dict[str, str]:
    """Return the environment for a chapter's kernel. It makes tplab importable even if it isn't installed."""
    environment = dict(os.environ, PYTHONHASHSEED="0")
    environment.pop("MPLBACKEND", None)  # notebooks show their figures inline
    environment.pop("JPY_SESSION_NAME", None)  # no notebook page shows the new kernel, even if one shows our own
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    return environment


def started(start: Callable[[], T]) -> T:
    """Call `start` and return its result, retrying if the kernel dies before it has run anything.

    jupyter_client gives a kernel five ports that were free a moment ago. If ranks open ports in the meantime, one of
    the five may be taken, and the kernel may die. That happened in 2 of 405 starts that ran next to constant launches.
    """
    for _ in range(STARTS - 1):
        try:
            return start()
        except RuntimeError as error:
            if DIED not in str(error):
                raise
    return start()
