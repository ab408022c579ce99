"""The report as Markdown. It contains no host name, user name, address or path."""

import getpass
import os
import platform
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import tplab
from benchmarks.gpu_check.items import ROOT, Item, Where
from benchmarks.gpu_check.runner import Result, Results
from benchmarks.turns import table

NVIDIA_DEVICE = "/dev/nvidiactl"
HARMLESS = ("gpu", "root", "localhost")  # names that reveal nothing, and that the tests use in their own names
REHEARSALS: dict[Where, str] = {
    "cpu": "**This is a rehearsal on a CPU.** Tests that need a GPU are skipped, and everything else is small.",
    "emulated": "**This is a rehearsal on emulated GPUs.** It says nothing about real ones.",
}


def where() -> Where:
    """Return where the items run. Raises RuntimeError on a machine with a GPU that PyTorch can't use."""
    if not torch.cuda.is_available() and os.path.exists(NVIDIA_DEVICE):
        raise RuntimeError(
            f"this machine has a GPU, but PyTorch {torch.__version__} can't use it. Call this with a Python whose "
            "PyTorch can: python3 -m benchmarks.gpu_check"
        )
    if not torch.cuda.is_available():
        return "cpu"
    return "gpu" if torch.cuda.get_device_name(0) != "emulated GPU" else "emulated"


def facts() -> dict[str, str]:
    """Describe the machine and its software."""
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    names = Counter(f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in gpus)
    found = {
        "tplab": tplab.__version__,
        "Python": platform.python_version(),
        "PyTorch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "GPUs": "; ".join(f"{count} x {name}" for name, count in names.items()) or "none",
    }
    if torch.version.cuda and torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def text_of(facts: Mapping[str, str], place: Where, items: Sequence[Item], results: Results) -> str:
    """Return the report in Markdown, without the names of this machine and its user."""
    parts = ["# tplab on GPUs", *([REHEARSALS[place]] if place in REHEARSALS else ())]
    parts.append("\n".join(f"- {name}: {value}" for name, value in facts.items()))
    known = {item.name: results[item.name] for item in items if item.name in results}
    rows = [(name, outcome_of(result), f"{result.seconds:.0f}") for name, result in known.items()]
    parts.append(table(("item", "outcome", "seconds"), rows))
    if rest := [item.name for item in items if item.name not in results]:
        parts.append(f"Not reached (call it again to go on): {', '.join(rest)}.")
    for name, result in known.items():
        output = result.output.strip().replace("```", "'''")
        parts.append(f"## {name}\n\n```\n{output}\n```")
    return without_names("\n\n".join(parts) + "\n")


def outcome_of(result: Result) -> str:
    """Return a result's state, and for pytest, what its last line says: "failed: 1 failed, 12 passed in 80.12s"."""
    counts = re.findall(r"^=+ (.*\d+ (?:passed|failed|skipped|error).*?) =+$", result.output, re.MULTILINE)
    return f"{result.state}: {counts[-1]}" if counts else result.state


def without_names(text: str) -> str:
    """Replace folders, host name, user name and addresses of this machine by what they stand for."""
    temporary = os.path.realpath(tempfile.gettempdir())
    known = {str(ROOT): ".", temporary: "<temporary>", sys.prefix: "<environment>", str(Path.home()): "~"}
    for folder, name in sorted(known.items(), key=lambda pair: len(pair[0]), reverse=True):
        if folder != "/":
            text = text.replace(folder, name)
    text = re.sub(r"\b(\d{1,3}\.){3}\d{1,3}(?=<\d+>)", "<address>", text)  # as NCCL writes addresses, with their ports
    host = platform.node()
    for name, stands_for in ((host, "<host>"), (host.partition(".")[0], "<host>"), (getpass.getuser(), "<user>")):
        if name and name not in HARMLESS:
            text = re.sub(rf"\b{re.escape(name)}\b", stands_for, text)
    return text
