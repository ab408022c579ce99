"""What `tplab doctor` finds out: Python and packages, GPUs, cores, memory, disk, loopback, a launch, the chapters.

Every function that returns a Finding takes the values that it judges as arguments, so tests can simulate any fault.
PyTorch is asked in a separate process, because an import that crashes must not end the doctor.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from tplab.common import cores as machine
from tplab.common.units import count, size
from tplab.course.learner.course_files import Course, all_chapters
from tplab.course.notebooks.cells import Unreadable, read_notebook
from tplab.course.notebooks.kernels import PACKAGE_ROOT
from tplab.course.notebooks.numbering import argument

GOOD, NOTE, BAD = "good", "note", "bad"

OLDEST = (3, 11)  # as in pyproject.toml; the Makefile looks for it too
INSTALL = "make lab (or, in your own environment: python -m pip install -c constraints.txt -e .)"
CHOOSE = "PyTorch's own command for this machine: https://pytorch.org/get-started/locally/"
AGAIN = "python -m tplab.course.tools.doctor.findings shows the whole report"
COURSE_RANKS = 8  # as in tplab.runtime.devices: with at least this many GPUs, the course uses NCCL
MEMORY = 2**30  # bytes; all cells of chapter 5, the heaviest one, peak at 850 MiB with its 4 ranks
NCCL_SHARED = 2**30  # bytes; NCCL's guide recommends --shm-size=1g for containers
DISK = 2**30  # bytes; enough for the learner's notebooks and for a run of the capstone with its checkpoints
SHARED = Path("/dev/shm")
PATIENCE = 120.0  # seconds; importing torch has taken more than ten on a busy machine

_TORCH = """
import json, warnings, torch, torch.distributed as dist
with warnings.catch_warnings(record=True) as complaints:
    warnings.simplefilter("always")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
