"""Findings about GPUs, their links, and the backend that ranks will use. A machine without GPUs is fine too."""

import os
import re
import shutil
import subprocess
from itertools import combinations

from tplab.common.units import count, size
from tplab.course.tools.doctor.chapters import COURSE_RANKS
from tplab.course.tools.doctor.findings import GOOD, NOTE, Finding
from tplab.course.tools.doctor.probe import Torch

CHOOSE = "PyTorch's own command for this machine: https://pytorch.org/get-started/locally/"
# Meanings of the links in `nvidia-smi topo -m`, from its legend
PATHS = {
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, across the CPU's parts",
    "SYS": "across two CPUs",
}


def devices(seen: Torch, on_machine: list[str], visible: str | None) -> Finding:
    """Return the finding about GPUs.

    on_machine: the names of the GPUs that nvidia-smi lists
    visible:    the value of CUDA_VISIBLE_DEVICES, or None if it isn't set
    """
    if seen.gpus:
        each = (f"{place}: {gpu.name}, {size(gpu.total)}, {size(gpu.free)} free" for place, gpu in enumerate(seen.gpus))
        return Finding("GPUs", GOOD, "; ".join(each))
    if not on_machine or seen.error:
        return Finding("GPUs", GOOD, "none, which is all right: every chapter runs on the CPU")
    there = f"this machine has {count(len(on_machine), 'NVIDIA GPU')} ({on_machine[0]}), but PyTorch sees none"
    if visible is not None:
        return Finding("GPUs", NOTE, f'{there}: CUDA_VISIBLE_DEVICES is "{visible}"', "unset CUDA_VISIBLE_DEVICES")
    why = seen.complaint or ("it can't start CUDA" if seen.cuda else f"{seen.version} was built without CUDA")
    return Finding("GPUs", NOTE, f"{there}: {why}. The course runs on the CPU", CHOOSE)


def links(peers: list[list[bool]], topology: str) -> Finding | None:
    """Return the finding about the links between GPUs, or None if there are fewer than two GPUs.

    peers:    peers[a][b] is whether GPU a can access GPU b's memory
    topology: the output of `nvidia-smi topo -m`, or ""
    """
    if len(peers) < 2:
        return None
    kinds: dict[str, list[str]] = {}
    table = parse_topology(topology)
    for one, other in combinations(range(len(table or peers)), 2):
        if table:
            kind = link_name(table[one][other])
        else:
            kind = "memory reached directly" if peers[one][other] else "through the main memory"
        kinds.setdefault(kind, []).append(f"{one}-{other}")
    if len(kinds) == 1:
        told = f"every pair: {next(iter(kinds))}"
    else:
        told = "; ".join(f"{', '.join(pairs)}: {kind}" for kind, pairs in kinds.items())
    if not all(all(row) for row in peers):
        told += ". Some GPUs don't reach each other's memory: NCCL sends through the main memory there"
    return Finding("links", GOOD, told)


def parse_topology(text: str) -> list[list[str]]:
    """Parse the table that `nvidia-smi topo -m` prints, or return [] if there is none.

    Entry [a][b] of the result is the name of the link between GPU a and GPU b.
    """
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    head = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    number = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in head)
    table = [row[1 : number + 1] for row in rows if row and row is not head and re.fullmatch(r"GPU\d+", row[0])]
    fits = number > 1 and len(table) == number and all(table[i][i : i + 1] == ["X"] for i in range(number))
    return table if fits and all(len(row) == number for row in table) else []


def link_name(word: str) -> str:
    """Spell out the name of a link: "NV18" becomes "NVLink, 18 links"."""
    wires = re.fullmatch(r"NV(\d+)", word)
    return f"NVLink, {count(int(wires[1]), 'link')}" if wires else PATHS.get(word, word)


def backend(seen: Torch) -> Finding:
    """Return the finding about the backend that `launch` will use to connect ranks."""
    number = len(seen.gpus)
    if not number or not seen.nccl:
        why = "" if not number else ": this PyTorch was built without NCCL"
        state = NOTE if number else GOOD
        return Finding("backend", state, f"gloo, on the CPU, for any number of ranks{why}", CHOOSE if number else "")
    if number >= COURSE_RANKS:
        return Finding("backend", GOOD, f"NCCL, one GPU per rank, for up to {number} ranks")
    return Finding(
        "backend",
        GOOD,
        f"gloo, on the CPU, because the course launches up to {COURSE_RANKS} ranks, all on the same kind of device. "
        f"The capstone uses NCCL for up to {count(number, 'rank')}. So do the chapters with TPLAB_BACKEND=nccl",
    )


# The functions below look at the real machine


def nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi, or "" if it isn't installed or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def look(seen: Torch) -> list[Finding]:
    """Return the findings about this machine's GPUs."""
    names = [line.strip() for line in nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines() if line]
    topology = nvidia_smi("topo", "-m") if len(seen.gpus) > 1 else ""
    found = [
        devices(seen, names, os.environ.get("CUDA_VISIBLE_DEVICES")),
        links(seen.peers, topology),
        backend(seen),
    ]
    return [finding for finding in found if finding]
