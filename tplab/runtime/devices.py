"""The device that each rank computes on, and the backend that carries its messages.

    NCCL, one GPU per rank      the default on a machine with enough GPUs
    gloo, on the CPU            the default on other machines
    gloo, sharing GPUs          messages pass through host memory; gloo can't send or receive GPU tensors
    NCCL, sharing GPUs          NCCL refuses two ranks of one host on the same GPU, so each rank claims to be a separate
                                host (NCCL_HOSTID); messages go over the loopback interface

The last two are for testing with fewer GPUs than ranks. Everything runs as it would on many GPUs, only more slowly.
"""

import os
import sys

import torch
import torch.distributed as dist

BACKENDS = ("auto", "gloo", "nccl")


# In the parent, before anything starts


def choose(backend: str, world_size: int, share_gpus: bool = False) -> tuple[str, int]:
    """Return the backend and the number of GPUs to use (0: CPU). Raises ValueError if the request can't be met."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    gpus = torch.cuda.device_count() if share_gpus or backend != "gloo" else 0
    if share_gpus and not gpus:
        raise ValueError("share_gpus=True needs a GPU, and this machine shows none: leave it out to run on the CPU")
    for_nccl = gpus if dist.is_nccl_available() else 0
    if backend == "nccl" and for_nccl < (1 if share_gpus else world_size):
        raise ValueError(
            f'backend="nccl" needs a GPU per rank: {world_size} ranks, but this machine shows {for_nccl} GPU(s). '
            'Use backend="gloo" to run on the CPU, or fewer ranks.'
        )
    if backend == "auto":
        backend = "nccl" if for_nccl >= world_size else "gloo"
        _say_once(backend, gpus, world_size, share_gpus)
    return backend, min(gpus, world_size) if backend == "nccl" or share_gpus else 0


_said: set[str] = set()


def _say_once(backend: str, gpus: int, world_size: int, share_gpus: bool) -> None:
    if backend in _said:
        return
    _said.add(backend)
    on = "NCCL, one GPU per rank" if backend == "nccl" else f"gloo, {'sharing GPUs' if share_gpus else 'on the CPU'}"
    why = f"{gpus} GPU{'' if gpus == 1 else 's'} for {world_size} rank{'' if world_size == 1 else 's'}"
    print(f"tplab: running on {on} ({why})", file=sys.stderr)


# In a rank


_has_gpu = False


def take_gpu(rank: int, world_size: int, gpus: int) -> torch.device | None:
    """Select and return this rank's GPU, or None on the CPU. Must be called before the process group is created."""
    global _has_gpu
    if not gpus:
        return None
    if gpus < world_size:
        os.environ["NCCL_HOSTID"] = f"tplab-rank-{rank}"
    torch.cuda.set_device(rank % gpus)
    _has_gpu = True
    return torch.device("cuda", rank % gpus)


def device() -> torch.device:
    """Return the device that this rank computes on: its GPU if it has one, otherwise the CPU."""
    if _has_gpu or (dist.is_initialized() and dist.get_backend() == "nccl"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
