"""`tplab doctor --gpu`: run the GPU check of a clone (benchmarks/gpu_check) for five minutes, with a report to send us.

The report doesn't contain this machine's host name, user name or paths.
"""

import subprocess
import sys
from pathlib import Path

from tplab.course.tools.doctor.findings import BAD, GOOD, Finding
from tplab.course.tools.doctor.probe import Torch

REPORT = "tplab-gpu-report.md"
SECONDS = 285  # so that the report is ready within five minutes


def obstacle(root: Path, seen: Torch) -> Finding | None:
    """Return the finding that explains why there can't be a report here, or None if there can be one."""
    if not seen.gpus:
        return Finding("GPU check", BAD, seen.error or "PyTorch sees no GPU here", "tplab doctor says why")
    if not (root / "benchmarks" / "gpu_check").is_dir():
        text = f"the tests and benchmarks aren't in {root}"
        return Finding("GPU check", BAD, text, "run this in a clone of the course, or add --root FOLDER")
    probe = subprocess.run([sys.executable, "-c", "import pytest, pytest_timeout"], capture_output=True)
    if probe.returncode:
        return Finding("GPU check", BAD, "pytest isn't installed", "pip install pytest pytest-timeout")
    return None


def look(root: Path, seen: Torch, folder: Path) -> Finding:
    """Run the GPU check, which writes the report to `folder`, and return the finding about it."""
    if (found := obstacle(root, seen)) is not None:
        return found
    report = ("--report", str(folder / REPORT))
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--seconds", str(SECONDS), *report]
    done = subprocess.run(
        command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    )  # fmt: skip
    last = (done.stdout.strip().splitlines() or [f"it ended with status {done.returncode} and without a word"])[-1]
    if done.returncode == 0:
        return Finding("GPU check", GOOD, last)
    return Finding("GPU check", BAD, last, "open an issue and attach the report, so that we can fix it")
