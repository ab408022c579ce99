"""Nothing outlives a run: no process, file descriptor, shared memory, socket or temporary file. Nothing listens beyond
loopback."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import tplab
from tplab.runtime.forkserver import fork_server

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files of this test, of its ranks too, go where no other test writes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def tracked() -> dict[str, object]:
    """What a run could leave behind. (A browser test that runs at the same time has shared memory of its own.)"""
    shared = Path("/dev/shm")
    server = fork_server()._process.pid
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "descriptors of the server": len(os.listdir(f"/proc/{server}/fd")),
        "processes": len(psutil.Process().children(recursive=True)),
        "shared memory": sorted(path.name for path in shared.glob("*") if "chromium" not in path.name),
        "temporary files": sorted(os.listdir(tempfile.gettempdir())),
    }


def settled() -> dict[str, object]:
    """`tracked()`, once nothing changes any more: the system takes a moment to finish what was ended."""
    seen: list[dict[str, object]] = [tracked()]
    while len(seen) < 10 or seen[-10:] != [seen[-1]] * 10:
        time.sleep(0.05)
        seen.append(tracked())
    return seen[-1]


def all_reduce_once() -> None:
    dist.all_reduce(torch.ones(2))


def one_rank_raises() -> None:
    assert dist.get_rank() == 0
    all_reduce_once()


def children_left_behind() -> None:
    subprocess.Popen(["sleep", "1000"])


def one_rank_dies_with_children() -> None:
    children_left_behind()
    all_reduce_once() if dist.get_rank() == 0 else os._exit(1)


@linux_only
def test_nothing_is_left_behind_however_a_run_ends() -> None:
    while not tplab.launch(lambda: "torch.distributed.tensor.parallel" in sys.modules, 2)[0]:
        pass  # the server is still importing, which creates a temporary folder of torch's
    before = settled()
    for program in 2 * (all_reduce_once, one_rank_raises, children_left_behind, one_rank_dies_with_children):
        with contextlib.suppress(tplab.RankError):
            tplab.launch(program, 2)
    assert settled() == before


def listening_beyond_loopback() -> list[str]:
    """On a rank: sockets of this machine that listen on an address that is not loopback, and belong to a rank."""
    dist.barrier()
    ranks = {child.pid for child in psutil.Process(os.getppid()).children(recursive=True)}
    sockets = [socket for socket in psutil.net_connections(kind="inet") if socket.pid in ranks and socket.laddr]
    assert sockets, "gloo connects its ranks by sockets: none was found, so this test looks in the wrong place"
    dist.barrier()
    loopback = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    return [f"{socket.laddr} {socket.status}" for socket in sockets if socket.laddr.ip not in loopback]


@linux_only
def test_gloo_binds_to_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [name for name in psutil.net_if_addrs() if name != "lo"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", others[0] if others else "none0")  # as on a cluster
    assert tplab.launch(listening_beyond_loopback, 3, backend="gloo") == [[], [], []]


@linux_only
def test_ranks_end_with_the_program_that_launched_them(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    script = textwrap.dedent("""
        import os, time
        import tplab, torch, torch.distributed as dist
        folder = os.environ["PIDS"]
        def program():
            with open(os.path.join(folder, f"rank{dist.get_rank()}"), "w") as file:
                file.write(str(os.getpid()))
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(2))   # stuck in C++
            while True:
                time.sleep(1)                    # stuck in Python
        tplab.launch(program, 2, timeout=None)
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PIDS": str(tmp_path)}, stderr=subprocess.DEVNULL
    )
    request.addfinalizer(parent.kill)  # a failure of this test must leave nothing behind either
    files = [tmp_path / f"rank{rank}" for rank in range(2)]
    while not all(file.exists() and file.read_text() for file in files):
        assert parent.poll() is None
        time.sleep(0.05)
    processes = [psutil.Process(int(file.read_text())) for file in files]
    server = processes[0].parent()
    assert server is not None
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs([*processes, server], timeout=60)
    assert not alive


def test_each_rank_is_a_new_process() -> None:
    ranks = [pid for _ in range(2) for pid in tplab.launch(os.getpid, 2)]
    assert len(set(ranks)) == 4


def test_ranks_do_not_outlive_a_killed_fork_server() -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    with pytest.raises(tplab.RankError):
        tplab.launch(program, 2, timeout=None)
    assert tplab.launch(dist.get_rank, 2) == [0, 1]


@pytest.mark.parametrize(
    ("pool", "shared"),
    [(ThreadPoolExecutor, True), (partial(ProcessPoolExecutor, mp_context=get_context("fork")), False)],
)
def test_launch_works_from_another_thread_and_a_forked_process_starts_its_own_server(
    pool: Callable[..., Executor], shared: bool
) -> None:
    for _ in range(2):
        own = list(tplab.launch(os.getppid, 2))
        with pool(1) as other:
            theirs = list(other.submit(tplab.launch, os.getppid, 2).result())
        assert (theirs == own) == shared


@linux_only  # elsewhere, a process can't adopt its children's children
def test_a_process_in_a_session_of_its_own_ends_with_the_run() -> None:
    def program() -> int:
        script = "import subprocess as s, time; print(s.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
        child = subprocess.Popen(
            [sys.executable, "-c", script], start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        return int(child.stdout.readline())

    (pid,) = tplab.launch(program, 1)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(120)
    assert not psutil.pid_exists(pid)
