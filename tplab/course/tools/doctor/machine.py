"""Findings about cores, memory, shared memory, and the loopback interface.

Every function that returns a finding takes the values that it judges as arguments. `look` fetches the real ones.
"""

import importlib.util
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tplab.common import cores as machine
from tplab.common.units import count, size
from tplab.course.tools.doctor.findings import BAD, GOOD, NOTE, Finding

NEEDED = 2**30  # bytes; all cells of chapter 5, the heaviest one, peaks at 850 MiB with its 4 ranks
NCCL_SHARED = 2**30  # bytes; NCCL's guide recommends --shm-size=1g for containers
SHARED = Path("/dev/shm")


def cores(number: int) -> Finding:
    told = f"{count(number, 'core')} for this process"
    if number == 1:
        return Finding("cores", NOTE, f"{told}: ranks take turns, so everything works and takes longer")
    return Finding("cores", GOOD, told)


def memory(available: float, total: float) -> Finding:
    """Return the finding about main memory, given the bytes that are available to a new program and the total."""
    told = f"{size(available)} free of {size(total)}"
    if available >= NEEDED:
        return Finding("memory", GOOD, told)
    mend = (
        "end other programs, and kernels of notebooks that you don't use (in JupyterLab: Kernel, Shut Down All Kernels)"
    )
    return Finding("memory", BAD, f"{told}; a chapter with its ranks takes about {size(NEEDED)}", mend)


def shared_memory(total: float | None, gpus: int) -> Finding:
    """Return the finding about /dev/shm.

    total: its size in bytes, or None if it doesn't exist
    gpus:  how many GPUs PyTorch sees
    """
    if total is None:
        return Finding("shared memory", GOOD, "no /dev/shm here, and none needed")
    told = f"/dev/shm holds {size(total)}"
    if total >= NCCL_SHARED:
        return Finding("shared memory", GOOD, told)
    mend = "start the container with --shm-size=1g; elsewhere, as root: mount -o remount,size=1g /dev/shm"
    if gpus > 1:
        return Finding("shared memory", BAD, f"{told}, too little for NCCL between GPUs", mend)
    return Finding("shared memory", NOTE, f"{told}: little, but ranks on the CPU don't use it", mend)


def loopback(interfaces: list[str], talk: Callable[[], None]) -> Finding:
    """Return the finding about the loopback interface, over which ranks communicate.

    interfaces: the names of the machine's network interfaces
    talk:       tries to send a byte, and may raise OSError
    """
    name = next((name for name in interfaces if name in ("lo", "lo0")), "")
    mend = f"as root: ip link set {name or 'lo'} up"
    if not name:
        there = ", ".join(interfaces) or "none"
        return Finding(
            "loopback", BAD, f"this machine has no interface lo, over which ranks talk (it has: {there})", mend
        )
    try:
        talk()
    except OSError as error:
        return Finding("loopback", BAD, f"127.0.0.1 can't be reached: {error.strerror or error}", mend)
    return Finding("loopback", GOOD, f"127.0.0.1 answers ({name})")


# The functions below look at the real machine


def talk_to_itself() -> None:
    """Send a byte over 127.0.0.1 to this process itself. Raises OSError if it doesn't arrive."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        with socket.create_connection(server.getsockname(), timeout=5) as sender:
            receiver, _ = server.accept()
            with receiver:
                sender.sendall(b"x")
                if receiver.recv(1) != b"x":
                    raise OSError("what was sent did not arrive")


def memory_of(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[float, float]:
    """Return the free and total bytes of the machine, or of the container if its limit is lower."""
    import psutil

    machine = psutil.virtual_memory()
    free, total = float(machine.available), float(machine.total)
    with suppress(OSError, ValueError):  # without a limit, the file is missing or says "max"
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        lines = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cache = next((int(value) for name, value in lines if name == "inactive_file"), 0)  # freed if it's needed
        free, total = min(free, limit - used + cache), min(total, limit)
    return free, total


def look(gpus: int) -> list[Finding]:
    usable = machine.cores()
    shared = shutil.disk_usage(SHARED).total if sys.platform == "linux" and SHARED.is_dir() else None
    return [
        cores(usable),
        # Without psutil, there's no finding about memory, but the one about packages says that psutil is missing
        *([memory(*memory_of())] if importlib.util.find_spec("psutil") else []),
        shared_memory(shared, gpus),
        loopback([name for _, name in socket.if_nameindex()], talk_to_itself),
    ]
