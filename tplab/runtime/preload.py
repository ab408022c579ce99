"""Repeat the imports of earlier ranks in the fork server, so that later ranks start with these modules loaded.

Only the standard library, installed packages and tplab are imported, because a learner's files may change between runs.
"""

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import socket
import sys
import sysconfig
from collections.abc import Iterable

import torch

Module = tuple[str, str]  # name, file
_LENGTH_BYTES = 4
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = tuple(
    os.path.join(folder, "")
    for folder in {_OURS, *(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))}
)


def imported_since(count: int) -> list[Module]:
    """Return the installed modules that this process has imported since len(sys.modules) was `count`.

    Only the new modules are examined. Even looking at an object changes its reference count, which makes a forked
    process copy the object's memory page. Examining all modules would cost every rank several milliseconds.
    """
    new = list(itertools.islice(reversed(sys.modules), max(0, len(sys.modules) - count)))
    files = [(name, getattr(sys.modules[name], "__file__", None)) for name in reversed(new)]
    return [(name, file) for name, file in files if file and file.startswith(_INSTALLED)]


class Wanted:
    """The queue of modules to import. Each module is tried only once.

    has_gpu    True if the ranks may use a GPU. CUDA doesn't work in a process whose parent has initialized it, so each
               module is first imported in a child process, and skipped if the import fails or initializes CUDA there.
    """

    def __init__(self, has_gpu: bool) -> None:
        self._has_gpu = has_gpu
        self._left: list[Module] = []
        self._asked_for: set[str] = set()

    def __len__(self) -> int:
        return len(self._left)

    def add(self, modules: Iterable[Module]) -> None:
        self._left += [module for module in modules if module[0] not in self._asked_for | sys.modules.keys()]
        self._asked_for |= {name for name, _ in self._left}

    def import_next(self) -> None:
        """Import the next module if its file is still the same, then drop every module that is imported by now.

        torch's random state is restored afterwards, in case the module draws random numbers while it's imported.
        """
        name, file = self._left.pop(0)
        state = torch.get_rng_state()
        with contextlib.suppress(Exception, SystemExit):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin == file and not (self._has_gpu and _initializes_cuda(name)):
                importlib.import_module(name)
        torch.set_rng_state(state)
        self._left = [module for module in self._left if module[0] not in sys.modules]


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


# Through the fork server's socket


def pack(modules: Iterable[Module]) -> bytes:
    data = json.dumps(list(modules)).encode()
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def receive(sock: socket.socket) -> list[Module]:
    """Read the modules that `pack` encoded. Returns an empty list if the connection closes before all data arrives."""
    size = int.from_bytes(_read(sock, _LENGTH_BYTES), "little")
    return [(name, file) for name, file in json.loads(_read(sock, size) or b"[]")]


def _read(sock: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes. Returns b"" if the connection closes first."""
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)
