"""The code that runs in a rank's process, from the fork to the end.

The rank sends its result or its error to the parent through `control`, then waits to be killed by the parent. Its
sockets stay open until then, so that no other rank fails just because this one has finished.
"""

import contextlib
import datetime
import faulthandler
import os
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable
from itertools import islice, takewhile
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from tplab.runtime import hooks, transport
from tplab.runtime.board import Board
from tplab.runtime.devices import finish_on_gpu, take_gpu
from tplab.runtime.failures import RUNTIME, TPLAB, Frames, is_installed, is_standard_library
from tplab.runtime.hooks import set_default_timeout
from tplab.runtime.recorder import Recorder
from tplab.runtime.streams import StreamWatch

hooks.install()  # runs once, when the fork server imports this module, because it would cost each rank milliseconds

_PARENT_DECIDES = datetime.timedelta(days=1)  # the parent detects a deadlock long before the backend times out


def main(control: int, output: int, crash: int, board: int, rendezvous: int, setup: int) -> None:
    """Run one rank. All arguments are file descriptors. Never returns.

    control: messages to and from the parent    output: stdout and stderr     crash: Python stack, on request or a crash
    board: shared memory of all ranks           rendezvous: torch's FileStore  setup: what to run
    """
    modules = len(sys.modules)
    connection = Connection(control)
    _redirect_output(output)
    faulthandler.enable(crash, all_threads=False)
    faulthandler.register(signal.SIGUSR1, crash, all_threads=False)
    sending = threading.Lock()

    def send(kind: str, *parts: Any) -> None:
        message = transport.dumps((kind, *parts))
        with sending:
            connection.send_bytes(message)

    status: Board | None = None
    rank = -1

    def fail(*message: Any) -> None:
        """Report that this rank has failed, then wait for the parent to kill all ranks."""
        _flush()
        if status is not None:
            status.set_state(rank, "raised")
        send(*message)
        while True:
            signal.pause()

    try:
        rank = int.from_bytes(connection.recv_bytes(), "little")
        threading.Thread(target=_answer_parent, args=(connection, send), daemon=True).start()
        given, call = transport.read_setup(setup)
        status = Board(board, given["world_size"])
        _enter_parents_world(given, rank)
        store = given["store_path"] or f"/proc/self/fd/{rendezvous}"
        gpu = take_gpu(rank, given["world_size"], given["gpus"])
        _init_process_group(given["backend"], store, rank, given["world_size"], gpu)
        recorder = Recorder(rank, status, given["origin"])
        recorder.report = lambda: fail("mismatch")
        hooks.activate(recorder)
        if gpu is not None:
            recorder.watch = StreamWatch(rank, status, torch.cuda.Event, lambda: torch.cuda.set_device(gpu))
            recorder.watch.start()
        status.set_state(rank, "running")
        fn, args, kwargs = transport.loads(call, device=gpu)
        started = recorder.now()
        result = fn(*args, **kwargs)
        finish_on_gpu()
        span = started, recorder.now()
        _flush()
        status.set_state(rank, "returned")
        _send_result(send, rank, result, span, recorder, modules)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt, because the parent must know
        fail("error", describe_exception(error))
    while True:
        signal.pause()


def _redirect_output(output: int) -> None:
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    sys.stdout, sys.stderr = (
        open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for descriptor in (1, 2)
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):  # the program may have closed or replaced them
        with contextlib.suppress(Exception):
            stream.flush()


def _answer_parent(connection: Connection, send: Any) -> None:
    """Tell the parent what the threads are doing whenever it asks. When it's gone, kill this rank and its children."""
    main = threading.main_thread().ident
    assert main is not None
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.recv_bytes()
            send("threads", _any_can_act(main, hooks.active.is_blocked if hooks.active else lambda _: False))
    os.killpg(0, signal.SIGKILL)


# torch 2.13 renamed these functions, but older versions that tplab supports don't have the new names
_OLD_NAMES = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"


