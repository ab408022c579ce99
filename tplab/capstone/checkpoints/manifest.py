"""The manifest of a checkpoint: its files with their sizes and SHA-256, to detect missing, truncated or changed ones.

    {
     "step": 100,
     "files": {
      ".metadata": {"bytes": 21034, "sha256": "91c0.."},
      "__0_0.distcp": {"bytes": 4811264, "sha256": "5b3e.."},        (as printed by `sha256sum __0_0.distcp`)
      ..
     },
     "sha256": "77ad.."          (checksum of this text without this line)
    }

A disk can lose the end of a file or change a byte without reporting an error, and training would then continue from
wrong weights. So each rank computes checksums of the files that it writes, and loading verifies all files first.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

NAME = "manifest.json"


class DamagedCheckpointError(ValueError):
    """Raised when a checkpoint differs from what was written, because a file is missing, truncated or changed."""


class FileSum(TypedDict):
    """The size and checksum of a file."""

    bytes: int
    sha256: str


class Manifest(TypedDict):
    """The step of a checkpoint, and its files by name."""

    step: int
    files: dict[str, FileSum]


def file_sum(path: Path) -> FileSum:
    """Read a file and return its size and checksum."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def write_manifest(folder: Path, step: int, files: Mapping[str, FileSum]) -> None:
    """Write the manifest, and sync both its contents and the folder's directory entries to disk."""
    with open(folder / NAME, "w", encoding="utf-8") as file:
        file.write(_text({"step": step, "files": dict(sorted(files.items()))}))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest. Raises FileNotFoundError without the folder, DamagedCheckpointError without a valid manifest."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {folder}: no such directory")
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{folder} has no {NAME}, without which nobody knows whether the rest is complete. There are "
            f"{sorted(path.name for path in folder.iterdir())[:8]}"
        ) from None
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{folder / NAME} was changed or cut off after it was written: {error}") from None
    try:
        found = json.loads(text)
        manifest: Manifest = {"step": found["step"], "files": found["files"]}
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpointError(
            f"{folder / NAME} was changed or cut off after it was written: {error!r}"
        ) from None
    if text != _text(manifest):
        raise DamagedCheckpointError(f"{folder / NAME} was changed after it was written: its own checksum doesn't fit")
    return manifest


def check_files(folder: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> None:
    """Verify every `shares`-th file of a manifest, starting at `share`. Raises DamagedCheckpointError on a mismatch."""
    for name, expected in list(manifest["files"].items())[share::shares]:
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpointError(f"{path} is missing; it had {expected['bytes']:,} bytes")
        if (size := path.stat().st_size) != expected["bytes"]:
            raise DamagedCheckpointError(f"{path} has {size:,} bytes instead of {expected['bytes']:,}")
        if (found := file_sum(path)["sha256"]) != expected["sha256"]:
            raise DamagedCheckpointError(
                f"{path} has its {size:,} bytes, but they are not those that were written: the SHA-256 begins with "
                f"{found[:12]}, not with {expected['sha256'][:12]}"
            )


def sync_folder(folder: Path) -> None:
    """Sync a folder's directory entries to disk. Without this, a power failure may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _text(manifest: Manifest) -> str:
    body = json.dumps(manifest, indent=1)
    return json.dumps({**manifest, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1) + "\n"
