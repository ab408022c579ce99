"""The folder of a run: its contents, and whether the run may continue with the current settings.

settings.yaml            the settings that the run was started with
log.jsonl                the log
checkpoints/             the steps from which the run can resume
tokens/                  the tokenized text
"""

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tplab.capstone.checkpoints.folders import StepFolders
from tplab.capstone.settings.io import read_settings
from tplab.capstone.settings.settings import Settings, changed

SETTINGS, LOG, LOCK = "settings.yaml", "log.jsonl", ".lock"


def checkpoints_in(folder: Path) -> bool:
    """Return True if the run in this folder has a checkpoint to resume from."""
    return bool(StepFolders(folder / "checkpoints").steps())


def is_run(folder: Path) -> bool:
    """Return True if a run has been started in this folder."""
    return (folder / SETTINGS).exists() and (folder / LOG).exists()


def check_unchanged(settings: Settings) -> None:
    """Raise ValueError if the folder has checkpoints of a run with different FIXED settings. The message lists them."""
    folder = Path(settings.folder)
    if not checkpoints_in(folder):
        return
    if not (folder / SETTINGS).exists():
        raise ValueError(
            f"{folder} has checkpoints, but not the {SETTINGS} of their run. Put that file back, or move the "
            "checkpoints away"
        )
    if differ := changed(settings, read_settings(folder / SETTINGS)):
        lines = [f"  {name} was {before!r} and is now {now!r}\n" for name, (before, now) in differ.items()]
        raise ValueError(
            f"the run in {folder} was started with different settings:\n{''.join(lines)}Leave these settings as they "
            "were to resume it. For a new run, use another --folder"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager that keeps other processes from training in this folder. Raises ValueError if one already does.

    The operating system releases the lock when its process ends. Raises OSError if the folder can't be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / LOCK).open("a+")
    except OSError as error:
        raise OSError(
            f"the run can't write to {folder} ({error.strerror}). Use a --folder in a place that you may write to"
        ) from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"another run is already training in {folder} ({file.read().strip() or 'an unknown process'}). Wait "
                f"until it's done, stop it with `touch {folder}/stop`, or use another --folder"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield


def write_settings(settings: Settings) -> None:
    """Write the settings to the run's folder, unless the same settings are already there."""
    path = Path(settings.folder, SETTINGS)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or read_settings(path) != settings:
        settings.save(path)
