"""Folders that are either complete or missing, even after a kill, because they are written under a temporary name.

A rename is atomic, so whatever a killed program leaves behind has a temporary name. A later save removes unfinished
checkpoints.

    step-000100.saving/          a checkpoint that is being written (`StepFolders`)
    step-000100/                 a complete one
    step-000050.deleting/        an older one, renamed before it is deleted
    .making-name-4f1a09c2/       any other folder that is being made (`new_folder`)
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_COMPLETE = re.compile(r"step-(\d{6,})")
_LEFT_BEHIND = re.compile(r"step-\d{6,}\.(saving|deleting)")


def sync_folder(folder: Path) -> None:
    """Sync a folder's directory entries to disk. Without this, a power failure may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StepFolders:
    """The checkpoint folders of a run. All ranks may read them, but only one rank may change them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int, suffix: str = "") -> Path:
        return self.root / f"step-{step:06d}{suffix}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order."""
        folders = [path for path in self.root.glob("step-*") if path.is_dir()]
        return sorted(int(match[1]) for path in folders if (match := _COMPLETE.fullmatch(path.name)))

    def clear(self) -> None:
        """Create the root folder if necessary, and remove what killed programs have left behind in it."""
        if not self.root.is_dir():
            self.root.mkdir(parents=True)
            sync_folder(self.root.parent)
        for path in self.root.iterdir():
            if _LEFT_BEHIND.fullmatch(path.name):
                shutil.rmtree(path)

    def publish(self, step: int) -> None:
        """Rename the step's `.saving` folder to make it a checkpoint. Raises FileExistsError if the name is taken."""
        sync_folder(self.path(step, ".saving"))
        try:
            self.path(step, ".saving").rename(self.path(step))
        except OSError as error:
            if not self.path(step).exists():
                raise
            raise FileExistsError(f"something else is at {self.path(step)}. Move it out of the way") from error
        sync_folder(self.root)

    def delete_old(self, step: int, keep: int) -> None:
        """Delete all but the newest `keep` of the checkpoints up to `step`."""
        for old in [other for other in self.steps() if other <= step][:-keep]:
            self.path(old).rename(self.path(old, ".deleting"))
            shutil.rmtree(self.path(old, ".deleting"))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `folder` when the block ends, or removed if there's an error.

    If another process has created `folder` in the meantime, that folder is kept.
    """
    place = folder.parent / f".making-{folder.name}-{os.urandom(4).hex()}"
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
        reason = error.strerror or error
        raise OSError(error.errno, f"couldn't write {folder} ({reason}). The unfinished folder was removed") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
