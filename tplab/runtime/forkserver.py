"""The fork server: a process that has already imported torch and forks the ranks.

    notebook ──(a byte and seven file descriptors)──▶ fork server ──fork──▶ rank 0, rank 1, ...

Importing torch takes seconds, but a fork takes only milliseconds. The server stores nothing about any run, uses no GPU
and starts no threads, so a forked rank is as good as a fresh process. It runs in a separate session, so interrupting
the notebook doesn't interrupt it. When the notebook ends, the socket closes, and the server kills all ranks and exits.

While idle, it imports the rest of torch and the modules that earlier ranks had to import themselves (see `preload`).
Then it forks a few spares of about a megabyte each. A spare is a process that has run only these imports. It waits
until a rank is needed, then becomes that rank, and is never reused.

For each rank, the server reports the process id, and later the exit status, through a pipe.
"""

import contextlib
import ctypes
import importlib
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

from tplab.runtime import preload

_WHEN_IDLE = ("torch.optim", "torch._dynamo", "torch.distributed.tensor.parallel")
_SPARES = 4  # forked in advance, so that a launch of up to four ranks doesn't wait for forks, which take milliseconds
_RANK, _IMPORT = b"r", b"i"  # requests to the server
_BEFORE_LAUNCH = 0.1  # seconds that a launch may wait for imports, which every rank would otherwise have to repeat
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

    def stop(self) -> None:
        self._socket.close()
        self._process.wait()
        self._stderr.close()


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
    to_import, wanted = list(_WHEN_IDLE), preload.Wanted(has_gpu=torch.cuda.device_count() > 0)
    family = _Family((control, woken, wake))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # processes that ranks leave behind become children of this one

    def import_wanted(seconds: float) -> None:
        """Import at least one module, and start no further imports after `seconds`."""
        end = time.monotonic() + seconds
        wanted.import_next()
        while wanted and time.monotonic() < end:
            wanted.import_next()
        if not wanted:
            _freeze()
            family.end_spares()

    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            may_import = not family.has_ranks  # otherwise, the server would notice late if a rank ends
            has_work = may_import and (to_import or wanted) or family.wants_spare
            ready = {key.fileobj for key, _ in selector.select(0 if has_work else None)}
            if woken in ready:
                woken.recv(4096)
            family.reap()
            if control in ready:
                request, descriptors, _, _ = socket.recv_fds(control, 1, 1 + _DESCRIPTORS)
                if not request:
                    family.end()
                    return
                if request == _IMPORT:
                    with open(descriptors[0]) as file:
                        wanted.add(json.load(file))
                    continue
                if wanted and not family.has_ranks:  # there may be no idle time between launches
                    import_wanted(_BEFORE_LAUNCH)
                family.start_rank(descriptors)
            elif to_import and may_import:
                importlib.import_module(to_import.pop(0))
                _freeze()
            elif wanted and may_import:
                import_wanted(0.0)
            elif family.wants_spare:
                family.fork_spare()


def _freeze() -> None:
    """Exempt all existing objects from garbage collection, so that the ranks keep sharing the objects' memory pages."""
    import gc

    gc.collect()
    gc.freeze()


class _Family:
    """The server's child processes: the ranks, and the spares, which it forked in advance to become ranks later."""

    def __init__(self, own: tuple[socket.socket, ...]) -> None:
        self._own = own  # the server's sockets, which no child keeps
        self._status_pipes: dict[int, int] = {}  # the ranks' status pipes, by process id
        self._spares: dict[int, socket.socket] = {}

    @property
    def has_ranks(self) -> bool:
        return bool(self._status_pipes)

    @property
    def wants_spare(self) -> bool:
        """True if a spare should be forked. None is forked while ranks are running, because they need the CPU."""
        return not self.has_ranks and len(self._spares) < _SPARES

    def fork_spare(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            pid = os.fork()
            if not pid:
                ours.close()
                self._become_rank(theirs)
        self._spares[pid] = ours

    def end_spares(self) -> None:
        """End the spares, because they lack the latest imports. The server will fork new ones."""
        for sock in self._spares.values():
            sock.close()  # this makes the spare exit
        self._spares.clear()

    def start_rank(self, descriptors: list[int]) -> None:
        """Turn a spare into a rank by sending it the descriptors, and report its process id immediately."""
        if not self._spares:
            self.fork_spare()
        status, *rest = descriptors
        pid, spare = self._spares.popitem()
        self._status_pipes[pid] = status
        with spare, contextlib.suppress(BrokenPipeError):  # a dead spare will be reaped as a dead rank
            socket.send_fds(spare, [b"r"], rest)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, _STATUS.pack(pid))
        for descriptor in rest:
            os.close(descriptor)

    def _become_rank(self, waiting: socket.socket) -> None:
        """Wait in the child process until a rank is needed, then become that rank. Never returns."""
        global _rank
        try:
            os.setsid()  # signals reach a rank and its children as one group
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for sock in (*self._own, *self._spares.values()):
                sock.close()
            for descriptor in self._status_pipes.values():
                os.close(descriptor)
            request, descriptors, _, _ = socket.recv_fds(waiting, 1, _DESCRIPTORS)
            waiting.close()
            if request:
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
                if pid in self._spares:
                    self._spares.pop(pid).close()
                    continue
                if pid in self._status_pipes:
                    pipe = self._status_pipes.pop(pid)
                    with contextlib.suppress(BrokenPipeError):
                        os.write(pipe, _STATUS.pack(os.waitstatus_to_exitcode(status)))
                    os.close(pipe)
                self._end_what_is_left()

    def _end_what_is_left(self) -> None:
        """If no rank is running, kill the processes that ranks left behind, maybe in sessions of their own."""
        for pid in set() if self._status_pipes else _children() - self._spares.keys():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        for pid in (*self._status_pipes, *self._spares):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process on Linux. Elsewhere, processes end because their sockets close.

    A spare's socket leads to the server, and a rank's leads to the parent.
    """
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
