"""Repeat the imports of earlier ranks in the fork server, so that later ranks start with these modules loaded.

Only the standard library, installed packages and tplab are imported, because a learner's files may change between runs.
"""

import contextlib
import importlib
import importlib.util
import itertools
import os
import sys
import sysconfig
from collections.abc import Iterable

import torch

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = tuple(
    os.path.join(folder, "")
    for folder in {_OURS, *(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))}
)


def imported_since(count: int) -> list[str]:
    """Return the names of the installed modules that this process has imported since len(sys.modules) was `count`.

    Only the new modules are examined. Even looking at an object changes its reference count, which makes a forked
    process copy the object's memory page. Examining all modules would cost every rank several milliseconds.
    """
    new = list(itertools.islice(reversed(sys.modules), max(0, len(sys.modules) - count)))
    return [name for name in reversed(new) if _is_installed(getattr(sys.modules[name], "__file__", None))]


def _is_installed(file: str | None) -> bool:
    return file is not None and file.startswith(_INSTALLED)


class Wanted:
    """The queue of modules to import. Each module is tried only once.

    has_gpu    True if the ranks may use a GPU. CUDA doesn't work in a process whose parent has initialized it, so each
               module is first imported in a child process, and skipped if the import fails or initializes CUDA there.
    """

    def __init__(self, has_gpu: bool) -> None:
        self._has_gpu = has_gpu
        self._left: list[str] = []
        self._asked_for: set[str] = set()

    def __len__(self) -> int:
        return len(self._left)

    def add(self, names: Iterable[str]) -> None:
        self._left += [name for name in names if name not in self._asked_for | sys.modules.keys()]
        self._asked_for.update(self._left)

    def import_next(self) -> None:
        """Import the next module if it's installed here, too, then drop every module that is imported by now.

        torch's random state is restored afterwards, in case the module draws random numbers while it's imported.
        """
        name = self._left.pop(0)
        state = torch.get_rng_state()
        with contextlib.suppress(Exception, SystemExit):
            spec = importlib.util.find_spec(name)
            if spec is not None and _is_installed(spec.origin) and not (self._has_gpu and _initializes_cuda(name)):
                importlib.import_module(name)
        torch.set_rng_state(state)
        self._left = [name for name in self._left if name not in sys.modules]


def _initializes_cuda(name: str) -> bool:
    """Return True if importing the module initializes CUDA or fails. The import is tried in a child process."""
    child = os.fork()
    if not child:
        found = 1
        try:
            importlib.import_module(name)
            found = int(torch.cuda.is_initialized())
        finally:
            os._exit(found)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
