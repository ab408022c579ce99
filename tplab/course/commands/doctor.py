"""`tplab doctor`: will the course run here, and if not, what fixes it?

FAULTS and REMARKS list what can be wrong, with the command that fixes it. `look` collects the facts they refer to.
PyTorch runs in a separate process, because an import that crashes must not end the doctor. The exit code is 0 if
nothing is wrong, and 1 if something is.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tplab.common import cores
from tplab.course.learn.course_files import Course, add_root, course_or_material
from tplab.course.learn.start import newer
from tplab.course.notebooks.kernels import PACKAGE_ROOT

GB = 1e9
PATIENCE = 120.0  # seconds; importing torch has taken more than ten on a busy machine
INSTALL = "make lab (or, in your own environment: python -m pip install -c constraints.txt -e .)"
CHOOSE = "PyTorch's own command for this machine: https://pytorch.org/get-started/locally/"
RETRY = "close other programs and try again; if that doesn't help, open an issue with this output"


class Fault(NamedTuple):
    """Something that can be wrong.

    when: whether a machine has this fault, given its facts (see `look`)
    text: what is wrong, in terms of the facts
    fix:  the command that fixes it, or a sentence that says how to
    """

    what: str
    when: Callable[[SimpleNamespace], object]
    text: str
    fix: str


FINE = {
    "Python": "{python}, {executable}",
    "PyTorch": "{torch}",
    "GPUs": "{gpus}. Without any, every chapter runs on the CPU. GPU.md says when they're used",
    "notebooks": "their kernel uses this Python",
    "cores": "{cores} for this process. With a single core, ranks take turns, so everything takes longer",
    "memory": "{memory:.1f} GB free",
    "shared memory": "{shared:.1f} GB in /dev/shm",
    "disk": "{disk:.1f} GB free for {folder}",
    "loopback": "127.0.0.1 answers",
    "ranks": "an all-reduce works",
    "chapters": "your copies are up to date",
}
FAULTS = (  # they keep chapters from running
    Fault("PyTorch", lambda m: m.torch_error, "it can't be imported: {torch_error}", INSTALL),
    Fault("PyTorch", lambda m: not m.fits, "this is {torch}, but the course needs {wanted}", INSTALL),
    Fault("PyTorch", lambda m: not m.gloo, "{torch} was built without gloo, which connects ranks", INSTALL),
    Fault(
        "memory",
        lambda m: m.memory < 1.1,  # all cells of chapter 5, the heaviest one, peak at 0.9 GB with its 4 ranks
        "only {memory:.1f} GB are free, and a chapter with its ranks takes about 1 GB",
        "end other programs, and notebook kernels that you don't use (in JupyterLab: Kernel, Shut Down All Kernels)",
    ),
    Fault(
        "loopback",
        lambda m: m.loopback,
        "127.0.0.1 can't be reached: {loopback}",
        "as root: ip link set lo up; and let no firewall block 127.0.0.1",
    ),
    Fault("ranks", lambda m: m.ranks, "ranks can't be run:\n{ranks}", RETRY),
)
REMARKS = (  # they're worth knowing, but every chapter runs
    Fault("GPUs", lambda m: m.gpus and not m.nccl, "PyTorch lacks NCCL, so it can't use {gpus}", CHOOSE),
    Fault(
        "GPUs",
        lambda m: m.unseen and m.visible is not None,
        "PyTorch sees none of {unseen}, because CUDA_VISIBLE_DEVICES is '{visible}'",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    Fault("GPUs", lambda m: m.unseen, "PyTorch sees none of {unseen}: {complaint}", CHOOSE),
    Fault(
        "notebooks",
        lambda m: m.kernel,
        "outside `tplab lab`, notebooks use {kernel}",
        "python -m ipykernel install --sys-prefix, or choose this Python as the notebook's kernel",
    ),
    Fault(
        "shared memory",
        lambda m: m.shared < 1.07,  # NCCL's guide recommends --shm-size=1g for containers
        "/dev/shm holds only {shared:.2f} GB, which is too little for NCCL between GPUs",
        "start the container with --shm-size=1g; elsewhere, as root: mount -o remount,size=1g /dev/shm",
    ),
    Fault(
        "disk",
        lambda m: m.disk < 1,
        "{disk:.1f} GB free for {folder}: checkpoints of the capstone may not fit",
        "free up 1 GB on that disk",
    ),
    Fault("chapters", lambda m: m.newer, "the course has a newer version of {newer}", "tplab update"),
)


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="will the course run here, and what mends it",
        description="Examine this machine: what is wrong, and the command that mends it.",
    )
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    with console.status("looking at this machine"):
        machine = look(course_or_material(options))
    faults, remarks = (first_of_each(table, machine) for table in (FAULTS, REMARKS))
    grid = Table.grid(padding=(0, 1))
    for what, fine in FINE.items():
        found = faults.get(what) or remarks.get(what)
        mark, color = ("✗", "red") if what in faults else ("!", "yellow") if found else ("✓", "green")
        text = (found.text if found else fine).format(**readable(machine))
        grid.add_row(Text(mark, style=color), what, Text(text, style=color if found else ""))
        if found:
            grid.add_row("", "", Text(f"→ {found.fix.format(**readable(machine))}", style="bold"))
    console.print(grid)
    told = (
        f"{len(faults)} to mend: {', '.join(faults)}." if faults else "Nothing is wrong: every chapter will run here."
    )
    console.print(Text(f"\n{told}", style="bold"))
    return int(bool(faults))


def first_of_each(table: tuple[Fault, ...], machine: SimpleNamespace) -> dict[str, Fault]:
    """Return a machine's faults by what is wrong. If several have the same name, the first one in the table counts."""
    return {fault.what: fault for fault in reversed(table) if fault.when(machine)}


