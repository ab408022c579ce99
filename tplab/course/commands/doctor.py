"""`tplab doctor`: will the course run here, and if not, what fixes it?

`look` yields a finding about each part of the machine. PyTorch runs in a separate process, because an import that
crashes must not end the doctor. The exit code is 0 if nothing is wrong, and 1 if something is.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tplab.common import cores
from tplab.course.notebooks.kernels import PACKAGE_ROOT

GB = 1e9
MEMORY = 1.1  # GB; all cells of chapter 5, the heaviest one, peak at 0.9 GB with its 4 ranks
SHARED = Path("/dev/shm")
SHARED_SIZE = 1.07  # GB; NCCL's guide recommends --shm-size=1g for containers
PATIENCE = 120.0  # seconds; importing torch has taken more than ten on a busy machine
INSTALL = "make lab (or, in your own environment: python -m pip install -c constraints.txt -e .)"
CHOOSE = "PyTorch's own command for this machine: https://pytorch.org/get-started/locally/"
CLOSE = "end other programs, and notebook kernels that you don't use (in JupyterLab: Kernel, Shut Down All Kernels)"
RETRY = "close other programs and try again; if that doesn't help, open an issue with this output"


@dataclass(frozen=True)
class Finding:
    """What we found out about a part of the machine.

    fix:       the command that fixes it, or a sentence that says how to; "" if there is nothing to fix
    is_fault:  whether it keeps chapters from running; if not, it's worth knowing, but every chapter runs
    """

    part: str
    text: str
    fix: str = ""
    is_fault: bool = False


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="will the course run here, and what mends it",
        description="Examine this machine: what is wrong, and the command that mends it.",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    with console.status("looking at this machine"):
        findings = list(look())
    grid = Table.grid(padding=(0, 1))
    for one in findings:
        mark, color = ("✗", "red") if one.is_fault else ("!", "yellow") if one.fix else ("✓", "green")
        grid.add_row(Text(mark, style=color), one.part, Text(one.text, style=color if one.fix else ""))
        if one.fix:
            grid.add_row("", "", Text(f"→ {one.fix}", style="bold"))
    console.print(grid)
    faults = [one.part for one in findings if one.is_fault]
    told = (
        f"{len(faults)} to mend: {', '.join(faults)}." if faults else "Nothing is wrong: every chapter will run here."
    )
    console.print(Text(f"\n{told}", style="bold"))
    return int(bool(faults))


def look() -> Iterator[Finding]:
    """Examine this machine."""
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}")
    several = f"{cores.cores()} for this process. With a single core, ranks take turns, so everything takes longer"
    yield Finding("cores", several)
    free = free_memory() / GB
    if free < MEMORY:
        told = f"only {free:.1f} GB are free, and a chapter with its ranks takes about 1 GB"
        yield Finding("memory", told, CLOSE, is_fault=True)
    else:
        yield Finding("memory", f"{free:.1f} GB free")
    try:
        torch = ask(_TORCH)
    except RuntimeError as error:
        yield Finding("PyTorch", f"it can't be imported: {error}", INSTALL, is_fault=True)
        return
    version, wanted = torch["version"], torch_versions()
    if wanted.contains(version, prereleases=True):
        yield Finding("PyTorch", version)
    else:
        yield Finding("PyTorch", f"this is {version}, but the course needs {wanted}", INSTALL, is_fault=True)
    gpus = torch["gpus"]
    if unseen := [] if gpus else gpus_on_machine():
        yield Finding("GPUs", f"PyTorch sees none of {', '.join(unseen)}: {torch['complaint']}", CHOOSE)
    elif gpus and not torch["nccl"]:
        yield Finding("GPUs", f"PyTorch has no NCCL, so ranks run on the CPU, not on {', '.join(gpus)}", CHOOSE)
    else:
        there = ", ".join(gpus) or "none"
        yield Finding("GPUs", f"{there}. Without any, every chapter runs on the CPU. GPU.md says when they're used")
    if len(gpus) > 1 and SHARED.is_dir():
        shared = shutil.disk_usage(SHARED).total / GB
        if shared < SHARED_SIZE:
            told = f"{SHARED} holds only {shared:.2f} GB, which is too little for NCCL between GPUs"
            fix = f"start the container with --shm-size=1g; elsewhere, as root: mount -o remount,size=1g {SHARED}"
            yield Finding("shared memory", told, fix)
    launches = [(2, "auto")]
    if gpus and torch["nccl"]:
        launches.append((min(2, len(gpus)), "nccl"))
    try:
        broken = ask(f"LAUNCHES = {launches}\n{_RANKS}")
    except RuntimeError as error:
        broken = str(error)
    if broken:
        yield Finding("ranks", f"ranks can't be run:\n{broken}", RETRY, is_fault=True)
    else:
        yield Finding("ranks", "an all-reduce works")


_TORCH = """
import json, os, warnings, torch, torch.distributed as dist
with warnings.catch_warnings(record=True) as complaints:
    warnings.simplefilter("always")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
why = "it can't start CUDA" if torch.version.cuda else f"{torch.__version__} was built without CUDA"
if "CUDA_VISIBLE_DEVICES" in os.environ:
    why += f" (CUDA_VISIBLE_DEVICES is '{os.environ['CUDA_VISIBLE_DEVICES']}', which may hide GPUs)"
print(json.dumps({
    "version": torch.__version__, "gpus": [torch.cuda.get_device_name(number) for number in range(count)],
    "complaint": str(complaints[0].message).strip().split(chr(10))[0] if complaints else why,
    "nccl": dist.is_available() and dist.is_nccl_available(),
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


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the free bytes of the machine, or of the container if its limit leaves less."""
    free = float(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # without a limit, the file is missing or says "max"
        used = int((cgroup / "memory.current").read_text())
        lines = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used -= sum(int(value) for name, value in lines if name == "inactive_file")  # freed if it's needed
        free = min(free, int((cgroup / "memory.max").read_text()) - used)
    return free
