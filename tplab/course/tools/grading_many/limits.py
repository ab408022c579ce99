"""The limits of one check, and the means by which the operating system enforces them without root.

    limits per process (rlimits)    file size, memory, number of processes, no core files            Linux, macOS
    its own session                 no terminal to write to                                          Linux, macOS
    a scrubbed environment          no tokens or keys; HOME and TMPDIR are folders of the copy       Linux, macOS
    a process namespace             sees and signals only its own processes; ends as a whole         Linux, if allowed
    Landlock                        writes only into its copy, reads only Python, tplab and system   Linux 5.13 or newer

This isn't a container. See CONTRIBUTING.md, "Grade a class", for what remains possible.
"""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tplab.course.notebooks.kernels import HAS_GPU, PACKAGE_ROOT

PASSED_ON = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH",
             "DYLD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "OMP_NUM_THREADS", "TPLAB_BACKEND")  # fmt: skip
NAMESPACE = ["--user", "--map-current-user", "--pid", "--fork", "--mount-proc", "--ipc", "--kill-child"]
SPARE_TASKS = 2_000  # the system's limit is per user, so we allow this many more processes; jobs.py counts exactly
OPEN_FILES = 4_096
# The share of the memory limit for a single process, and of the disk limit for a single file. It's below 1 so that a
# cell which uses too much fails with an error of its own before the whole check has to be stopped
ONE_PROCESS = 0.75

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38  # from linux/prctl.h
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 24, 36
CAPABILITIES = 64
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, the same on every processor
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15  # from linux/landlock.h
_SCOPED = 1 | 2  # restricts abstract sockets and signals
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL  # what a rule about a file may allow


@dataclass(frozen=True)
class Limits:
    """The limits of one check: seconds in total and per cell, bytes of memory and files, and number of processes."""

    seconds: float
    cell: float
    memory: int
    disk: int
    processes: int


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def environment(scratch: Path) -> dict[str, str]:
    """Return a worker's environment, with only what Python needs from this one, plus folders of its own."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    own = {"HOME": str(scratch / "home"), "TMPDIR": str(scratch / "tmp"), "PYTHONPATH": path}
    return {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"} | kept | own


def namespace() -> list[str]:
    """Return the beginning of a command line that runs a worker in a process namespace, or [] if that isn't allowed.

    In the namespace, the worker sees only its own processes.
    """
    program = shutil.which("unshare") if sys.platform == "linux" else None
    if program is None:
        return []
    command = [program, *NAMESPACE, "--"]
    with suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run([*command, "true"], capture_output=True, timeout=10).returncode == 0:
            return command
    return []


def landlock_version() -> int:
    """Return the version of Landlock that this operating system offers, or 0 if it offers none."""
    if sys.platform != "linux":
        return 0
    return max(0, ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1))


def protection(prefix: list[str]) -> list[str]:
    """Return sentences that say what protects this machine from a submission, and what doesn't."""
    version = landlock_version()
    told = ["Each submission ran as a copy, with limits on time, memory, files and processes."]
    if prefix:
        told.append("It could not see or signal processes outside its own.")
    elif version < 6:
        told.append(
            "It could signal your other processes, because this system has neither user namespaces nor Landlock 6."
        )
    if version:
        told.append("It could not write outside its copy, and could not read your files or other submissions.")
    else:
        told.append("It could read and change every file that you can, because this system has no Landlock.")
    told.append("The network was open to it.")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        told.append("You are root, for whom the limit on processes is weak. Use an ordinary account.")
    return told


def limit_process(limits: Limits) -> None:
    """Set the limits of this process and of all that it will start. They can't be raised again without root."""
    import resource

    def lower(kind: int, value: int) -> None:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with suppress(OSError, ValueError):  # macOS defines some of these limits but doesn't support them
            resource.setrlimit(kind, (value, value))

    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_FSIZE, int(limits.disk * ONE_PROCESS))
    lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    lower(resource.RLIMIT_NPROC, _tasks() + SPARE_TASKS)
    if not HAS_GPU:  # CUDA maps far more memory than it uses; jobs.py still watches what it uses
        lower(resource.RLIMIT_DATA, int(limits.memory * ONE_PROCESS))
    for capability in range(CAPABILITIES):  # so that root's children have no special rights here
        prctl(PR_CAPBSET_DROP, capability)
    with suppress(OSError):  # if memory runs out anyway, the system ends these processes first
        Path("/proc/self/oom_score_adj").write_text("1000")


def _tasks() -> int:
    """Return how many processes and threads this user has."""
    import psutil

    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            count += process.num_threads() if process.uids().real == os.getuid() else 0
    return count


def confine(scratch: Path) -> bool:
    """Allow this process and its children to write only in `scratch`, and to read only what Python and the system need.

    Returns False if Landlock is missing. The course's solutions/ can't be read either, although tplab itself can.
    """
    version = landlock_version()
    if not version:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    handled = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    attributes = struct.pack("=QQQ", handled, 0, _SCOPED if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = libc.syscall(CREATE_RULESET, attributes, size, 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "Landlock made no ruleset")

    def allow(paths: Iterable[Path], access: int) -> None:
        for path in paths:
            with suppress(OSError):  # the path doesn't exist
                descriptor = os.open(path, os.O_PATH)
                mine = access & handled & (-1 if path.is_dir() else _OF_FILES)
                rule = ctypes.create_string_buffer(struct.pack("=Qi", mine, descriptor))
                refused = libc.syscall(ADD_RULE, ruleset, 1, rule, 0)
                os.close(descriptor)
                if refused:
                    raise RuntimeError(f"Landlock refused a rule for {path}: {os.strerror(ctypes.get_errno())}")

    allow(readable(), _READ | _LIST | _EXECUTE)
    allow([PACKAGE_ROOT], _LIST)  # so that tplab is found in it
    allow([scratch], handled)
    allow([Path("/dev/null"), Path("/dev/zero"), Path("/dev/full")], _READ | _WRITE | _TRUNCATE)
    if HAS_GPU:
        allow([Path("/dev")], handled)  # the GPUs, and NCCL's shared memory
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if libc.syscall(RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "Landlock could not be switched on")
    os.close(ruleset)
    return True


def readable() -> list[Path]:
    """Return what a submission may read: the system, Python, the installed packages, and tplab."""
    system = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt", "/nix/store", "/proc", "/sys", "/dev")
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(None, sys.path)}
    python |= set(filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)))
    return [PACKAGE_ROOT / "tplab", *(Path(path) for path in [*system, *sorted(python)] if Path(path) != PACKAGE_ROOT)]
