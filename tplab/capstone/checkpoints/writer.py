"""Write and load a run's checkpoints. A kill at any moment leaves the last complete checkpoint intact.

    copy        to CPU memory, if training continues during the save        all ranks of a model
    write       step-000100.saving: one file per rank, then .metadata       all ranks of a model, in `write_sharded`
    manifest    sizes and checksums, computed by each rank for its file     gathered and written by the first rank
    publish     rename to step-000100 once all ranks have succeeded         the first rank
    delete      the oldest, if there are more than `keep`                   the first rank

Every file is synced to disk before the next stage begins, so a folder named exactly step-000100 is always complete.

In an asynchronous save, training waits only for the copy, and a thread does the rest. The threads of all ranks
communicate in a separate gloo group, so they can't block the training's collectives. (`dcp.async_save` is similar, but
our checksums and the rename have to run in the thread, too.)

Only the first data-parallel replica saves a checkpoint, but all replicas load it. With ZeRO, the replicas first gather
the optimizer's state (`FullOptimizer`), so a checkpoint depends neither on the number of ranks in any dimension nor on
the ZeRO stage.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tplab.capstone.checkpoints.folders import (
    PROBE,
    DamagedCheckpointError,
    StepFolders,
    check_files,
    file_sum,
    read_manifest,
    write_manifest,
)  # fmt: skip
from tplab.checkpoint.files import gathered, together
from tplab.checkpoint.optimizer import OptimizerState
from tplab.checkpoint.sharded import Staged, load_sharded, stage_sharded, write_sharded
from tplab.collectives.by_hand import rank_and_size
from tplab.data.zero import ZeRO1
from tplab.data.zero_state import FullOptimizer, unsharded
from tplab.runtime.hooks import unrecorded

PATIENCE = timedelta(days=1)  # how long to wait for a rank whose disk is slow
UNTIL_SEEN = 60.0  # seconds after which a new file must be visible on all machines; NFS caches for up to a minute


class Checkpoints:
    """The checkpoints in a folder on a disk that all ranks share. Every rank creates one and calls the same methods.

    keep            number of newest checkpoints to keep, 1 or more
    asynchronous    if True, training continues while a checkpoint is written
    mesh            from `tplab.data.grid.mesh`. If None, all ranks share the layers of a single model

    Raises RuntimeError if a rank can't see a file that the first rank writes to the folder.
    """

    def __init__(
        self, folder: str | PathLike, keep: int = 2, asynchronous: bool = False, mesh: DeviceMesh | None = None
    ) -> None:
        self.folders, self.keep, self.asynchronous = StepFolders(Path(folder)), keep, asynchronous
        self.group = None if mesh is None else mesh.get_group("tp")
        self.saves = mesh is None or mesh.get_local_rank("dp") == 0
        self._everyone, self._savers = _own_groups(self.saves)
        self.rank = rank_and_size(self._savers)[0]
        if self._everyone is not None:
            _check_shared(self.folders, self._everyone)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None
        self._is_there: int | None = None  # the step that was loaded or last saved

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizer | ZeRO1 | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Save step-<step> with {"step": step, **extra}, then delete all checkpoints except the newest `keep`.

        Skips the step that was loaded or last saved, because it already has a checkpoint. Raises ValueError if
        replicated tensors differ between ranks, and RuntimeError if writing fails or something else exists at the
        step's path; all checkpoints stay unchanged. Also raises the error of an earlier background save.
        """
        self.wait()
        if step == self._is_there:
            return
        extra = {"step": step, **(extra or {})}
        with unsharded(optimizer) as full:
            if isinstance(full, FullOptimizer):
                full.gather()
            staged = together(lambda: self._stage(model, full, extra), self._everyone)
            if not self.asynchronous:
                together(lambda: self._write(step, staged), self._everyone)
        if self.asynchronous:
            self._under_way = self._thread.submit(unrecorded()(self._write), step, staged)
        self._is_there = step

    def wait(self) -> None:
        """Wait until the save in progress is complete. If it has failed, raise its error on all ranks."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        try:
            together(under_way.result, self._everyone)
        except Exception:
            self._is_there = None  # so that the step can be saved again
            raise

    def linger(self, seconds: float) -> None:
        """Wait at most `seconds` for the save in progress. A rank that fails alone uses it instead of `wait`."""
        if self._under_way is not None:
            with suppress(Exception):
                self._under_way.result(seconds)

    def _stage(self, model: nn.Module, optimizer: OptimizerState | None, extra: Mapping[str, Any]) -> Staged | None:
        if not self.saves:
            return None
        staged = stage_sharded(model, optimizer=optimizer, extra=extra, group=self.group, replica=self._savers)
        return staged.copied() if self.asynchronous else staged

    def _write(self, step: int, staged: Staged | None) -> None:
        if staged is None:
            return
        self._first(self.folders.clear)
        saving = self.folders.path(step, ".saving")
        try:
            write_sharded(saving, staged, group=self._savers)
            self._write_manifest(saving, step)
            self._first(lambda: self.folders.publish(step))
        except Exception as error:
            with suppress(OSError):
                self._first(self.folders.clear)
            older = [self.folders.path(other) for other in self.folders.steps() if other < step]
            kept = f"The checkpoint before it, {older[-1]}, is intact" if older else "There is no older checkpoint"
            raise RuntimeError(f"step {step} wasn't saved: {error}. {kept}") from error
        self._first(lambda: self.folders.delete_old(step, self.keep))

    def _write_manifest(self, saving: Path, step: int) -> None:
        mine = saving.glob(f"__{self.rank}_*.distcp")
        sums = together(lambda: {path.name: file_sum(path) for path in mine}, self._savers)
        files = {name: found for part in gathered(sums, self._savers) for name, found in part.items()}
        self._first(
            lambda: write_manifest(saving, {"step": step}, {**files, ".metadata": file_sum(saving / ".metadata")})
        )

    def _first(self, work: Callable[[], None]) -> None:
        """Do `work` on the first rank while the others wait. If it fails, raise its error on all ranks."""
        together(lambda: work() if self.rank == 0 else None, self._savers)

    def latest(self) -> Path | None:
        """Return the path of the newest checkpoint, or None if there is none. Only `load` checks if it's damaged."""
        self.wait()
        newest = max(self.folders.steps(), default=None)
        if len(set(seen := gathered(newest, self._everyone))) > 1:
            raise ValueError(
                f"the ranks see different newest checkpoints in {self.folders.root}, of steps {seen}. This folder has "
                "to be on a disk that all of them share"
            )
        return None if newest is None else self.folders.path(newest)

    def load(
        self, path: str | PathLike, model: nn.Module, optimizer: Optimizer | ZeRO1 | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint in place and return the `extra` saved with it. Any number of ranks may have saved it.

        Raises DamagedCheckpointError or FileNotFoundError if a file is missing or changed, naming the newest intact
        checkpoint, and ValueError if it belongs to a different model. In these cases, nothing is modified.
        """
        self.wait()
        path = Path(path)
        share, shares = rank_and_size(self._everyone)
        try:
            manifest = together(lambda: read_manifest(path), self._everyone)
            together(lambda: check_files(path, manifest, share, shares), self._everyone)
        except (DamagedCheckpointError, FileNotFoundError) as error:
            advice = gathered(self.folders.instead_of(path) if self.rank == 0 else "", self._everyone)[0]
            raise type(error)(f"{error}. {advice}") from None
        with unsharded(optimizer) as full:
            extra = together(lambda: self._load(path, model, full), self._everyone)
        self._is_there = manifest["step"]
        return extra

    def _load(self, path: Path, model: nn.Module, optimizer: OptimizerState | None) -> dict[str, Any]:
        try:
            return load_sharded(path, model, optimizer=optimizer, group=self.group, replica=self._everyone)
        except ValueError as error:
            raise ValueError(
                f"{path} can't be loaded into this model: {error}. Nothing has been changed. Use the settings with "
                "which it was saved, or train in another folder"
            ) from error


def _check_shared(folders: StepFolders, everyone: ProcessGroup) -> None:
    """Have the first rank write a file. Raises RuntimeError on all ranks if any of them can't see it.

    Without this check, we'd notice only when the run is resumed that the machines don't share the folder.
    """
    here = f"{folders.root.absolute()} on {socket.gethostname()}"
    name, written = gathered((f"{PROBE}{os.urandom(8).hex()}", here), everyone)[0]
    path, is_first = folders.root / name, dist.get_rank() == 0

    def write() -> None:
        folders.clear()
        path.touch()

    def wait() -> None:
        end = time.monotonic() + UNTIL_SEEN
        while not path.exists():
            if time.monotonic() > end:
                raise RuntimeError(
                    f"the checkpoint folder isn't shared: rank 0 writes to {written}, but {here} is a different "
                    "folder. Use a --folder that all machines share"
                )
            time.sleep(0.05)

    together(lambda: write() if is_first else None, everyone)
    try:
        together(wait, everyone)
    finally:
        if is_first:
            with suppress(OSError):  # it would hide the error above, and `clear` will remove the file later
                path.unlink(missing_ok=True)


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
