"""Folders that are there whole or not at all, whenever the program is killed, and that one process makes for all.

with locked(shared):                      # the others wait; the lock ends with the process that has it
    with new_folder(shared / "name") as place:
        write(place / "a.bin", [b"..."])  # in shared/.making-name-4f1a09c2, down to the disk
                                          # here it is renamed: shared/name
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
_LEFT_BEHIND = 24 * 3600  # seconds without a new file from which on nobody makes a folder any more


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process is inside for this folder, which is made if need be.

    What killed processes left there is removed a day later, because on some file systems a lock is known to one machine
    only: then several machines may make the same folder, each in a place of its own, and the first one stays.
    """
    with files.locked(folder / ".lock") as alone:
        if alone:
            _remove_what_was_left(folder)
        yield


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A place to write to, which becomes `folder` when the block ends; with an error nothing stays.

    If `folder` is there by then, made by another process, that one is kept.
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
            error.add_note(f"There is no room for {folder}: {_free(folder.parent)}. What was begun has been removed.")
        raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _remove_what_was_left(folder: Path) -> None:
    for place in folder.glob(_MAKING + "*"):
        with suppress(FileNotFoundError):  # its maker is done meanwhile
            if time.time() - place.stat().st_mtime > _LEFT_BEHIND:
                shutil.rmtree(place, ignore_errors=True)


def write(path: Path, chunks: Iterable[bytes]) -> FileSum:
    """Write a file, down to the disk; returns its length and checksum."""
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
    """Make `path` a relative link to `folder`, all at once. FileExistsError if something else than a link is there."""
    if path.is_dir() and path.resolve() == folder.resolve():
        return
    if path.exists() and not path.is_symlink():
        raise FileExistsError(f"{path} should become a link to {folder}, and is something else: move it away")
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    new.symlink_to(os.path.relpath(folder.resolve(), path.parent.resolve()), target_is_directory=True)
    os.replace(new, path)


def _free(folder: Path) -> str:
    return f"{units.size(shutil.disk_usage(folder).free)} are free"
