"""Ways to run one function in several processes of one machine, each as fast as its options allow.

Every way does the same work on every rank: it joins a gloo process group over loopback, all-reduces one number, checks
the sum, and leaves the group. Each way is an object that is called with the number of ranks.
"""

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
PRELOAD = ["torch", "torch.distributed", "benchmarks.launchers"]


def add_up() -> float:
    """Do what every rank does once the process group exists: all-reduce one number, and check the sum."""
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    size = dist.get_world_size()
    if number.item() != size * (size + 1) / 2:
        raise RuntimeError(f"rank {dist.get_rank()} got {number.item()}")
    return number.item()


def join_and_add_up(**group: Any) -> float:
    """Create the process group and call `add_up`, for launchers that leave the process group to us."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", **group)
    try:
        return add_up()
    finally:
        dist.destroy_process_group()


def join_by_file(rank: int, world_size: int, path: str) -> None:
    join_and_add_up(init_method=f"file://{path}", rank=rank, world_size=world_size)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


class Tplab:
    """tplab.launch, which forks fresh processes from a warm fork server."""

    def __init__(self) -> None:
        from tplab import launch

        self.launch = launch

    def __call__(self, world_size: int) -> None:
        self.launch(add_up, world_size, backend="gloo")


class WorkerPool:
    """A pool of processes that have imported torch and are connected to a store. A launch only makes a new group."""

    def __init__(self) -> None:
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.pools: dict[int, list[Connection]] = {}
        self.jobs = 0

    def __call__(self, world_size: int) -> None:
        workers = self.pools.setdefault(world_size, []) or self._start(world_size)
        self.jobs += 1
        for worker in workers:
            worker.send(self.jobs)
        answers = [worker.recv() for worker in workers]
        if any(answer is not None for answer in answers):
            raise RuntimeError(f"a worker failed: {answers}")

    def _start(self, world_size: int) -> list[Connection]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world_size, self.store.port)
            context.Process(target=_serve, args=arguments, daemon=True).start()
            self.pools[world_size].append(ours)
        return self.pools[world_size]


def _serve(jobs: Connection, rank: int, world_size: int, port: int) -> None:
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=60))
    while job := _next(jobs):
        try:
            join_and_add_up(store=dist.PrefixStore(f"{world_size}/{job}", store), rank=rank, world_size=world_size)
            jobs.send(None)
        except Exception as error:
            jobs.send(repr(error))


def _next(jobs: Connection) -> int | None:
    try:
        return jobs.recv()
    except EOFError:  # the parent has ended
        return None


class Multiprocessing:
    """torch.multiprocessing. "spawn" imports torch in every process, and "forkserver" forks one that has it."""

    def __init__(self, start_method: str) -> None:
        self.start_method = start_method
        if start_method == "forkserver":
            multiprocessing.set_forkserver_preload(PRELOAD)

    def __call__(self, world_size: int) -> None:
        from torch.multiprocessing import start_processes

        with tempfile.TemporaryDirectory() as folder:
            arguments = (world_size, os.path.join(folder, "store"))
            start_processes(join_by_file, args=arguments, nprocs=world_size, start_method=self.start_method)


class Elastic:
    """torch elastic, which is what torchrun calls, with a fork server. It checks its workers every 10 ms."""

    def __init__(self) -> None:
        multiprocessing.set_forkserver_preload(PRELOAD)

    def __call__(self, world_size: int) -> None:
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id="benchmark",
            rdzv_backend="static",  # faster than "c10d" on one machine
            rdzv_endpoint=f"{HOST}:{free_port()}",
            rdzv_configs={"rank": 0},
            local_addr=HOST,
            max_restarts=0,
            monitor_interval=0.01,
            start_method="forkserver",
        )
        elastic_launch(config, join_and_add_up)()


class Accelerate:
    """accelerate.notebook_launcher, which forks this process and checks its workers every 10 ms."""

    def __init__(self) -> None:
        from accelerate import notebook_launcher

        self.launch = notebook_launcher

    def __call__(self, world_size: int) -> None:
        self.launch(join_and_add_up, num_processes=world_size, use_port=str(free_port()), monitor_interval=0.01)


WAYS: dict[str, Callable[[], Callable[[int], None]]] = {
    "tplab.launch": Tplab,
    "worker pool, new group": WorkerPool,
    "torch.multiprocessing, fork server": lambda: Multiprocessing("forkserver"),
    "torch elastic": Elastic,
    "accelerate.notebook_launcher": Accelerate,
    "torch.multiprocessing.spawn": lambda: Multiprocessing("spawn"),
}
