"""The fork server: a process that has imported torch already and forks the ranks.

    notebook ──(a byte and seven file descriptors)──▶ fork server ──fork──▶ rank 0, rank 1, ...

Importing torch takes seconds, a fork takes milliseconds. The server holds no state of any run, uses no GPU and starts
no threads, so a forked rank is as good as a fresh process. It lives in a session of its own (an interrupt of the
notebook does not reach it) and ends with the notebook: when its socket closes, it ends every rank and itself.

While nobody asks for a rank it imports what is left of torch, then what earlier ranks had to import themselves (see
`preload`), then it forks a few spares, about a megabyte each: processes that wait to become ranks. A spare has seen
nothing but the imports, and becomes a rank once.

A rank's process id, and later its exit status, come back through a pipe, one per rank.
"""

import contextlib
import ctypes
import importlib
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

from tplab.runtime import preload

_PRELOAD = (
    "torch",
    "torch.distributed",
    "tplab.runtime.rank",
    "torch.optim",
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
)
_NEEDED = 3  # so many of them must be there before the first fork
_SPARES = (
    4  # so many are forked ahead: a fork takes milliseconds, and a launch of up to four ranks need not wait for it
)
_RANK, _IMPORT = b"r", b"i"  # requests to the server
_BEFORE_LAUNCH = 0.1  # seconds that a launch may wait for what each of its ranks would have to import
_STATUS = struct.Struct("<q")
_DESCRIPTORS = 6  # control, output, crash, board, rendezvous, setup (see rank.main), after the status pipe
_PR_SET_PDEATHSIG = 1
_LOOK = socket.MSG_PEEK | socket.MSG_DONTWAIT


# In the notebook's process


class ForkServer:
    """A running fork server, as its parent sees it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._lock = threading.Lock()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the server)
        self._owner = os.getpid()
        serve_it = f"from tplab.runtime.forkserver import serve; serve({theirs.fileno()})"
        start = f"import sys; sys.path[:] = {sys.path!r}; {serve_it}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
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
        """Whether it runs and is this process's own: not that of the one we were forked from, unless we adopted it."""
        try:
            return os.getpid() == self._owner and self._socket.recv(1, _LOOK) != b""
        except BlockingIOError:  # it has said nothing, as always, and its end of the socket is open
            return True
        except OSError:  # it was stopped, or its end of the socket was reset
            return False

    def adopt(self) -> None:
        """Make the server that was inherited by a fork this process's own. One process at a time may launch with it."""
        self._owner = os.getpid()

    def fork(self, descriptors: list[int]) -> int:
        """Fork a rank that gets copies of the descriptors; returns the read end of its status pipe."""
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

    def preload(self, modules: Sequence[preload.Module]) -> None:
        """Let it import these modules too, as soon as it has nothing else to do."""
        if modules:
            with self._lock, contextlib.suppress(OSError):  # if it is gone, the next launch will say so
                self._socket.sendall(_IMPORT + preload.pack(modules))

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
    """The fork server of this process; started when there is none, or when it has died."""
    global _server
    if sys.platform == "win32":
        raise OSError("tplab starts its ranks by fork, which Windows does not have. Run the course inside WSL2.")
    if _server is None or not _server.usable:
        _server = ForkServer()
    return _server


def adopt() -> None:
    """Launch with the fork server of the process that this one was forked from, instead of starting another one."""
    if _server is not None:
        _server.adopt()


def read_status(descriptor: int) -> int | None:
    """The next number from a status pipe: first the process id, then the exit status. None: the server is gone."""
    data = os.read(descriptor, _STATUS.size)
    return _STATUS.unpack(data)[0] if len(data) == _STATUS.size else None


# In the server