def readable(machine: SimpleNamespace) -> dict[str, object]:
    """Return the facts as they appear in texts."""
    return vars(machine) | {name: ", ".join(getattr(machine, name)) or "none" for name in ("gpus", "unseen")}


# The functions below look at the real machine

_TORCH = """
import json, warnings, torch, torch.distributed as dist
with warnings.catch_warnings(record=True) as complaints:
    warnings.simplefilter("always")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
why = "it can't start CUDA" if torch.version.cuda else f"{torch.__version__} was built without CUDA"
there = dist.is_available()
print(json.dumps({
    "torch": torch.__version__, "gpus": [torch.cuda.get_device_name(number) for number in range(count)],
    "complaint": str(complaints[0].message).strip().split(chr(10))[0] if complaints else why,
    "gloo": there and dist.is_gloo_available(), "nccl": there and dist.is_nccl_available(),
}))
"""
_RANKS = """
import json, sys, torch, torch.distributed as dist, tplab

def add_up():
    mine = torch.ones(1, device=tplab.device())
    dist.all_reduce(mine)
    return mine.item()

told = ""
for number, backend in LAUNCHES:
    try:
        sums = tplab.launch(add_up, number, backend=backend)
        told = told or ("" if sums == [number] * number else f"the sums over {backend} are wrong: {sums}")
    except Exception as error:  # whatever the launcher raises
        told = told or str(error)
print(json.dumps(told))
"""


def look(course: Course) -> SimpleNamespace:
    """Collect the facts about this machine and the learner's folder. Sizes are in GB; an empty text means no fault."""
    shared = Path("/dev/shm")
    machine = SimpleNamespace(
        python=platform.python_version(),
        executable=sys.executable,
        torch_error="",
        wanted=torch_versions(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        kernel=other_kernel(),
        cores=cores.cores(),
        memory=free_memory() / GB,
        shared=shutil.disk_usage(shared).total / GB if shared.is_dir() else float("inf"),
        disk=shutil.disk_usage(course.folder).free / GB,
        folder=course.folder,
        loopback=loopback_error(),
        ranks="",
        newer=", ".join(files.stem for files in newer(course)) if course.started else "",
    )
    try:
        vars(machine).update(ask(_TORCH))
    except RuntimeError as error:
        vars(machine).update(torch="", gpus=[], complaint="", gloo=False, nccl=False, torch_error=str(error))
        machine.ranks = "they need PyTorch"
    machine.fits = machine.wanted.contains(machine.torch, prereleases=True) if machine.torch else False
    machine.unseen = [] if machine.gpus or machine.torch_error else gpus_on_machine()
    launches = [(2, "auto")] + [(min(2, len(machine.gpus)), "nccl")] * bool(machine.gpus and machine.nccl)
    if not machine.torch_error:
        try:
            machine.ranks = ask(f"LAUNCHES = {launches}\n{_RANKS}")
        except RuntimeError as error:
            machine.ranks = str(error)
    return machine


def ask(code: str) -> Any:
    """Run code in a separate process and return the JSON on its last line. Raises RuntimeError if that fails."""
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=dict(os.environ, PYTHONPATH=path), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=PATIENCE,
        )  # fmt: skip
        return json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer after {PATIENCE:.0f} seconds") from None
    except (IndexError, ValueError):
        words = done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"]
        raise RuntimeError(words[-1]) from None


def torch_versions() -> SpecifierSet:
    """Return the versions of PyTorch that pyproject.toml allows, or the installed package if that file is missing."""
    path = PACKAGE_ROOT / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"] if path.exists() else {}
    texts = project.get("dependencies") or importlib.metadata.requires("tplab") or []
    return next(found.specifier for found in map(Requirement, texts) if found.name == "torch")


def gpus_on_machine() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists, or [] if there is no nvidia-smi or it fails."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def other_kernel() -> str:
    """Return the Python of Jupyter's default kernel, or "" if it's this one."""
    try:
        from jupyter_client.kernelspec import get_kernel_spec

        program = get_kernel_spec("python3").argv[0]
        ours = os.path.samefile(os.path.dirname(program) or ".", os.path.dirname(sys.executable))
    except (ImportError, KeyError, OSError):  # the package, the kernel or its Python is missing
        return ""
    return "" if ours or not os.path.isabs(program) else program  # "python" is the one that starts the kernel


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the free bytes of the machine, or of the container if its limit leaves less."""
    free = float(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # without a limit, the file is missing or says "max"
        used = int((cgroup / "memory.current").read_text())
        lines = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used -= sum(int(value) for name, value in lines if name == "inactive_file")  # freed if it's needed
        free = min(free, int((cgroup / "memory.max").read_text()) - used)
    return free


def loopback_error() -> str:
    """Return why 127.0.0.1, over which ranks communicate, can't be reached, or ""."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
        return ""
    except OSError as error:
        return error.strerror or str(error)
