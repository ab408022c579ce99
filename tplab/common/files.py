"""Files that a crash can't corrupt: they are replaced atomically, and only one process at a time writes them."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically. A concurrent reader sees either the old content or the new content, never a mixture.

    The file keeps its mode. If `path` is a link, its target is replaced. If this raises OSError, the old content is
    unchanged.
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
    """Context manager that waits until it can lock a lock file, whose folder is created if necessary.

    Yields False on file systems without locks (some network folders), where several processes may be inside. The
    operating system releases a lock when its process ends, so nothing has to be cleaned up after a killed process.
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
