"""The folders of a run's checkpoints: each is made under another name, and gets its own when it is complete.

    step-000100.saving/          written to
    step-000100/                 complete
    step-000050.deleting/        an older one, renamed before it is deleted

A rename either has happened or hasn't, also after a kill. What a kill leaves behind has one of the other two names: it
is never mistaken for a checkpoint, and `clear` removes it.
"""

import re
import shutil
from pathlib import Path

from tplab.capstone.checkpoints.manifest import DamagedCheckpointError, check_files, read_manifest, sync_folder

_COMPLETE = re.compile(r"step-(\d{6,})")
_LEFT_BEHIND = re.compile(r"step-\d{6,}\.(saving|deleting)")


class StepFolders:
    """What one process does in the folder. Of several ranks one changes it, and all may look."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def saving(self, step: int) -> Path:
        return self.root / f"step-{step:06d}.saving"

    def steps(self) -> list[int]:
        """Of the checkpoints that there are, in order."""
        if not self.root.is_dir():
            return []
        found = [match for path in self.root.iterdir() if (match := _COMPLETE.fullmatch(path.name)) and path.is_dir()]
        return sorted(int(match[1]) for match in found)

    def clear(self) -> None:
        """Remove what an earlier program left behind when it was killed."""
        if not self.root.is_dir():
            self.root.mkdir(parents=True)
            sync_folder(self.root.parent)
        for path in self.root.iterdir():
            if _LEFT_BEHIND.fullmatch(path.name):
                shutil.rmtree(path)

    def check_is_free(self, step: int) -> None:
        """Raises FileExistsError if there is something at the step's place."""
        path = self.path(step)
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):  # an empty one is replaced
            raise FileExistsError(
                f"{path} is there already, and this run has neither saved nor loaded it. Move it away, or train in "
                "another folder"
            )

    def publish(self, step: int) -> None:
        """From here on it is a checkpoint."""
        self.saving(step).rename(self.path(step))
        sync_folder(self.root)

    def delete_old(self, step: int, keep: int) -> None:
        """Of the checkpoints up to `step` leave the newest `keep`."""
        for old in [other for other in self.steps() if other <= step][:-keep]:
            deleting = self.root / f"step-{old:06d}.deleting"
            self.path(old).rename(deleting)
            shutil.rmtree(deleting)

    def instead_of(self, path: Path) -> str:
        """What to do about a damaged checkpoint: the newest older one that is whole, and how to go on from it."""
        match = _COMPLETE.fullmatch(path.name)
        away = f"move the damaged one away (mv {path} {path}.damaged)"
        for older in reversed(self.steps()):
            if match and older < int(match[1]) and _is_whole(self.path(older)):
                return f"{self.path(older)} is whole: to go on from step {older}, {away} and start again"
        return f"No older checkpoint in {self.root} is whole: to begin anew, {away} and start again"


def _is_whole(path: Path) -> bool:
    try:
        check_files(path, read_manifest(path))
    except (OSError, DamagedCheckpointError):
        return False
    return True
