"""The fork server: a process that has already imported torch and forks the ranks.

    notebook ──(a byte and seven file descriptors)──▶ fork server ──fork──▶ rank 0, rank 1, ...

Importing torch takes seconds, but a fork takes only milliseconds. The server stores nothing about any run, uses no GPU
and starts no threads, so a forked rank is as good as a fresh process. It runs in a separate session, so interrupting
the notebook doesn't interrupt it. When the notebook ends, the socket closes, and the server kills all ranks and exits.

While idle, it imports the rest of torch and the modules that earlier ranks had to import themselves, so that later
ranks start with these modules loaded.

For each rank, the server reports the process id, and later the exit status, through a pipe.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

import torch

from tplab.runtime.failures import TPLAB, is_installed

_WHEN_IDLE = ("torch.optim", "torch._dynamo", "torch.distributed.tensor.parallel")
_RANK, _IMPORT = b"r", b"i"  # requests to the server
_AT_ONCE = 0.1  # for how many seconds it imports before it looks for requests again
_STATUS = struct.Struct("<q")
_DESCRIPTORS = 6  # these follow the status pipe: control, output, crash, board, rendezvous, setup (see rank.main)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK = socket.MSG_PEEK | socket.MSG_DONTWAIT


# In the notebook's process


class ForkServer:
    """A running fork server, as seen from its parent process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._lock = threading.Lock()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the server)
        self._owner = os.getpid()
        serve_it = f"from tplab.runtime.forkserver import serve; serve({theirs.fileno()})"
        start = f"import sys; sys.path[:] = {sys.path!r}; {serve_it}"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # otherwise torch.cuda.is_available() initializes the driver
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                start_new_session=True,
            )

    @property
    def usable(self) -> bool:
        """True if the server is running and this process started it, rather than inheriting it in a fork."""
        try:
            return os.getpid() == self._owner and self._socket.recv(1, _LOOK) != b""
        except BlockingIOError:  # the server never sends anything, and its end of the socket is open
            return True
        except OSError:  # it was stopped, or its end of the socket was reset
            return False

    def fork(self, descriptors: list[int]) -> int:
        """Fork a rank that receives copies of the descriptors, and return the read end of its status pipe."""
        read, write = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [_RANK], [write, *descriptors])
        except OSError as error:
            os.close(read)
            raise RuntimeError(f"the fork server is gone: {self.last_words()}") from error
        finally:
            os.close(write)
        return read

    def preload(self, modules: Sequence[str]) -> None:
        """Have the server import these modules as well, as soon as it's idle."""
        if not modules:
            return
        with tempfile.TemporaryFile("w+") as file:
            json.dump(modules, file)
            file.seek(0)
            with self._lock, contextlib.suppress(OSError):  # if the server is gone, the next launch will say so
                socket.send_fds(self._socket, [_IMPORT], [file.fileno()])

    def last_words(self) -> str:
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace").strip()
        return text.splitlines()[-1] if text else f"it ended with status {self._process.poll()} and without a word"


_server: ForkServer | None = None


def fork_server() -> ForkServer:
    """Return this process's fork server. A new one is started if there is none or if it has died."""
    global _server
    if sys.platform == "win32":
        raise OSError("tplab starts its ranks by fork, which Windows does not have. Run the course inside WSL2.")
    if _server is None or not _server.usable:
        _server = ForkServer()
    return _server


def read_status(descriptor: int) -> int | None:
    """Read the process id or, later, the exit status from a status pipe. Returns None if the server is gone."""
    data = os.read(descriptor, _STATUS.size)
    return _STATUS.unpack(data)[0] if len(data) == _STATUS.size else None


_rank: int | None = None  # process id of the rank. A process that the rank forks has a copy of this variable


def is_rank() -> bool:
    """Return True in a rank, and False in all other processes, even in those that a rank has started.

    An environment variable couldn't tell, because the programs that a rank starts inherit it.
    """
    return _rank == os.getpid()


# In the server


