"""This rank's position in the run, and its process groups.

    rank = (dp · PP + pp) · TP + tp         (as in `tplab.data.grid`)

tp ranks share each layer, pp stages share the layers, and dp replicas share the batch. A single process needs no
process group.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tplab.capstone.settings.settings import Settings
from tplab.collectives.by_hand import rank_and_size
from tplab.data.grid import Dimension, Grid, Place, mesh
from tplab.runtime import device
from tplab.runtime.shared_memory import share_memory


@dataclass(frozen=True)
class Ranks:
    """A rank's position in the run. Without a process group, it is rank 0 of 1, and the mesh and groups are None.

    place     the indices of its replica, its pipeline stage and its model shard
    device    the rank's GPU if it has one, otherwise the CPU
    shares    True if tensor-parallel all-reduces go through shared memory
    """

    rank: int
    size: int
    place: Place
    mesh: DeviceMesh | None
    device: torch.device
    shares: bool = False

    def group(self, dimension: Dimension) -> ProcessGroup | None:
        return None if self.mesh is None else self.mesh.get_group(dimension)

    def mean(self, loss: Tensor) -> float:
        """Return the loss averaged over the replicas. Only the last stage has a loss; the other stages pass 0."""
        loss = loss.clone()
        for group in (self.group("pp"), self.group("dp")):
            if rank_and_size(group)[1] > 1:
                dist.all_reduce(loss, group=group)
        return float(loss) / rank_and_size(self.group("dp"))[1]


def join(settings: Settings) -> Ranks:
    """Return this rank's position. All ranks call this. Raises ValueError if too many or too few ranks were started."""
    rank, started = rank_and_size()
    check_started(settings, started)
    if not dist.is_initialized():
        return Ranks(0, 1, Place(0, 0, 0), None, device())
    place, groups = Grid(settings.dp, settings.pp, settings.tp).place(rank), mesh(settings.dp, settings.pp, settings.tp)
    return Ranks(rank, started, place, groups, device(), share_memory_of(groups, settings))


def share_memory_of(mesh: DeviceMesh, settings: Settings) -> bool:
    """Make tensor-parallel all-reduces use shared memory if the settings ask for it. Returns True if they use it now.

    Shared memory isn't used on GPUs. It isn't used with sequence parallelism either, because large messages then use
    other collectives, so there would be little to gain.
    """
    wanted = settings.shared_memory and not settings.sequence_parallel and device().type == "cpu"
    elements = settings.micro_batch_size * settings.seq_length * settings.hidden_size
    largest = elements * max(4, getattr(torch, settings.precision).itemsize) if wanted else 0
    return share_memory(mesh.get_group("tp"), largest)


def check_started(settings: Settings, started: int) -> None:
    """If the number of ranks started doesn't match the settings, raise a ValueError that says what to do."""
    wanted = settings.ranks
    if started == wanted:
        return
    needs = f"tp={settings.tp} · pp={settings.pp} · dp={settings.dp} = {wanted} ranks"
    were = "1 was" if started == 1 else f"{started} were"
    raise ValueError(
        f"these settings need {needs}, but {were} started. To fix that, change --tp, --pp or --dp, "
        f"start {wanted} ranks with `torchrun --standalone --nproc-per-node {wanted} -m tplab.capstone ..`, or let "
        "`python -m tplab.capstone ..` start them"
    )
