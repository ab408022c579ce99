"""Folders that are either complete or missing, even after a kill, because they are written under a temporary name.

A rename is atomic, so whatever a killed program leaves behind has a temporary name, and a later program removes it.

    step-000100.saving/          a checkpoint that is being written (`StepFolders`)
    step-000100/                 a complete one
    step-000050.deleting/        an older one, renamed before it is deleted
    .shared-3f0c...              an empty file that shows whether all machines share the root folder
    .making-name-4f1a09c2/       any other folder that is being made (`new_folder`)
"""

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tplab.capstone.checkpoints.manifest import DamagedCheckpointError, check_files, read_manifest, sync_folder
from tplab.common import files, units

PROBE = ".shared-"
_COMPLETE = re.compile(r"step-(\d{6,})")
_LEFT_BEHIND = re.compile(r"step-\d{6,}\.(saving|deleting)")
_MAKING = ".making-"
_ABANDONED = 24 * 3600  # a folder that gets no new file for this many seconds isn't being made anymore


class StepFolders:
    """The checkpoint folders of a run. All ranks may read them, but only one rank may change them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def saving(self, step: int) -> Path:
        return self.root / f"step-{step:06d}.saving"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order."""
        if not self.root.is_dir():
            return []
        found = [match for path in self.root.iterdir() if (match := _COMPLETE.fullmatch(path.name)) and path.is_dir()]
        return sorted(int(match[1]) for match in found)

    def clear(self) -> None:
        """Create the root folder if necessary, and remove what killed programs have left behind in it."""
        if not self.root.is_dir():
            self.root.mkdir(parents=True)
            sync_folder(self.root.parent)
        for path in self.root.iterdir():
            if _LEFT_BEHIND.fullmatch(path.name):
                shutil.rmtree(path)
            elif path.name.startswith(PROBE):
                path.unlink(missing_ok=True)

    def check_is_free(self, step: int) -> None:
        """Raise FileExistsError if something other than an empty folder is at the step's path."""
        path = self.path(step)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):  # `publish` replaces an empty folder
            raise FileExistsError(
                f"{path} already exists, but this run has neither saved nor loaded it. Move it out of the way, or "
                "train in another folder"
            )

    def publish(self, step: int) -> None:
        """Turn the step's `.saving` folder into a checkpoint by renaming it."""
        self.saving(step).rename(self.path(step))
        sync_folder(self.root)

    def delete_old(self, step: int, keep: int) -> None:
        """Delete all but the newest `keep` of the checkpoints up to `step`."""
        for old in [other for other in self.steps() if other <= step][:-keep]:
            deleting = self.root / f"step-{old:06d}.deleting"
            self.path(old).rename(deleting)
            shutil.rmtree(deleting)

    def instead_of(self, path: Path) -> str:
        """Return advice about a damaged checkpoint: which older one is intact, and how to resume from that one."""
        match = _COMPLETE.fullmatch(path.name)
        away = f"move the damaged one out of the way (mv {path} {path}.damaged) and run the same command again"
        for older in reversed(self.steps()):
            with suppress(OSError, DamagedCheckpointError):
                if match and older < int(match[1]):
                    check_files(self.path(older), read_manifest(self.path(older)))
                    return f"{self.path(older)} is intact. To resume from step {older}, {away}"
        return f"There is no older intact checkpoint in {self.root}. To start over, {away}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager that locks the folder for new folders, creating it if necessary. It waits until it has the lock.

    It also removes the leftovers of killed processes, but only after a day. On some file systems, a lock is visible on
    only one machine, so several machines may make the same folder under temporary names. The first one to finish wins.
    """
    with files.locked(folder / ".lock") as alone:
        for place in folder.glob(_MAKING + "*") if alone else ():
            with suppress(FileNotFoundError):  # another process has just renamed or removed it
                if time.time() - place.stat().st_mtime > _ABANDONED:
                    shutil.rmtree(place, ignore_errors=True)
        yield


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `folder` when the block ends, or removed if there's an error.

    If another process has created `folder` in the meantime, that folder is kept.
    """
    place = folder.parent / f"{_MAKING}{folder.name}-{os.urandom(4).hex()}"
    place.mkdir(parents=True)
    try:
        yield place
        sync_folder(place)
        try:
            place.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync_folder(folder.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = units.size(shutil.disk_usage(folder.parent).free)
            error.add_note(
                f"The disk is too full for {folder}, with only {free} free. The unfinished folder was removed."
            )
        raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def link(path: Path, folder: Path) -> None:
    """Atomically make `path` a relative link to `folder`. Raises FileExistsError if `path` exists and isn't a link."""
    if path.is_dir() and path.resolve() == folder.resolve():
        return
    if path.exists() and not path.is_symlink():
        raise FileExistsError(
            f"{path} should become a link to {folder}, but there's something else. Move it out of the way"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    new.symlink_to(os.path.relpath(folder.resolve(), path.parent.resolve()), target_is_directory=True)
    os.replace(new, path)