def serve(descriptor: int) -> None:
    """Serve requests until the parent is gone."""
    control = socket.socket(fileno=descriptor)
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    to_import, wanted = list(_PRELOAD), preload.Wanted()
    family = _Family((control, woken, wake))

    def import_wanted(seconds: float) -> None:
        """At least one module; no other after so many seconds."""
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
            may_fork = len(_PRELOAD) - len(to_import) >= _NEEDED
            may_import = not (may_fork and family.has_ranks)  # else it hears late of their end
            has_work = may_import and (to_import or wanted) or family.wants_spare
            ready = {key.fileobj for key, _ in selector.select(0 if has_work else None)}
            if woken in ready:
                woken.recv(4096)
            family.reap()
            if control in ready and may_fork:
                request, descriptors, _, _ = socket.recv_fds(control, 1, 1 + _DESCRIPTORS)
                if not request:
                    family.end()
                    return
                if request == _IMPORT:
                    wanted.add(preload.receive(control))
                    continue
                if wanted and not family.has_ranks:  # launches may follow each other too closely to leave time for it
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
    """What is in memory now is never collected, so that ranks share its pages."""
    import gc

    gc.collect()
    gc.freeze()


class _Family:
    """The server's children: ranks, and spares, which are forked ahead of time and wait to become ranks."""

    def __init__(self, own: tuple[socket.socket, ...]) -> None:
        self._own = own  # the server's sockets, which no child keeps
        self._status_pipes: dict[int, int] = {}  # of the ranks, by process id
        self._spares: dict[int, socket.socket] = {}
        self._outdated: set[int] = set()  # spares that are about to end

    @property
    def has_ranks(self) -> bool:
        return bool(self._status_pipes)

    @property
    def wants_spare(self) -> bool:
        """While ranks run, the processor is theirs."""
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
        """Those there are have not got what was imported since. New ones will be forked."""
        for pid, sock in self._spares.items():
            self._outdated.add(pid)
            sock.close()  # then it ends itself
        self._spares.clear()

    def start_rank(self, descriptors: list[int]) -> None:
        """Hand the descriptors to a spare, which becomes the rank; its process id goes back at once."""
        if not self._spares:
            self.fork_spare()
        status, *rest = descriptors
        pid, spare = self._spares.popitem()
        self._status_pipes[pid] = status
        with spare, contextlib.suppress(BrokenPipeError):  # a spare that is dead will be reaped as a dead rank
            socket.send_fds(spare, [b"r"], rest)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, _STATUS.pack(pid))
        for descriptor in rest:
            os.close(descriptor)

    def _become_rank(self, waiting: socket.socket) -> None:
        """In the child: wait until it is needed, then be a rank. Does not return."""
        try:
            os.setsid()  # signals reach a rank and its children as one group
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _die_with_parent()
            for sock in (*self._own, *self._spares.values()):
                sock.close()
            for descriptor in self._status_pipes.values():
                os.close(descriptor)
            request, descriptors, _, _ = socket.recv_fds(waiting, 1, _DESCRIPTORS)
            waiting.close()
            if request:
                from tplab.runtime import rank

                rank.main(*descriptors)
        finally:
            os._exit(70)  # rank.main does not return

    def reap(self) -> None:
        """Collect the children that have ended, and pass on how."""
        while self._status_pipes or self._spares or self._outdated:
            _end_children_of_next()
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in self._outdated:
                self._outdated.remove(pid)
                continue
            if pid in self._spares:
                self._spares.pop(pid).close()
                continue
            pipe = self._status_pipes.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(pipe, _STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(pipe)

    def end(self) -> None:
        for pid in (*self._status_pipes, *self._spares, *self._outdated):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def _die_with_parent() -> None:
    """Ask the kernel to end this process when the server ends (Linux; elsewhere the rank notices by itself)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_children_of_next() -> None:
    """End what an ended rank itself had started, while its id cannot belong to anyone else yet (not yet reaped)."""
    if hasattr(os, "waitid"):  # macOS has it from Python 3.13 on; before, the parent's own clean-up must do
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
