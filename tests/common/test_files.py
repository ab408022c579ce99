"""`tplab.common.files`: a write that fails changes nothing, and only one process is inside a lock."""

import errno
import fcntl
import os
from collections.abc import Callable

import pytest

from tplab.common import files


def test_nothing_changes_where_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.replace(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_mode_and_link_stay(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    files.replace(path, b"old")
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o600)
    link.symlink_to(path)
    files.replace(link, b"new")
    assert link.is_symlink()
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)


def forked(program: Callable[[], object]) -> int:
    """Start a process that runs the program and ends without any cleaning up."""
    pid = os.fork()
    if not pid:
        try:
            program()
        finally:
            os._exit(0)
    return pid


def test_one_process_at_a_time_is_inside_and_a_killed_one_leaves_no_lock_behind(tmp_path):
    counter = tmp_path / "new folder" / "counter"
    lock = counter.with_suffix(".lock")
    with files.locked(lock):  # makes the folder, and can be entered again afterwards
        counter.write_text("0")

    def add() -> None:
        for _ in range(50):
            with files.locked(lock):
                counter.write_text(str(int(counter.read_text()) + 1))

    def die_inside() -> None:
        with files.locked(lock):
            os._exit(0)

    for pid in [forked(program) for program in (add, add, die_inside, add)]:
        os.waitpid(pid, 0)
    assert counter.read_text() == "150"


def test_on_a_file_system_without_locks_the_block_runs_and_knows_it(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with files.locked(tmp_path / "lock") as alone:
        assert not alone
