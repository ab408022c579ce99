"""This rank's position in the run, and its process groups: tp ranks share a model, and dp replicas share the batch.

    rank = dp · TP + tp         (as in `tplab.data.grid`, without pipeline stages)

The same program runs on ranks that `launch` or torchrun has started, and in a single process without a process group.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tplab.capstone.settings.settings import Settings
from tplab.data.grid import Grid, mesh
from tplab.runtime import device


@dataclass(frozen=True)
class Ranks:
    """A rank's position in the run. Without a process group, it is rank 0 of 1, and mesh, tp and dp are None.

    rank, size    the rank, and the number of ranks
    dp_rank       the index of its replica
    tp_rank       the index of its model shard
    mesh, tp, dp  the device mesh and the process groups
    device        the rank's GPU if it has one, otherwise the CPU
    """

    rank: int
    size: int
    dp_rank: int
    tp_rank: int
    mesh: DeviceMesh | None
    tp: ProcessGroup | None
    dp: ProcessGroup | None
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True on the rank that writes the log."""
        return self.rank == 0


def join(settings: Settings) -> Ranks:
    """Return this rank's position. All ranks call this. Raises ValueError if the settings need more or fewer ranks."""
    started = dist.get_world_size() if dist.is_initialized() else 1
    check_started(settings, started)
    if not dist.is_initialized():
        return Ranks(0, 1, 0, 0, None, None, None, device())
    rank = dist.get_rank()
    place = Grid(dp=settings.dp, tp=settings.tp).place(rank)
    grid = mesh(dp=settings.dp, tp=settings.tp)
    return Ranks(rank, started, place.dp, place.tp, grid, grid.get_group("tp"), grid.get_group("dp"), device())


def check_started(settings: Settings, started: int) -> None:
    """Raise ValueError, suggesting a command, if the number of started ranks differs from the settings."""
    wanted = settings.ranks
    if started == wanted:
        return
    needs = f"tp={settings.tp} · dp={settings.dp} = {wanted} ranks, and {_count(started)} started"
    if started % settings.tp == 0:
        advice = f"Add --dp {started // settings.tp}: replicas of the model for the other ranks. Or start {wanted}"
    else:
        advice = f"Start {wanted}"
    raise ValueError(
        f"these settings need {needs}. {advice}: torchrun --standalone --nproc-per-node {wanted} -m tplab.capstone .., "
        "or python -m tplab.capstone .. without torchrun, which starts them itself"
    )


def _count(ranks: int) -> str:
    return "1 was" if ranks == 1 else f"{ranks} were"