def _enter_parents_world(given: dict[str, Any], rank: int) -> None:
    """Adopt the parent's environment, folder and import path, and set the thread count and torchrun's variables."""
    world_size = str(given["world_size"])
    os.environ.clear()
    os.environ.update(given["environment"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.chdir(given["folder"])
    sys.path[:] = given["path"]
    torch.set_num_threads(given["threads"])
    warnings.filterwarnings("ignore", _OLD_NAMES, FutureWarning)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # otherwise, every rank would inherit the server's random state


def _init_process_group(backend: str, store_path: str, rank: int, world_size: int, gpu: torch.device | None) -> None:
    store = dist.FileStore(store_path, world_size)
    set_default_timeout(_PARENT_DECIDES)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=_PARENT_DECIDES,
        device_id=gpu if backend == "nccl" else None,
    )  # fmt: skip


def _send_result(
    send: Any, rank: int, result: object, span: tuple[float, float], recorder: Recorder, modules: int
) -> None:
    try:
        send("result", result, span, recorder.collectives(), _imported_since(modules))
    except Exception as error:
        kind = type(result).__name__
        send(
            "error",
            [(f"TypeError: rank {rank} returned a value (of type {kind}) that cannot travel to the notebook: {error}\n"
              "Return tensors, numbers, strings, or lists, tuples and dicts of them.\n", [])],
        )  # fmt: skip


def _imported_since(count: int) -> list[str]:
    """Return the names of the modules that this process has imported since len(sys.modules) was `count`.

    Only the standard library, installed packages and tplab count, because a learner's files may change between runs.
    Only the new modules are examined. Even looking at an object changes its reference count, which makes a forked
    process copy the object's memory page. Examining all modules would cost every rank several milliseconds.
    """
    new = list(islice(reversed(sys.modules), max(0, len(sys.modules) - count)))
    files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in reversed(new)}
    return [name for name, file in files.items() if file.startswith(TPLAB) or is_installed(file)]


def describe_exception(error: BaseException, depth: int = 0) -> list[tuple[str, Frames]]:
    """Return an exception and its causes, first cause first, as (text, frames). A frame is (file, line, function)."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    chain = describe_exception(cause, depth + 1) if cause is not None and depth < 5 else []
    frames = [
        (frame.filename, frame.lineno or 0, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(RUNTIME)
    ]
    text = "".join(traceback.format_exception_only(type(error), error))
    if isinstance(error, BaseExceptionGroup):
        text += "".join(_describe_part(part, number) for number, part in enumerate(error.exceptions, start=1))
    return [*chain, (text, frames)]


def _describe_part(error: BaseException, number: int) -> str:
    """Describe one exception of a group by its message and the place where it was raised."""
    *_, (text, frames) = describe_exception(error)
    places = [f'at File "{file}", line {line}, in {function}\n' for file, line, function in frames[-1:]]
    return textwrap.indent(f"{number}. {text}{''.join(places)}", "  ")


# Can any thread still make progress?
#
# A rank in which one thread waits for a message isn't stuck if another of its threads can still make progress. Threads
# of installed packages that only serve other threads, such as a progress bar's, don't count. Neither do threads that
# wait for another thread without a time limit, as in `join()`. A thread with no code but Python's own counts while it
# waits with a time limit, because then it may call the learner's code or a collective, as a `threading.Timer` does.

_WAITS_FOR_A_THREAD = ("threading.py", "queue.py", os.path.join("concurrent", "futures", "_base.py"))
_NO_LIMIT = (None, -1)


def _any_can_act(main: int, is_blocked: Callable[[int], bool]) -> bool:
    """Return True if any thread of this process can still make progress.

    main          id of the thread that runs the learner's function
    is_blocked    returns True if the thread with the given id is blocked in a collective
    """
    return any(
        not is_blocked(thread) and _can_act([each for each, _ in traceback.walk_stack(frame)], thread == main)
        for thread, frame in sys._current_frames().items()
        if thread != threading.get_ident()
    )


def _can_act(stack: list[FrameType], is_main: bool) -> bool:
    files = [frame.f_code.co_filename for frame in stack]
    of_learner = is_main or any(_is_learners(file) for file in files)
    if not of_learner and not all(is_standard_library(file) for file in files):
        return False
    waiting = takewhile(lambda frame: frame.f_code.co_filename.endswith(_WAITS_FOR_A_THREAD), stack)
    if inner := list(waiting):
        return any(frame.f_locals.get("timeout") not in _NO_LIMIT for frame in inner)
    return of_learner


def _is_learners(file: str) -> bool:
    """Return True for the learner's files and for tplab's, except for those in its runtime."""
    if file.startswith(("<", RUNTIME)):
        return False
    return file.startswith(TPLAB) or not is_installed(file)