there = dist.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda or "",
    "gpus": [torch.cuda.get_device_name(number) for number in range(count)],
    "complaint": str(complaints[0].message).strip().split(chr(10))[0] if complaints else "",
    "gloo": there and dist.is_gloo_available(), "nccl": there and dist.is_nccl_available(),
}))
"""
_TRIAL = """
import sys; sys.stderr = open('/dev/null', 'w')
from tplab.course.tools.doctor import findings; findings.main({})
"""


@dataclass(frozen=True)
class Finding:
    """The result of examining one thing.

    what:  the name of the thing
    state: "good"; "note" if it's worth knowing, but the course still runs; "bad" if something won't work
    mend:  the command that fixes it, or a sentence that says how to
    """

    what: str
    state: str
    text: str
    mend: str = ""


@dataclass(frozen=True)
class Torch:
    """PyTorch's report on itself and on the GPUs.

    error:     why PyTorch can't be imported, in which case everything else is empty
    cuda:      the CUDA version that PyTorch was built with, or "" for none
    complaint: the warning that PyTorch gave when it looked for GPUs, or ""
    gpus:      the names of the GPUs
    """

    error: str = ""
    version: str = ""
    cuda: str = ""
    complaint: str = ""
    gloo: bool = False
    nccl: bool = False
    gpus: tuple[str, ...] = ()


def ask_torch() -> Torch:
    """Ask PyTorch for its report. A failure, or no answer within PATIENCE seconds, is reported as its `error`."""
    try:
        told = ask(_TORCH, PATIENCE)
    except RuntimeError as error:
        return Torch(error=str(error))
    return Torch(**told | {"gpus": tuple(told["gpus"])})


def ask(code: str, timeout: float) -> dict:
    """Run code in a separate process and return the JSON on its last line. Raises RuntimeError if that fails."""
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=dict(os.environ, PYTHONPATH=path), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=timeout,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer after {timeout:.0f} seconds") from None
    if done.returncode < 0:
        raise RuntimeError(f"its process was ended by signal {-done.returncode}")
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode} and printed no error"]
        raise RuntimeError(words[-1])
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"its answer can't be understood: {done.stdout[-200:]!r}") from None


def python(version: tuple[int, ...], executable: str) -> Finding:
    told = f"{'.'.join(map(str, version[:3]))}, {executable}"
    if version[:2] >= OLDEST:
        return Finding("Python", GOOD, told)
    wanted = ".".join(map(str, OLDEST))
    return Finding("Python", BAD, f"{told}; the course needs {wanted} or newer", f"make lab PYTHON=python{wanted}")


def torch(seen: Torch, wanted: Requirement) -> Finding:
    """Return the finding about PyTorch: whether it can be imported, its version, and its backends."""
    if seen.error:
        return Finding("PyTorch", BAD, f"it can't be imported: {seen.error}", INSTALL)
    if not wanted.specifier.contains(seen.version, prereleases=True):
        return Finding("PyTorch", BAD, f"{seen.version}; the course needs {wanted.specifier}", INSTALL)
    if not seen.gloo:
        return Finding("PyTorch", BAD, f"{seen.version} was built without gloo, which connects ranks", INSTALL)
    return Finding("PyTorch", GOOD, f"{seen.version} with {'gloo and NCCL' if seen.nccl else 'gloo'}")


def packages(requirements: Iterable[Requirement], version_of: Callable[[str], str]) -> Finding:
    """Return the finding about the versions of all packages that the course needs, except for torch (see `torch`).

    version_of: a function that returns a package's installed version, or raises PackageNotFoundError
    """
    wrong = []
    needed = [
        each
        for each in requirements
        if each.name != "torch" and (not each.marker or each.marker.evaluate({"extra": ""}))
    ]
    for requirement in needed:
        try:
            version = version_of(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    if wrong:
        return Finding("packages", BAD, "; ".join(wrong), INSTALL)
    return Finding("packages", GOOD, f"{len(needed)} packages, each in the range that the course needs")


def gpus(seen: Torch, on_machine: list[str], visible: str | None) -> Finding:
    """Return the finding about GPUs and the backend that connects ranks. A machine without GPUs is fine, too.

    on_machine: the names of the GPUs that nvidia-smi lists
    visible:    the value of CUDA_VISIBLE_DEVICES, or None if it isn't set
    """
    number = len(seen.gpus)
    if number and not seen.nccl:
        there = f"{count(number, 'GPU')}, but this PyTorch was built without NCCL, so the course runs on the CPU"
        return Finding("GPUs", NOTE, there, CHOOSE)
    if number >= COURSE_RANKS:
        return Finding("GPUs", GOOD, f"{', '.join(seen.gpus)}. Ranks use NCCL, with one GPU per rank")
    if number:
        told = (
            f"{', '.join(seen.gpus)}. The chapters run on the CPU, because they launch up to {COURSE_RANKS} ranks. "
            f"The capstone uses NCCL for up to {count(number, 'rank')}. So do the chapters with TPLAB_BACKEND=nccl"
        )
        return Finding("GPUs", GOOD, told)
    if not on_machine or seen.error:
        return Finding("GPUs", GOOD, "none, which is all right: every chapter runs on the CPU")
    there = f"this machine has {count(len(on_machine), 'NVIDIA GPU')} ({on_machine[0]}), but PyTorch sees none"
    if visible is not None:
        return Finding("GPUs", NOTE, f'{there}: CUDA_VISIBLE_DEVICES is "{visible}"', "unset CUDA_VISIBLE_DEVICES")
    why = seen.complaint or ("it can't start CUDA" if seen.cuda else f"{seen.version} was built without CUDA")
    return Finding("GPUs", NOTE, f"{there}: {why}. The course runs on the CPU", CHOOSE)


def cores(number: int) -> Finding:
    if number == 1:
        return Finding("cores", NOTE, "1 core for this process: ranks take turns, so everything works but takes longer")
    return Finding("cores", GOOD, f"{number} cores for this process")


def memory(available: float, total: float) -> Finding:
    """Return the finding about main memory, given the bytes that are available to a new program and the total."""
    told = f"{size(available)} free of {size(total)}"
    if available >= MEMORY:
        return Finding("memory", GOOD, told)
    mend = "end other programs, and notebook kernels that you don't use (in JupyterLab: Kernel, Shut Down All Kernels)"
    return Finding("memory", BAD, f"{told}; a chapter with its ranks takes about {size(MEMORY)}", mend)


def shared_memory(total: float | None, gpus: int) -> Finding:
    """Return the finding about /dev/shm, given its size in bytes (None if it doesn't exist) and the number of GPUs."""
    if total is None or total >= NCCL_SHARED:
        return Finding("shared memory", GOOD, "none is needed" if total is None else f"/dev/shm holds {size(total)}")
    mend = "start the container with --shm-size=1g; elsewhere, as root: mount -o remount,size=1g /dev/shm"
    if gpus > 1:
        return Finding("shared memory", BAD, f"/dev/shm holds {size(total)}, too little for NCCL between GPUs", mend)
    return Finding("shared memory", NOTE, f"/dev/shm holds only {size(total)}", mend)


def disk(free: float, folder: Path) -> Finding:
    """Return the finding about the disk that holds the course's folder, given its free bytes."""
    told = f"{size(free)} free for {folder}"
    if free >= DISK:
        return Finding("disk", GOOD, told)
    return Finding(
        "disk", NOTE, f"{told}: checkpoints of the capstone may not fit", f"free up {size(DISK)} on that disk"
    )


def loopback(talk: Callable[[], None]) -> Finding:
    """Return the finding about 127.0.0.1, over which ranks communicate. `talk` sends a byte, and may raise OSError."""
    try:
        talk()
    except OSError as error:
        text = f"127.0.0.1 can't be reached: {error.strerror or error}"
        return Finding("loopback", BAD, text, "as root: ip link set lo up; and let no firewall block 127.0.0.1")
    return Finding("loopback", GOOD, "127.0.0.1 answers")


def chapters(course: Course) -> list[Finding]:
    """Return the finding about the course's folder, and one for each of the learner's notebooks that can't be read."""
    found = []
    files = all_chapters(course).values()
    for each in files:
        try:
            read_notebook(each.learner)
        except Unreadable as error:
            mend = f"tplab reset {argument(each.number)} (it keeps a copy of your notebook)"
            found.append(Finding(each.learner.name, BAD, str(error), mend))
    return found or [Finding("chapters", GOOD, f"{count(len(files), 'notebook')} can be read")]


def ranks(tries: list[tuple[int, str]]) -> Finding:
    """Launch ranks, in a separate process, and return the finding about whether an all-reduce works.

    tries: the number of ranks and the backend of each launch
    """
    try:
        trials = ask(_TRIAL.format(tries), 2 * PATIENCE)["trials"]
    except RuntimeError as error:
        return Finding("ranks", BAD, f"{count(tries[0][0], 'rank')} can't be run: {error}", AGAIN)
    for number, _, problem in trials:
        if problem:
            return Finding("ranks", BAD, f"{count(number, 'rank')} can't be run:\n{problem}", AGAIN)
    each = ", ".join(f"{count(number, 'rank')} over {backend}" for number, backend, _ in trials)
    return Finding("ranks", GOOD, f"an all-reduce works: {each}")


def add_up() -> tuple[float, str]:
    """All-reduce the numbers 1, 2, ... over the ranks, and return the sum and the backend. It runs on every rank."""
    import torch
    import torch.distributed as dist

    import tplab

    mine = torch.tensor([dist.get_rank() + 1.0], device=tplab.device())  # [1]
    dist.all_reduce(mine)
    return mine.item(), dist.get_backend()


def main(tries: list[tuple[int, str]]) -> None:
    """Launch each number of ranks with its backend, and print a JSON list of (ranks, backend, error)."""
    from tplab import launch

    trials = []
    for number, backend in tries:
        wrong = ""
        try:
            sums, backends = zip(*launch(add_up, number, backend=backend), strict=True)
            backend = backends[0]
            if set(sums) != {number * (number + 1) / 2}:
                wrong = f"the sums over {backend} are wrong: {list(sums)}"
        except Exception as raised:  # we want to report whatever the launcher raises
            wrong = str(raised).strip() or type(raised).__name__
        trials.append((number, backend, wrong))
    print(json.dumps({"trials": trials}))


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
                    raise OSError("the byte that was sent didn't arrive")


def requirements() -> list[Requirement]:
    """Return the requirements in pyproject.toml, falling back to those of the installed package."""
    path = PACKAGE_ROOT / "pyproject.toml"
    if path.exists() and sys.version_info >= OLDEST:
        import tomllib  # imported here because older versions of Python don't have it

        texts = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        texts = importlib.metadata.requires("tplab") or []
    return [Requirement(text) for text in texts]


def gpus_on_machine() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists, or [] if there is no nvidia-smi or it fails."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def memory_of(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[float, float]:
    """Return the free and total bytes of the machine, or of the container if its limit is lower."""
    import psutil

    free, total = float(psutil.virtual_memory().available), float(psutil.virtual_memory().total)
    with suppress(OSError, ValueError):  # without a limit, the file is missing or says "max"
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        lines = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cache = next((int(value) for name, value in lines if name == "inactive_file"), 0)  # freed if it's needed
        free, total = min(free, limit - used + cache), min(total, limit)
    return free, total


def examine(course: Course) -> Iterator[Finding]:
    """Yield each finding as soon as it is available."""
    seen = ask_torch()
    needed = requirements()
    yield python(sys.version_info[:3], sys.executable)
    yield torch(seen, next(requirement for requirement in needed if requirement.name == "torch"))
    yield packages(needed, importlib.metadata.version)
    yield gpus(seen, gpus_on_machine(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    yield cores(machine.cores())
    if importlib.util.find_spec("psutil"):  # otherwise the finding about packages says that it's missing
        yield memory(*memory_of())
    there = sys.platform == "linux" and SHARED.is_dir()
    yield shared_memory(shutil.disk_usage(SHARED).total if there else None, len(seen.gpus))
    yield disk(shutil.disk_usage(course.folder).free, course.folder)
    yield loopback(talk_to_itself)
    if not seen.error:
        number = len(seen.gpus) if seen.nccl else 0
        yield ranks([(2, "auto")] + ([(min(2, number), "nccl")] if 0 < number < COURSE_RANKS else []))
    yield from chapters(course)


if __name__ == "__main__":
    main([(2, "auto")])
