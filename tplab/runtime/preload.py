"""The imports of earlier ranks, repeated in the fork server, so that later ranks have these modules from the start.

Only modules of Python, of installed packages and of tplab count: a learner's own file may change between launches.
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
    """The installed modules that this process has imported since `count` was len(sys.modules).

    We look only at the new ones. Looking at an object changes its reference count, and in a forked process that copies
    the page that it is on: for all modules, this would cost every rank some milliseconds.
    """
    new = list(itertools.islice(reversed(sys.modules), max(0, len(sys.modules) - count)))
    files = [(name, getattr(sys.modules[name], "__file__", None)) for name in reversed(new)]
    return [(name, file) for name, file in files if file and file.startswith(_INSTALLED)]


class Wanted:
    """The modules that are still to be imported. Each is tried once."""

    def __init__(self) -> None:
        self._left: list[Module] = []
        self._asked_for: set[str] = set()

    def __len__(self) -> int:
        return len(self._left)

    def add(self, modules: Iterable[Module]) -> None:
        self._left += [module for module in modules if module[0] not in self._asked_for | sys.modules.keys()]
        self._asked_for |= {name for name, _ in self._left}

    def import_next(self) -> None:
        """Import the next module, if its file is still the same, and drop all modules that have been imported by then.

        Random numbers that a module draws during its import don't affect this process's random state.
        """
        name, file = self._left.pop(0)
        state = torch.get_rng_state()
        with contextlib.suppress(Exception, SystemExit):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin == file:
                importlib.import_module(name)
        torch.set_rng_state(state)
        self._left = [module for module in self._left if module[0] not in sys.modules]


# Through the fork server's socket


def pack(modules: Iterable[Module]) -> bytes:
    data = json.dumps(list(modules)).encode()
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def receive(sock: socket.socket) -> list[Module]:
    """The modules that `pack` encoded; none if the other side went away before everything had arrived."""
    size = int.from_bytes(_read(sock, _LENGTH_BYTES), "little")
    return [(name, file) for name, file in json.loads(_read(sock, size) or b"[]")]


def _read(sock: socket.socket, size: int) -> bytes:
    """`size` bytes, or b"" if the other side has gone."""
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)
