"""Implements launch() for a program that torchrun has started, where the ranks already exist.

torchrun --nproc-per-node 4 train.py       # train.py calls launch(train, 4), unchanged
"""

import atexit
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tplab.runtime import hooks, transport
from tplab.runtime.devices import VARIABLE, backend_for
from tplab.runtime.failures import rank_names
from tplab.runtime.forkserver import is_rank
from tplab.runtime.hooks import set_default_timeout
from tplab.runtime.records import Record, Results

LOST_AFTER = timedelta(minutes=3)  # how long a rank waits in a collective of a group without its own timeout
PATIENCE = timedelta(days=1)  # how long a rank waits for the others' results. torchrun ends it if another rank fails


_TAKEN_BY = "TPLAB_TORCHRUN_RANK"  # environment variable: the process that acts as this rank of torchrun's

_went_well = False


def is_active() -> bool:
    """Return True if torchrun has started this process as a rank.

    RANK and WORLD_SIZE alone don't prove it, because someone may have set them in a shell or notebook for a tutorial. A
    program that the rank starts inherits all of torchrun's variables. But once the rank has called launch, it's taken.
    """
    taken = os.environ.get(_TAKEN_BY) not in (None, str(os.getpid()))
    return {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= os.environ.keys() and not taken and not is_rank()


def local_rank() -> int:
    """Return the number of this rank on its machine, or 0 if torchrun didn't start this process."""
    return int(os.environ.get("LOCAL_RANK", "0")) if is_active() else 0


def run(fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Results:
    """Run `fn` on this rank and gather the results of all ranks, so that every rank returns the same results.

    Raises ValueError if torchrun didn't start exactly `world_size` ranks.
    """
    global _went_well
    _went_well = False
    started = int(os.environ["WORLD_SIZE"])
    if started != world_size:
        raise ValueError(
            f"launch asks for {world_size} ranks, but torchrun started {started}. "
            f"Start torchrun with --nproc-per-node {world_size}, or call launch with world_size={started}."
        )
    os.environ[_TAKEN_BY] = str(os.getpid())
    if not dist.is_initialized():
        _init_process_group()
    waiting = _group_for_results()
    with hooks.record() as section:
        recorder = hooks.active
        assert recorder is not None  # there is a process group, so there is a recorder
        began = recorder.now()
        result = fn(*args, **kwargs)
        span = began, recorder.now()
    everything: list[Any] = [None] * started
    on_cpu = transport.loads(bytes(transport.dumps(result)))  # as it would arrive from a launched rank
    dist.all_gather_object(everything, (on_cpu, span, list(section)), waiting)
    _went_well = True
    returned, spans, sections = ([part[index] for part in everything] for index in range(3))
    record = Record([collective for collectives in sections for collective in collectives])
    return Results(returned, [""] * started, record, spans)


_results: dist.ProcessGroup | None = None


def _group_for_results() -> dist.ProcessGroup | None:
    """Return a group of all ranks with a long timeout, because some ranks may still be evaluating or writing files."""
    global _results
    if _results is None:
        _results = dist.new_group(backend="gloo", timeout=PATIENCE)
    return _results


def _init_process_group() -> None:
    """Initialize NCCL if every rank on every machine can have its own GPU, and otherwise gloo on all ranks."""
    atexit.register(_destroy_process_group)
    on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    store, rank, world_size = next(dist.rendezvous("env://", timeout=LOST_AFTER))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store has the addresses of earlier ranks, too
    store = dist.PrefixStore(f"attempt {attempt}", store)
    obstacles = exchange(store, rank, world_size, _obstacle(torch.cuda.device_count(), on_machine))
    ranks_with = {why: [who for who, its in enumerate(obstacles) if its == why] for why in obstacles if why}
    reasons = "; ".join(f"{rank_names(ranks)}: {why}" for why, ranks in ranks_with.items())
    if reasons and os.environ.get(VARIABLE) == "nccl":
        raise ValueError(f"{VARIABLE} is nccl, but not every rank has a GPU of its own: {reasons}")
    set_default_timeout(LOST_AFTER)
    device = None if reasons else torch.device("cuda", local_rank())
    if device is not None:
        torch.cuda.set_device(device)
    backend = "gloo" if device is None else "nccl"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=LOST_AFTER, device_id=device
    )  # fmt: skip
    if rank == 0 and reasons and set(obstacles) != {_NO_GPU}:
        told = "all ranks compute on the CPU and communicate with gloo, because not every rank has a GPU of its own"
        print(f"tplab: {told}: {reasons}", file=sys.stderr)


def exchange(store: dist.Store, rank: int, world_size: int, text: str) -> list[str]:
    """Return the texts of all ranks. Every rank has to call this function.

    This can't be a collective, because the ranks have yet to agree on a backend. Raises TimeoutError if some ranks
    haven't called it within LOST_AFTER.
    """
    keys = [f"tplab/{other}" for other in range(world_size)]
    store.set(keys[rank], text)
    try:
        store.wait(keys, LOST_AFTER)
    except dist.DistStoreError:
        raise TimeoutError(
            f"rank {rank} waited {LOST_AFTER.total_seconds():.0f} s for all {world_size} ranks to start. Look for an "
            "error message from one of the others, or for a machine on which torchrun wasn't started."
        ) from None
    return [store.get(key).decode() for key in keys]


def _destroy_process_group() -> None:
    """End the threads of the process group before Python shuts down, if every rank has returned from its last launch.

    Otherwise gloo's threads may release a tensor too late, which aborts the process (pytorch/pytorch#179291). After an
    error, ranks may still be waiting in a collective, and destroying the group could hang (pytorch/torchtitan#1342).
    """
    failed = hasattr(sys, "last_type")  # Python sets this for an uncaught error
    if dist.is_initialized() and _went_well and not failed:
        dist.destroy_process_group()


_NO_GPU = "there is no GPU"


def _obstacle(gpus: int, ranks: int) -> str:
    """Return the reason why a rank on this machine can't use NCCL, or "" if it can."""
    if backend_for(ranks) == "nccl" and gpus >= ranks:
        return ""
    if not gpus:
        return _NO_GPU
    if gpus < ranks:
        return (
            f"{ranks} were started on their machine, and each sees {gpus} of its GPUs. Start one for each GPU, and let "
            "every rank see them all: CUDA_VISIBLE_DEVICES should be the same for all (Slurm: --gpus-per-node, without "
            "--gpus-per-task and --gpu-bind)"
        )
    return "TPLAB_BACKEND is gloo" if dist.is_nccl_available() else "this torch was built without NCCL"
