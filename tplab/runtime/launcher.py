"""launch(fn, world_size) runs fn on every rank, each in a fresh process, and returns the results of all ranks.

    results = launch(train, 4, args=(config,))      # calls train(config) on every rank, with torch.distributed set up
    results[2]                                      # the value that rank 2 returned

Each rank is forked from a server that already has torch in memory (see `forkserver`), reports its result through a
socket, and announces in shared memory what it's about to do (see `board`). The parent shows what the ranks print and
detects deadlocks. No matter how the run ends, no process, file descriptor or memory is left behind.
"""

import inspect
import numbers
import operator
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tplab.common.cores import cores
from tplab.runtime import torchrun, transport
from tplab.runtime.board import Board, anonymous_file, board_bytes
from tplab.runtime.devices import choose
from tplab.runtime.display import output_for
from tplab.runtime.forkserver import fork_server, is_rank
from tplab.runtime.records import Results
from tplab.runtime.watch import RankProcess, Watch

MAX_RANKS = 64


def launch(
    fn: Callable[..., Any],
    world_size: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    backend: str = "auto",
    share_gpus: bool = False,
    timeout: float | None = 60.0,
) -> Results:
    """Run `fn(*args, **kwargs)` on `world_size` ranks and return the results of all ranks, in rank order.

    fn:          any function, including a lambda, a closure or a function from a notebook cell. Arguments and results
                 are passed by value. Returned tensors are on the CPU, and detached from their autograd graph.
    world_size:  number of ranks, each of which is a separate process
    backend:     "nccl" (one GPU per rank), "gloo" (CPU), or "auto", which chooses NCCL on a machine with at least eight
                 GPUs (the largest number of ranks in the course), and gloo on any other machine. The environment
                 variable TPLAB_BACKEND overrides "auto".
    share_gpus:  if True, ranks may share GPUs, with either backend. This is slow, and meant for tests with fewer GPUs
                 than ranks. With gloo, send and receive don't accept GPU tensors.
    timeout:     seconds after which the run is stopped, with a report of where every rank was (None: no limit). The
                 time until all ranks have started isn't counted. On GPUs, NCCL alone can take several seconds to start.

    In a program started by torchrun, the ranks already exist. In that case, `fn` runs on this rank, and every rank gets
    the results of all ranks. There, `backend`, `share_gpus` and `timeout` have no effect.

    Raises RankError if a rank raises an error or dies, or if the run takes too long. Raises Deadlock, which is a
    RankError, if ranks wait for something that never comes or if matching calls differ. Invalid arguments raise
    ValueError or TypeError before anything starts.
    """
    kwargs = {} if kwargs is None else kwargs
    world_size = _check_arguments(fn, world_size, args, kwargs, timeout)
    kwargs = dict(kwargs)
    if torchrun.is_active():
        return torchrun.run(fn, world_size, tuple(args), kwargs)
    if is_rank():
        raise RuntimeError("launch() was called inside a rank: the ranks are running already, just call the function")
    chosen, gpus = choose(backend, world_size, share_gpus)
    return _run(transport.pack_call(fn, tuple(args), kwargs), world_size, chosen, gpus, timeout)


# Before anything starts


def _check_arguments(fn: Any, world_size: Any, args: Any, kwargs: Any, timeout: Any) -> int:
    """Return the number of ranks. Raises TypeError or ValueError if an argument is wrong."""
    if not callable(fn):
        raise TypeError(
            f"launch needs a function, got {fn!r} of type {type(fn).__name__}. Write launch(fn), not launch(fn())"
        )
    if isinstance(world_size, bool) or not hasattr(world_size, "__index__"):
        raise TypeError(f"world_size must be a whole number of ranks, got {world_size!r}")
    world_size = operator.index(world_size)
    if world_size < 1 or (world_size > MAX_RANKS and not torchrun.is_active()):
        raise ValueError(
            f"world_size must be between 1 and {MAX_RANKS} (each rank is a process here), got {world_size}"
        )
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise TypeError(f"args must be a tuple of arguments, got {args!r}. For a single argument write args=(x,)")
    if timeout is not None and not (isinstance(timeout, numbers.Real) and float(timeout) > 0):
        raise ValueError(f"timeout must be a positive number of seconds or None, got {timeout!r}")
    _check_call(fn, args, kwargs)
    return world_size


def _check_call(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", repr(fn))
        raise TypeError(
            f"{name}{signature} can't be called with args={tuple(args)!r}, kwargs={kwargs!r}: {error}. "
            "A rank finds its own number with torch.distributed.get_rank(); launch does not pass it."
        ) from None


# The run


def _run(call: memoryview, world_size: int, backend: str, gpus: int, timeout: float | None) -> Results:
    origin = time.monotonic()
    server = fork_server()
    with ExitStack() as stack:
        with _interrupt_later():
            board_file = _closing(stack, anonymous_file(board_bytes(world_size)))
            rendezvous, store_path = _rendezvous(stack)
            setup = _closing(stack, anonymous_file())
            board = Board(board_file, world_size)
            stack.callback(board.close)
        given = {
            "world_size": world_size,
            "backend": backend,
            "gpus": gpus,
            "origin": origin,
            "store_path": store_path,
            "environment": {**os.environ, **_loopback_only()},
            "folder": os.getcwd(),
            "path": list(sys.path),
            "threads": _threads_per_rank(world_size),
        }
        transport.write_setup(setup, given, call)
        del call  # it may be large
        ranks: list[RankProcess] = []
        watch: Watch | None = None
        try:
            for rank in range(world_size):
                with _interrupt_later():
                    ranks.append(RankProcess(rank, server, (board_file, rendezvous, setup)))
            watch = Watch(ranks, board, output_for(world_size))
            results = watch.until_done(timeout)
            server.preload(watch.imported())
            return results
        finally:
            with _interrupt_later():
                for process in ranks:
                    process.kill()
                if watch is not None:
                    watch.close()
                for process in ranks:
                    process.close()


def _closing(stack: ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


def _rendezvous(stack: ExitStack) -> tuple[int, str | None]:
    """Open the file through which the ranks find each other. On Linux it's unnamed memory, else a temporary file."""
    if sys.platform == "linux":
        return _closing(stack, anonymous_file()), None
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tplab-"))
    path = os.path.join(folder, "store")
    return _closing(stack, os.open(path, os.O_CREAT | os.O_RDWR, 0o600)), path


def _loopback_only() -> dict[str, str]:
    """Return environment variables that make gloo and NCCL use only the loopback interface."""
    import socket

    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def _threads_per_rank(world_size: int) -> int:
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return max(1, cores() // world_size)


@contextmanager
def _interrupt_later() -> Iterator[None]:
    """Context manager that delays Ctrl-C until the block ends, so that a second Ctrl-C can't leave a rank behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, Any]] = []
    handler = signal.signal(signal.SIGINT, lambda *what: received.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received and callable(handler):
            handler(*received[0])
