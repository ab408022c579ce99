"""The clean process in which `tplab check` checks the answers that a kernel hands over. No notebook cell runs in it.

    checker = Checker(environment, folder)     starts the process, which imports torch while the kernel is starting
    checker.ask("4.1", answers, limit=120)     returns the result of the check as a Reply

The process imports the checks once and forks for each check, so every check begins in the same clean state. It also
starts one fork server (see `tplab.runtime.forkserver`), which starts the ranks of all checks.
"""

import base64
import builtins
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from tplab.course.notebooks.numbering import chapter_of, package

# Modules outside the course that the checks rely on. An answer must not replace their functions or classes
OTHERS = ("builtins", "importlib", "math", "torch", "torch.nn", "torch.nn.functional", "torch.autograd",
          "torch.distributed", "torch.testing")  # fmt: skip
# torch wraps these functions itself. It wraps the first one when it loads its compiler, which creating an optimizer or
# using the device "meta" may trigger, and the other two when it first compiles something.
WRAPPED_BY_TORCH = ("torch.manual_seed", "torch.nn.Module.__init__", "torch.nn.Module.__setstate__")
POLL = 0.05  # seconds between polls for the end of a check


@dataclass(frozen=True)
class Reply:
    """The result of a check, which is the verdict's `text` if it passed, and otherwise the exception that it raised."""

    passed: bool = False
    text: str = ""
    error: str = ""  # class name of the exception
    message: str = ""
    ended: str = ""  # why there is no verdict: "timeout" or "died"


class Checker:
    """A client for the clean process. nbval's process uses it."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._connection, theirs = Pipe()
        start = f"from tplab.course.grading.clean_check import serve; serve({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", start], env=environment, cwd=folder, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip

    def ask(self, number: str, answers: str, limit: float) -> Reply:
        """Run an exercise's check, for at most `limit` seconds, on the answers that `handover.hand_over` returned."""
        try:
            self._connection.send_bytes(json.dumps([number, answers, limit]).encode())
            return Reply(**json.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            return Reply(ended="died")

    def stop(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


# Everything below runs in the clean process


def serve(descriptor: int) -> None:
    """Run the requested checks until the client closes the connection."""
    from tplab.runtime.forkserver import fork_server

    fork_server()
    importlib.import_module("tplab.course.checks")
    connection = Connection(descriptor)
    while True:
        try:
            number, answers, limit = json.loads(connection.recv_bytes())
        except EOFError:
            return
        reply = _in_a_fork(number, answers, limit)
        connection.send_bytes(json.dumps(asdict(reply)).encode())


def _in_a_fork(number: str, answers: str, limit: float) -> Reply:
    with suppress(ModuleNotFoundError):  # `check` reports this error itself
        importlib.import_module(f"tplab.course.exercises.{package(chapter_of(number))}")
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            ours.close()
            theirs.send_bytes(json.dumps(asdict(_check(number, answers))).encode())
        finally:
            os._exit(0)
    theirs.close()
    end = time.monotonic() + limit
    try:
        while not ours.poll(POLL):
            if time.monotonic() > end:
                return Reply(ended="timeout")
        return Reply(**json.loads(ours.recv_bytes()))
    except EOFError:
        return Reply(ended="died")
    finally:
        ours.close()
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _check(number: str, answers: str) -> Reply:
    from tplab.course.checks.exercises import check
    from tplab.runtime import forkserver

    forkserver.adopt()
    try:
        given = _receive(number, answers)
        before = _code()
        verdict = repr(check(number, *given))
        if changed := _changed(before, _code()):
            raise AssertionError(
                f"While the check of exercise {number} ran, your code changed {changed[0]}. "
                "A check that was changed says nothing about the answer; leave it as it is."
            )
    except BaseException as error:
        return Reply(error=type(error).__name__, message=str(error))
    return Reply(passed=True, text=verdict)


def _receive(number: str, answers: str) -> list[Any]:
    """Unpack the answers in this process. Raises AssertionError if one is the course's own implementation."""
    import linecache

    from tplab.course.checks.own_functions import functions_of
    from tplab.runtime import transport
    from tplab.runtime.failures import name_cell

    about, packed = transport.loads(base64.b64decode(answers))
    sys.path[:] = about["path"]
    os.chdir(about["folder"])
    given, earlier = transport.loads(packed)  # after chdir, since answers may import modules from the folder
    for file, name in about["cells"].items():
        name_cell(file, name)
    for file, lines in about["sources"].items():
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    for name, value in given.items():
        origin = str(getattr(value, "__module__", ""))
        if origin.startswith("tplab."):
            raise AssertionError(
                f"{name} is the course's own, from {origin}. Write yours in the cell of exercise {number}."
            )
    for function in (function for value in given.values() for function in functions_of(value)):
        # In the notebook, all earlier answers are global names. Serialization keeps only those that the answers use.
        for name, value in earlier.items():
            function.__globals__.setdefault(name, value)
    return list(given.values())


def _code() -> dict[str, Any]:
    """Return everything that an answer must not replace, by its full name.

    These are the functions, code objects, classes and constants of the course, and the functions and classes of the
    modules in OTHERS:

        {"tplab.course.checks.verification.verify": ..., "torch.nn.Module.__init__": ...}
    """
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        ours = name == "tplab" or name.startswith("tplab.")
        if not (ours or name in OTHERS) or not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, FunctionType | BuiltinFunctionType | type) or (ours and key.isupper()):
                found[f"{name}.{key}"] = value
            if ours and isinstance(value, FunctionType):
                found[f"{name}.{key}."] = value.__code__
            if isinstance(value, type) and (ours or value.__name__ in ("Tensor", "Module")):
                found |= {f"{name}.{key}.{part}": code for part, code in vars(value).items() if callable(code)}
    return found


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names that now refer to something else, and new names that shadow a Python builtin."""
    modules = {name.rpartition(".")[0] for name in before}
    changed = [name for name, code in before.items() if after.get(name) is not code]
    new = [name.rpartition(".") for name in after.keys() - before.keys()]
    hiding = [f"{module}.{key}" for module, _, key in new if module in modules and hasattr(builtins, key)]
    return [name.rstrip(".") for name in changed if not _is_torchs_own(name, before[name], after.get(name))] + hiding


def _is_torchs_own(name: str, before: Any, found: Any) -> bool:
    """Return whether `found` is a wrapper that torch itself installed around the function that was there before.

    The code of such a wrapper is in one of torch's files. For example, an optimizer wraps the `step` method of its
    class when it is first created.
    """
    file = found.__code__.co_filename if isinstance(found, FunctionType) else ""
    known = name in WRAPPED_BY_TORCH or getattr(found, "__wrapped__", None) is before
    return known and f"{os.sep}torch{os.sep}" in file
