"""Folders that are either complete or missing, even after a kill, because they are written under a temporary name.

A rename is atomic, so whatever a killed program leaves behind has a temporary name, and a later program removes it.

    step-000100.saving/          a checkpoint that is being written (`StepFolders`)
    step-000100/                 a complete one
    step-000050.deleting/        an older one, renamed before it is deleted
    .shared-3f0c...              an empty file that shows whether all machines share the root folder
    .making-name-4f1a09c2/       any other folder that is being made (`new_folder`)

A disk can lose the end of a file or change a byte without reporting an error, so each folder has a manifest.json, and
we verify all files before loading:

    {
     "step": 100,                (any other facts about the folder)
     "files": {
      ".metadata": {"bytes": 21034, "sha256": "91c0.."},
      "__0_0.distcp": {"bytes": 4811264, "sha256": "5b3e.."},        (as printed by `sha256sum __0_0.distcp`)
      ..
     },
     "sha256": "77ad.."          (checksum of this file without this line)
    }
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tplab.common.downloads import pointer

PROBE = ".shared-"
_COMPLETE = re.compile(r"step-(\d{6,})")
_LEFT_BEHIND = re.compile(r"step-\d{6,}\.(saving|deleting)")
_MAKING = ".making-"
_ABANDONED = 24 * 3600  # a folder that gets no new file for this many seconds isn't being made anymore
MANIFEST = "manifest.json"


class DamagedCheckpointError(ValueError):
    """Raised when a folder differs from what was written, because a file is missing, truncated or changed."""


def file_sum(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def write(path: Path, chunks: Iterable[bytes]) -> dict[str, Any]:
    """Write a new file, sync it to disk, and return its size in bytes and its SHA-256.

    Both describe the chunks and not what the disk has made of them, so `check_files` also notices a faulty write.
    """
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_manifest(folder: Path, about: Mapping[str, Any], files: Mapping[str, dict[str, Any]]) -> None:
    """Write the manifest, and sync both its contents and the folder's directory entries to disk."""
    write(folder / MANIFEST, [_text({**about, "files": dict(sorted(files.items()))}).encode()])
    sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest. Raises DamagedCheckpointError if it isn't valid, and FileNotFoundError if there's no folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there's no folder {folder}")
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
        intact = text == _text({name: value for name, value in manifest.items() if name != "sha256"})
    except (FileNotFoundError, ValueError, AttributeError):
        intact = False
    if not intact:
        found = pointer(path) if path.is_file() else None
        raise DamagedCheckpointError(found or f"{path} is missing, or it was changed or truncated after it was written")
    return manifest


def check_files(folder: Path, manifest: Mapping[str, Any], share: int = 0, shares: int = 1) -> None:
    """Verify every `shares`-th file of a manifest, starting at `share`. Raises DamagedCheckpointError on a mismatch."""
    for name, expected in list(manifest["files"].items())[share::shares]:
        path = folder / name
        check_size(path, expected)
        if (found := file_sum(path)) != expected:
            raise DamagedCheckpointError(
                f"{path} was changed or truncated. It had {expected['bytes']:,} bytes and the SHA-256 "
                f"{expected['sha256'][:12]}.., but now it has {found['bytes']:,} bytes and {found['sha256'][:12]}.."
            )


def check_size(path: Path, expected: Mapping[str, Any]) -> None:
    """Raise DamagedCheckpointError if the file is missing or doesn't have the expected size in bytes."""
    if not path.is_file():
        raise DamagedCheckpointError(f"{path} is missing. It had {expected['bytes']:,} bytes")
    if (size := path.stat().st_size) != expected["bytes"]:
        raise DamagedCheckpointError(
            pointer(path)
            or f"{path} was changed or truncated. It had {expected['bytes']:,} bytes, but now it has {size:,} bytes"
        )


def sync_folder(folder: Path) -> None:
    """Sync a folder's directory entries to disk. Without this, a power failure may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _text(manifest: Mapping[str, Any]) -> str:
    body = json.dumps(manifest, indent=1)
    return json.dumps({**manifest, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1) + "\n"


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
            elif path.name.startswith(PROBE):
                path.unlink(missing_ok=True)

    def publish(self, step: int) -> None:
        """Rename the step's `.saving` folder to make it a checkpoint. Raises FileExistsError if the name is taken."""
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

    def instead_of(self, path: Path) -> str:
        """Return advice about a damaged checkpoint: which other one is intact, and how to resume from that one."""
        away = f"move the damaged one out of the way (mv {path} {path}.damaged) and run the same command again"
        for step in reversed(self.steps()):
            if self.path(step) == path:
                continue
            with suppress(OSError, DamagedCheckpointError):
                check_files(self.path(step), read_manifest(self.path(step)))
                return f"{self.path(step)} is intact. To resume from step {step}, {away}"
        return f"There is no intact checkpoint in {self.root}. To start over, {away}"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `folder` when the block ends, or removed if there's an error.

    If another process has created `folder` in the meantime, that folder is kept. Temporary folders of killed processes
    are removed after a day, because until then, another machine may be filling them.
    """
    for left in folder.parent.glob(_MAKING + "*"):
        with suppress(FileNotFoundError):  # another process has just renamed or removed it
            if time.time() - left.stat().st_mtime > _ABANDONED:
                shutil.rmtree(left, ignore_errors=True)
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
        reason = error.strerror or error
        raise OSError(error.errno, f"couldn't write {folder} ({reason}). The unfinished folder was removed") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
