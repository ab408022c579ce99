"""Write and load a run's checkpoints. A kill at any moment leaves the last complete checkpoint intact.

    write       step-000100.saving: one file per rank, then .metadata       all ranks of a model, in `save_sharded`
    publish     rename to step-000100 once all ranks have succeeded         the first rank
    delete      the oldest, if there are more than `keep`                   the first rank

Every file is synced to disk before the next stage begins, so a folder named exactly step-000100 is always complete.

Only the first data-parallel replica saves a checkpoint, but all replicas load it. With ZeRO, the replicas first gather
the optimizer's state (`FullOptimizer`), so a checkpoint depends neither on the number of ranks in any dimension nor on
the ZeRO stage.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from os import PathLike
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tplab.capstone.checkpoints.folders import StepFolders
from tplab.checkpoint.files import gathered, together
from tplab.checkpoint.optimizer import OptimizerState
from tplab.checkpoint.sharded import load_sharded, save_sharded
from tplab.collectives.by_hand import rank_and_size
from tplab.data.zero import ZeRO1
from tplab.data.zero_state import FullOptimizer, unsharded

PATIENCE = timedelta(days=1)  # how long to wait for a rank whose disk is slow


class Checkpoints:
    """The checkpoints in a folder on a disk that all ranks share. Every rank creates one and calls the same methods.

    keep    number of newest checkpoints to keep, 1 or more
    mesh    from `tplab.data.grid.mesh`. If None, all ranks share the layers of a single model
    """

    def __init__(self, folder: str | PathLike, keep: int = 2, mesh: DeviceMesh | None = None) -> None:
        self.folders, self.keep = StepFolders(Path(folder)), keep
        self.group = None if mesh is None else mesh.get_group("tp")
        self.saves = mesh is None or mesh.get_local_rank("dp") == 0
        self._everyone, self._savers = _own_groups(self.saves)
        self.rank = rank_and_size(self._savers)[0]

    def save(self, step: int, model: nn.Module, optimizer: Optimizer | ZeRO1 | None = None) -> None:
        """Save step-<step>, then delete all checkpoints except the newest `keep`.

        Raises ValueError if replicated tensors differ between ranks, and RuntimeError if writing fails or something
        else exists at the step's path; all checkpoints stay unchanged.
        """
        with unsharded(optimizer) as full:
            if isinstance(full, FullOptimizer):
                full.gather()
            together(lambda: self._save(step, model, full) if self.saves else None, self._everyone)

    def _save(self, step: int, model: nn.Module, optimizer: OptimizerState | None) -> None:
        self._first(self.folders.clear)
        saving = self.folders.path(step, ".saving")
        try:
            save_sharded(
                saving, model, optimizer=optimizer, extra={"step": step}, group=self.group, replica=self._savers
            )
            self._first(lambda: self.folders.publish(step))
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                self._first(self.folders.clear)
            older = [self.folders.path(other) for other in self.folders.steps() if other < step]
            kept = f"The checkpoint before it, {older[-1]}, is intact" if older else "There is no older checkpoint"
            raise RuntimeError(f"step {step} wasn't saved: {error}. {kept}") from error
        self._first(lambda: self.folders.delete_old(step, self.keep))

    def _first(self, work: Callable[[], None]) -> None:
        """Do `work` on the first rank while the others wait. If it fails, raise its error on all ranks."""
        together(lambda: work() if self.rank == 0 else None, self._savers)

    def latest(self) -> Path | None:
        """Return the path of the newest checkpoint, or None if there is none."""
        newest = max(self.folders.steps(), default=None)
        if len(set(seen := gathered(newest, self._everyone))) > 1:
            raise ValueError(
                f"the ranks see different newest checkpoints in {self.folders.root}, of steps {seen}. This folder has "
                "to be on a disk that all of them share"
            )
        return None if newest is None else self.folders.path(newest)

    def load(self, path: str | PathLike, model: nn.Module, optimizer: Optimizer | ZeRO1 | None = None) -> int:
        """Load a checkpoint in place and return its step. Any number of ranks may have saved it.

        Raises FileNotFoundError if a file is missing or truncated, and ValueError if the checkpoint belongs to a
        different model. In these cases, nothing is modified.
        """
        with unsharded(optimizer) as full:
            return together(lambda: self._load(Path(path), model, full), self._everyone)

    def _load(self, path: Path, model: nn.Module, optimizer: OptimizerState | None) -> int:
        try:
            extra = load_sharded(path, model, optimizer=optimizer, group=self.group, replica=self._everyone)
        except ValueError as error:
            raise ValueError(
                f"{path} can't be loaded into this model: {error}. Nothing has been changed. Use the settings with "
                "which it was saved, or train in another folder"
            ) from error
        except FileNotFoundError as error:
            away = f"mv {path} {path}.damaged"
            raise FileNotFoundError(
                f"{error}. To resume from the checkpoint before it, move this one out of the way ({away})"
            ) from error
        return int(extra["step"])


def _own_groups(saves: bool) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Create two gloo groups, one with all ranks and one with those that save. Both are None without torch.distributed.

    The ranks that don't save also create a second group, which they don't use. If each rank has a GPU, torch makes only
    the ranks outside a new group take part in a split of NCCL's communicator, where they'd wait forever. So each rank
    only creates groups that it's in. All ranks create the same number of groups, because torch names them by counting.
    """
    if not dist.is_initialized():
        return None, None
    everyone = dist.new_group(backend="gloo", timeout=PATIENCE)
    own = [rank for rank, is_saver in enumerate(gathered(saves, everyone)) if is_saver == saves]
    return everyone, dist.new_group(own, backend="gloo", timeout=PATIENCE, use_local_synchronization=True)
