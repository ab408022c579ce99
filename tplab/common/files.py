"""Files that a crash can't corrupt: they are replaced in one step, and written by one process at a time."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


def replace(path: Path, data: bytes) -> None:
    """Write a file in one step: a concurrent reader sees either the old content or the new, never a part of it.

    The file keeps its mode, and a link keeps pointing to the file that is replaced. Raises OSError; the old content is
    still there then.
    """
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Wait until no other process holds this lock file; create its folder if necessary.

    Yields False on a file system without locks (some network folders), where several processes may be inside. The
    operating system releases a lock when its process ends, so a killed process leaves nothing to clean up.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield lock.is_locked
    finally:
        lock.release()
