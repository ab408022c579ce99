"""Choose the device that each rank computes on, and the backend that carries its messages.

    NCCL, one GPU per rank      the default on a machine with eight GPUs, as many as the course ever needs
    gloo, on the CPU            the default on other machines
    gloo, sharing GPUs          messages pass through host memory; gloo can't send or receive GPU tensors
    NCCL, sharing GPUs          NCCL refuses two ranks of one host on the same GPU, so each rank claims to be a separate
                                host (NCCL_HOSTID); messages go over the loopback interface

The last two are for testing with fewer GPUs than ranks. Everything runs as it would on many GPUs, only more slowly.

The default doesn't depend on the number of ranks, because the same seed gives different random numbers on a GPU than on
the CPU. If it did, a machine with two GPUs would initialize one model for p = 2 and a different one for p = 4. The
environment variable TPLAB_BACKEND (nccl or gloo) overrides the default. With TPLAB_BACKEND=nccl, ranks may share GPUs
if TPLAB_SHARE_GPUS=1 is set as well.
"""

import os

import torch
import torch.distributed as dist

from tplab.runtime.display import say

BACKENDS = ("auto", "gloo", "nccl")
COURSE_RANKS = 8  # the largest number of ranks that any chapter launches
VARIABLE = "TPLAB_BACKEND"
SHARE_VARIABLE = "TPLAB_SHARE_GPUS"


# In the parent, before anything starts


def choose(backend: str, world_size: int, share_gpus: bool = False) -> tuple[str, int]:
    """Return the backend and the number of GPUs to use (0 for CPU). Raises ValueError if the request can't be met."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    is_default = backend == "auto"
    if is_default:
        backend = _from_environment() or backend
        if backend == "nccl" and torch.cuda.device_count():
            share_gpus = share_gpus or os.environ.get(SHARE_VARIABLE) == "1"
    gpus = torch.cuda.device_count() if share_gpus or backend != "gloo" else 0
    for_nccl = gpus if dist.is_nccl_available() else 0
    if backend == "auto":
        backend = "nccl" if for_nccl >= (world_size if share_gpus else COURSE_RANKS) else "gloo"
    if share_gpus and not gpus:
        raise ValueError("share_gpus=True needs a GPU, and this machine shows none: leave it out to run on the CPU")
    if backend == "nccl" and for_nccl < (1 if share_gpus else world_size):
        on_cpu = f"set {VARIABLE}=gloo" if is_default else 'use backend="gloo"'
        raise ValueError(
            f"NCCL needs a GPU per rank: {world_size} ranks, but this machine shows {for_nccl} GPU(s). "
            f"Use fewer ranks, or {on_cpu} to run on the CPU."
        )
    if is_default:
        _say_once(backend, gpus, world_size, share_gpus)
    return backend, min(gpus, world_size) if backend == "nccl" or share_gpus else 0


def _from_environment() -> str | None:
    chosen = os.environ.get(VARIABLE)
    if chosen not in (None, "gloo", "nccl"):
        raise ValueError(f"the environment variable {VARIABLE} must be gloo or nccl, but it is {chosen!r}")
    return chosen


def backend_for(world_size: int) -> str:
    """Return "nccl" if this machine has a GPU for each of `world_size` ranks, otherwise "gloo".

    TPLAB_BACKEND overrides the result. This function is meant for programs whose launches all have the same number of
    ranks, such as the capstone.
    """
    return _from_environment() or (
        "nccl" if dist.is_nccl_available() and torch.cuda.device_count() >= world_size else "gloo"
    )


_said: set[str] = set()


def _say_once(backend: str, gpus: int, world_size: int, share_gpus: bool) -> None:
    if backend in _said:
        return
    _said.add(backend)
    processes, some = f"{world_size} process{'es' * (world_size > 1)}", f"{gpus} GPU{'s' * (gpus > 1)}"
    if backend == "gloo" and not share_gpus:
        say(f"{processes} on this machine's CPU")
    elif gpus < world_size:
        say(f"{processes} that share {some} ({backend})")
    else:
        say(f"{processes}, one GPU each ({backend})")
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        say(
            f"RANK={os.environ['RANK']} and WORLD_SIZE={os.environ['WORLD_SIZE']} are ignored, because torchrun didn't "
            "start this process. It starts its own ranks."
        )
    if backend == "gloo" and gpus and not share_gpus:
        say(
            f"the course launches up to {COURSE_RANKS} ranks, all on the same kind of device, so that a seed "
            f"gives the same model for every p. To use your {some}, set {VARIABLE}=nccl before the first launch. "
            f"Launches of more than {gpus} rank{'s' * (gpus > 1)} are then refused, unless you set "
            f"{SHARE_VARIABLE}=1 as well, which makes ranks share GPUs. That's slow."
        )


# In a rank


_has_gpu = False


def take_gpu(rank: int, world_size: int, gpus: int) -> torch.device | None:
    """Select and return this rank's GPU, or return None on the CPU. Call this before creating the process group."""
    global _has_gpu
    if not gpus:
        return None
    if gpus < world_size:
        os.environ["NCCL_HOSTID"] = f"tplab-rank-{rank}"
    torch.cuda.set_device(rank % gpus)
    _has_gpu = True
    return torch.device("cuda", rank % gpus)


def finish_on_gpu() -> None:
    """Wait until this rank's GPU has finished all queued work. GPU errors are raised here at the latest.

    If a rank reported its return before that, it might still have an unfinished collective that others wait for.
    """
    if _has_gpu:
        torch.cuda.synchronize()


def device() -> torch.device:
    """Return the device that this rank computes on: its GPU if it has one, otherwise the CPU."""
    if _has_gpu or (dist.is_initialized() and dist.get_backend() == "nccl"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