def serve(descriptor: int) -> None:
    """Serve requests until the parent is gone."""
    control = socket.socket(fileno=descriptor)
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # children inherit this, so they survive an early request for a stack
    signal.set_wakeup_fd(wake.fileno())
    importlib.import_module("tplab.runtime.rank")  # before the first fork, so that no rank has to
    _freeze()
    to_import, asked_for = list(_WHEN_IDLE), set[str]()
    has_gpu = torch.cuda.device_count() > 0
    ranks = _Ranks((control, woken, wake))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # processes that ranks leave behind become children of this one

    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            may_import = to_import and not ranks  # while importing, it would notice late if a rank ends
            ready = {key.fileobj for key, _ in selector.select(0 if may_import else None)}
            if woken in ready:
                woken.recv(4096)
            ranks.reap()
            if control in ready:
                request, descriptors, _, _ = socket.recv_fds(control, 1, 1 + _DESCRIPTORS)
                if not request:
                    ranks.end()
                    return
                if request == _IMPORT:
                    with open(descriptors[0]) as file:
                        names = [name for name in json.load(file) if name not in asked_for]
                    asked_for.update(names)
                    to_import[:0] = names
                    continue
                ranks.start(descriptors)
            elif may_import:
                import_some(to_import, has_gpu)
                if not to_import:
                    _freeze()


def import_some(to_import: list[str], has_gpu: bool) -> None:
    """Take the first names off the list and import these modules, except for those that may not be preloaded."""
    end = time.monotonic() + _AT_ONCE
    state = torch.get_rng_state()  # modules may draw random numbers while they're imported
    while to_import and time.monotonic() < end:
        name = to_import.pop(0)
        with contextlib.suppress(Exception, SystemExit):  # a rank that needs the module will raise it
            if name in _WHEN_IDLE or may_be_preloaded(name, has_gpu):
                importlib.import_module(name)
    torch.set_rng_state(state)


def may_be_preloaded(name: str, has_gpu: bool) -> bool:
    """Return True if the server may import a module that a rank has imported.

    The rank has found an installed module, but it may have changed its import path. On the server's path, a learner's
    file may have the same name. It isn't imported, because it may change between runs.

    On a machine with GPUs, only tplab's own modules are preloaded. Others may initialize CUDA, which doesn't work in a
    process whose parent has initialized it.
    """
    package = importlib.util.find_spec(name.partition(".")[0])  # finding a submodule would import its package
    file = package and package.origin or ""
    return file.startswith(TPLAB) or (is_installed(file) and not has_gpu)


def _freeze() -> None:
    """Exempt all existing objects from garbage collection, so that the ranks keep sharing the objects' memory pages."""
    import gc

    gc.collect()
    gc.freeze()


class _Ranks:
    """The server's child processes, and their status pipes. It's true while any rank is running."""

    def __init__(self, own: tuple[socket.socket, ...]) -> None:
        self._own = own  # the server's sockets, which no rank keeps
        self._status_pipes: dict[int, int] = {}  # by process id

    def __bool__(self) -> bool:
        return bool(self._status_pipes)

    def start(self, descriptors: list[int]) -> None:
        """Fork a rank, which gets the descriptors after the status pipe, and report its process id immediately."""
        status, *rest = descriptors
        pid = os.fork()
        self._status_pipes[pid] = status
        if not pid:
            self._become_rank(rest)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, _STATUS.pack(pid))
        for descriptor in rest:
            os.close(descriptor)

    def _become_rank(self, descriptors: list[int]) -> None:
        """Become a rank in the child process. Never returns."""
        global _rank
        try:
            os.setsid()  # signals reach a rank and its children as one group
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for sock in self._own:
                sock.close()
            for status in self._status_pipes.values():
                os.close(status)
            from tplab.runtime import rank

            _rank = os.getpid()
            rank.main(*descriptors)
        finally:
            os._exit(70)  # rank.main does not return

    def reap(self) -> None:
        """Reap the child processes that have ended, and report the exit status of those that were ranks."""
        with contextlib.suppress(ChildProcessError):  # when there are no children
            while True:
                _end_children_of_next()
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in self._status_pipes:
                    pipe = self._status_pipes.pop(pid)
                    with contextlib.suppress(BrokenPipeError):
                        os.write(pipe, _STATUS.pack(os.waitstatus_to_exitcode(status)))
                    os.close(pipe)
                if not self:  # kill the processes that ranks left behind, maybe in sessions of their own
                    for left_behind in _children():
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.kill(left_behind, signal.SIGKILL)

    def end(self) -> None:
        for pid in self._status_pipes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process on Linux. Elsewhere, a rank ends because its socket to the parent closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _children() -> set[int]:
    """Return the process ids of this process's children (Linux only)."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(pid) for pid in file.read().split()}
    return set()


def _end_children_of_next() -> None:
    """Kill the processes that the next ended rank started. Before that rank is reaped, its id can't be reused."""
    if hasattr(os, "waitid"):  # available on macOS since Python 3.13; in older versions, the parent cleans up
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
