"""The folders of a run's checkpoints. Each is written under a temporary name and renamed once it is complete.

    step-000100.saving/          being written
    step-000100/                 complete
    step-000050.deleting/        an older checkpoint, renamed before it is deleted
    .shared-3f0c...              an empty file that shows whether all machines share the root folder

A rename is atomic, so anything that a kill leaves behind has one of the temporary names, and `clear` removes it.
"""

import re
import shutil
from contextlib import suppress
from pathlib import Path

from tplab.capstone.checkpoints.manifest import DamagedCheckpointError, check_files, read_manifest, sync_folder

_COMPLETE = re.compile(r"step-(\d{6,})")
_LEFT_BEHIND = re.compile(r"step-\d{6,}\.(saving|deleting)")
PROBE = ".shared-"


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
        """Create the root folder if necessary, and remove everything that killed programs have left in it."""
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
        """Return advice about a damaged checkpoint: the newest intact one before it, and how to resume from there."""
        match = _COMPLETE.fullmatch(path.name)
        away = f"move the damaged one out of the way (mv {path} {path}.damaged) and run the same command again"
        for older in reversed(self.steps()):
            with suppress(OSError, DamagedCheckpointError):
                if match and older < int(match[1]):
                    check_files(self.path(older), read_manifest(self.path(older)))
                    return f"{self.path(older)} is intact. To resume from step {older}, {away}"
        return f"There is no older intact checkpoint in {self.root}. To start over, {away}"
