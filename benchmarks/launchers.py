"""Ways to run one function in several processes of one machine, each as fast as its options allow.

Every way does the same work on every rank: it joins a gloo process group over loopback, all-reduces one number, checks
the sum, and leaves the group. `WAYS` has a function per way, which imports what it needs and returns the launch, a
function of the number of ranks.
"""

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
PRELOAD = ["torch", "torch.distributed", "benchmarks.launchers"]
Launch = Callable[[int], object]


def add_up() -> None:
    """Do what every rank does once the process group exists: all-reduce one number, and check the sum."""
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    size = dist.get_world_size()
    if number.item() != size * (size + 1) / 2:
        raise RuntimeError(f"rank {dist.get_rank()} got {number.item()}")


def join_and_add_up(**group: Any) -> None:
    """Create the process group and call `add_up`, for launchers that leave the process group to us."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", **group)
    try:
        add_up()
    finally:
        dist.destroy_process_group()


def join_by_file(rank: int, world_size: int, path: str) -> None:
    join_and_add_up(init_method=f"file://{path}", rank=rank, world_size=world_size)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def tplab() -> Launch:
    """tplab.launch, which forks fresh processes from a warm fork server."""
    from tplab import launch

    return lambda world_size: launch(add_up, world_size, backend="gloo")


def torch_multiprocessing(start_method: str) -> Launch:
    """torch.multiprocessing. "spawn" imports torch in every process, and "forkserver" forks one that has it."""
    from torch.multiprocessing import start_processes

    if start_method == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOAD)

    def launch(world_size: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world_size, os.path.join(folder, "store"))
            start_processes(join_by_file, args=arguments, nprocs=world_size, start_method=start_method)

    return launch


def torch_elastic() -> Launch:
    """torch elastic, which is what torchrun calls, with a fork server. It checks its workers every 10 ms."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.set_forkserver_preload(PRELOAD)

    def launch(world_size: int) -> None:
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

    return launch


def accelerate() -> Launch:
    """accelerate.notebook_launcher, which forks this process and checks its workers every 10 ms."""
    from accelerate import notebook_launcher

    return lambda world_size: notebook_launcher(
        join_and_add_up, num_processes=world_size, use_port=str(free_port()), monitor_interval=0.01
    )


WAYS: dict[str, Callable[[], Launch]] = {
    "tplab.launch": tplab,
    "torch.multiprocessing, fork server": partial(torch_multiprocessing, "forkserver"),
    "torch elastic": torch_elastic,
    "accelerate.notebook_launcher": accelerate,
    "torch.multiprocessing.spawn": partial(torch_multiprocessing, "spawn"),
}
