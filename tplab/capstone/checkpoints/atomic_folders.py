"""Folders created atomically by one process on behalf of all. Even after a kill, a folder is complete or missing.

with locked(shared):                      # other processes wait; the lock is released when its owner dies
    with new_folder(shared / "name") as place:
        write(place / "a.bin", [b"..."])  # written to shared/.making-name-4f1a09c2 and synced to disk
                                          # at the end of the block, renamed to shared/name
"""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tplab.capstone.checkpoints.manifest import FileSum, sync_folder
from tplab.common import files, units

_MAKING = ".making-"
_LEFT_BEHIND = 24 * 3600  # seconds without a new file, after which an unfinished folder counts as abandoned


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, creating it if necessary. If another process has the lock, wait until it's released.

    Leftovers of killed processes are removed, but only after a day. On some file systems, a lock is visible on only one
    machine, so several machines may make the same folder under temporary names, and the first one to finish wins.
    """
    with files.locked(folder / ".lock") as alone:
        for place in folder.glob(_MAKING + "*") if alone else ():
            with suppress(FileNotFoundError):  # the process that made it has just finished
                if time.time() - place.stat().st_mtime > _LEFT_BEHIND:
                    shutil.rmtree(place, ignore_errors=True)
        yield


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder. It is renamed to `folder` when the block ends, or removed if there is an error.

    If another process has created `folder` in the meantime, that folder is kept and the temporary one is removed.
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


def link(path: Path, folder: Path) -> None:
    """Make `path` a relative link to `folder`, atomically. Raises FileExistsError if `path` exists and isn't a link."""
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
