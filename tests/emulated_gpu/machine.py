"""Run Python on a machine with emulated GPUs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

PATIENCE = 900  # seconds; a busy machine takes ten times as long as an idle one
SITE = Path(__file__).with_name("site")


def on_gpus(gpus: int, *command: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python command on a machine with so many emulated GPUs, with these environment variables besides."""
    if shutil.which("g++") is None:
        pytest.skip("emulated GPUs need g++")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CUDA_"))}
    environment |= {"EMULATED_GPUS": str(gpus), "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}"} | variables
    run = [sys.executable, *command]
    return subprocess.run(run, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def pytest_on(gpus: int, *options: str, marked: str = "gpu", **variables: str) -> int:
    """Run tests, all of which must pass. Returns how many have run; some of those marked `gpu` need more GPUs."""
    done = on_gpus(gpus, "-m", "pytest", "-q", "-m", marked, "-p", "no:cacheprovider", "-n", "0", "--pyargs", *options,
        **variables)  # fmt: skip
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    count = re.search(r"(\d+) passed", done.stdout)
    assert count, done.stdout
    return int(count[1])
