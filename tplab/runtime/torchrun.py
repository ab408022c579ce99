"""launch() in a program that torchrun has started, so that the ranks already exist.

torchrun --nproc-per-node 4 train.py       # train.py calls launch(train, 4), unchanged
"""

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tplab.runtime import hooks
from tplab.runtime.records import Record
from tplab.runtime.results import Results


def is_active() -> bool:
    """Return True if torchrun, or a launcher that sets the same variables, has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "TPLAB_RANK" not in os.environ


def run(fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Results:
    """Run `fn` on this rank and gather the results of all ranks, so that every rank returns the same results.

    Raises ValueError if torchrun didn't start exactly `world_size` ranks.
    """
    started = int(os.environ["WORLD_SIZE"])
    if started != world_size:
        raise ValueError(
            f"launch asks for {world_size} ranks, but torchrun started {started}. "
            f"Start torchrun with --nproc-per-node {world_size}, or call launch with world_size={started}."
        )
    if not dist.is_initialized():
        _init_process_group()
    with hooks.record() as section:
        recorder = hooks.active
        assert recorder is not None  # there is a process group, so there is a recorder
        began = recorder.now()
        result = fn(*args, **kwargs)
        span = began, recorder.now()
    everything: list[Any] = [None] * started
    dist.all_gather_object(everything, (_on_cpu(result), span, list(section)))
    returned, spans, sections = ([part[index] for part in everything] for index in range(3))
    record = Record([collective for collectives in sections for collective in collectives])
    return Results(returned, [""] * started, record, spans)


def _init_process_group() -> None:
    """Initialize NCCL if each rank on this machine can have its own GPU, otherwise gloo. All ranks choose the same."""
    atexit.register(_destroy_process_group)
    local_rank, on_machine = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if dist.is_nccl_available() and torch.cuda.device_count() >= on_machine:
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    else:
        dist.init_process_group("gloo")
        gpus = torch.cuda.device_count()
        if gpus and dist.get_rank() == 0:
            print(_why_no_gpu(gpus, on_machine), file=sys.stderr)


def _destroy_process_group() -> None:
    """End the threads of the process group before Python shuts down, unless the script has failed.

    Otherwise gloo's threads may release a tensor too late, which aborts the process (pytorch/pytorch#179291). After an
    error, other ranks may still be waiting in a collective, and then destroying could hang (pytorch/torchtitan#1342).
    """
    if dist.is_initialized() and not hasattr(sys, "last_type"):  # which Python sets for an error that nobody caught
        dist.destroy_process_group()


def _why_no_gpu(gpus: int, ranks: int) -> str:
    if gpus >= ranks:
        return "tplab: the ranks compute on the CPU, over gloo: this torch was built without NCCL"
    return (
        f"tplab: the ranks compute on the CPU, over gloo: {ranks} were started on this machine, and each sees "
        f"{gpus} of its GPUs. Start one for each GPU, and let every rank see them all: CUDA_VISIBLE_DEVICES should be "
        "the same for all (Slurm: --gpus-per-node, without --gpus-per-task and --gpu-bind)"
    )


def _on_cpu(result: Any) -> Any:
    """Return the result as it would arrive from a launched rank, with its tensors detached and on the CPU."""
    from tplab.runtime import transport

    return transport.loads(bytes(transport.dumps(result)))
