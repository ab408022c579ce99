"""A folder's manifest lists its files with sizes and SHA-256, so that missing, truncated or changed files are noticed.

    {
     "step": 100,                (any other facts about the folder)
     "files": {
      ".metadata": {"bytes": 21034, "sha256": "91c0.."},
      "__0_0.distcp": {"bytes": 4811264, "sha256": "5b3e.."},        (as printed by `sha256sum __0_0.distcp`)
      ..
     },
     "sha256": "77ad.."          (checksum of this file without this line)
    }

A disk can lose the end of a file or change a byte without reporting an error, so we verify all files before loading.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

NAME = "manifest.json"


class DamagedCheckpointError(ValueError):
    """Raised when a folder differs from what was written, because a file is missing, truncated or changed."""


class FileSum(TypedDict):
    bytes: int
    sha256: str


def file_sum(path: Path) -> FileSum:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def write(path: Path, chunks: Iterable[bytes]) -> FileSum:
    """Write a new file, sync it to disk, and return its size in bytes and its SHA-256."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_manifest(folder: Path, about: Mapping[str, Any], files: Mapping[str, FileSum]) -> None:
    """Write the manifest, and sync both its contents and the folder's directory entries to disk."""
    write(folder / NAME, [_text({**about, "files": dict(sorted(files.items()))}).encode()])
    sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest. Raises DamagedCheckpointError if it isn't valid, and FileNotFoundError if there's no folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there's no folder {folder}")
    path = folder / NAME
    try:
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
        intact = text == _text({name: value for name, value in manifest.items() if name != "sha256"})
    except FileNotFoundError:
        there = sorted(file.name for file in folder.iterdir())[:8]
        raise DamagedCheckpointError(
            f"{folder} has no {NAME}, so it's impossible to tell whether its files are complete. It has {there}"
        ) from None
    except (ValueError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} was changed or truncated after it was written: {error!r}") from None
    if not intact:
        raise DamagedCheckpointError(f"{path} was changed after it was written, because it doesn't match its checksum")
    return manifest


def check_files(
    folder: Path, manifest: Mapping[str, Any], share: int = 0, shares: int = 1, *, sums: bool = True
) -> None:
    """Verify every `shares`-th file of a manifest, starting at `share`. Raises DamagedCheckpointError on a mismatch.

    sums    if False, only the sizes are verified, which is fast
    """
    for name, expected in list(manifest["files"].items())[share::shares]:
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpointError(f"{path} is missing. It had {expected['bytes']:,} bytes")
        if (size := path.stat().st_size) != expected["bytes"]:
            raise DamagedCheckpointError(f"{path} has {size:,} bytes instead of {expected['bytes']:,}")
        if sums and (found := file_sum(path)["sha256"]) != expected["sha256"]:
            raise DamagedCheckpointError(
                f"{path} has the right size, {size:,} bytes, but its contents have changed: its SHA-256 starts with "
                f"{found[:12]} instead of {expected['sha256'][:12]}"
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
