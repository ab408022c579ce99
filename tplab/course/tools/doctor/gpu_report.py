"""`tplab doctor --gpu`: run the tests of the GPU path on this machine's GPUs, and write a report to send us.

The report says which GPUs, driver and libraries there are, which tests passed, and what the others printed. It doesn't
contain this machine's host name, user name or paths.
"""

import getpass
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tplab import __version__
from tplab.course.tools.doctor import gpus
from tplab.course.tools.doctor.findings import BAD, GOOD, Finding
from tplab.course.tools.doctor.probe import Torch

REPORT = "tplab-gpu-report.md"
HARMLESS = ("gpu", "root", "localhost")  # names that reveal nothing, and that the tests use in their own names
SECONDS = 270  # time limit for the tests, so that the report is ready within five minutes
_COUNTED = re.compile(r"^=* ?(.*\d+ (?:passed|failed|skipped).*?)=*$", re.MULTILINE)


@dataclass(frozen=True)
class Tests:
    """One run of the tests.

    summary: pytest's last line, or why there is none
    output:  everything that pytest printed
    """

    summary: str
    output: str
    passed: bool


def run_tests(root: Path, scratch: Path) -> Tests:
    """Run the tests marked `gpu` that aren't slow, the most informative ones first, for at most SECONDS."""
    names = ("failures", "pipelines", "grids", "updates", "layers", "tools", "capstone")
    files = [f"tests/gpu/test_{name}.py" for name in names]
    command = [
        sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-n", "0", "-p", "no:cacheprovider", "-v", "-rfE",
        "--tb=short", f"--session-timeout={SECONDS}", f"--basetemp={scratch}", *files,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=SECONDS + 20,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        last = re.findall(r"^(tests/\S+)", printed, re.MULTILINE)[-1:] or ["the first test"]
        return Tests(f"stopped after {SECONDS + 20} s, in {last[0]}", printed, passed=False)
    found = _COUNTED.findall(done.stdout)
    summary = found[-1].strip() if found else "no result"
    return Tests(summary, done.stdout, passed=done.returncode == 0 and "passed" in summary)


def obstacle(root: Path, seen: Torch) -> Finding | None:
    """Return the finding that explains why there can't be a report here, or None if there can be one."""
    if not seen.gpus:
        return Finding("GPU tests", BAD, seen.error or "PyTorch sees no GPU here", "tplab doctor says why")
    if not (root / "tests" / "gpu").is_dir():
        text = f"the tests aren't in {root}"
        return Finding("GPU tests", BAD, text, "run this in a clone of the course, or add --root FOLDER")
    probe = subprocess.run([sys.executable, "-c", "import pytest, pytest_timeout, xdist"], capture_output=True)
    if probe.returncode:
        return Finding("GPU tests", BAD, "pytest isn't installed", "pip install pytest pytest-timeout pytest-xdist")
    return None


def look(root: Path, seen: Torch, folder: Path) -> Finding:
    """Run the tests, write the report to `folder`, and return the finding about the tests."""
    if (found := obstacle(root, seen)) is not None:
        return found
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tplab-") as scratch:
        tests = run_tests(root, Path(scratch, "tests"))
        report = text_of(seen, tests, time.monotonic() - start, {root.resolve(): ".", Path(scratch): "<scratch>"})
    path = folder / REPORT
    path.write_text(report, encoding="utf-8")
    told = f"{tests.summary}. The report is in {path}"
    if tests.passed:
        return Finding("GPU tests", GOOD, told)
    return Finding("GPU tests", BAD, told, "open an issue and attach the report, so that we can fix it")


def text_of(seen: Torch, tests: Tests, seconds: float, folders: dict[Path, str]) -> str:
    """Return the report as Markdown. `folders` maps folders of this machine to what the report calls them."""
    emulated = os.environ.get("EMULATED_GPUS")
    driver = gpus.nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    facts = {
        "tplab": __version__,
        "Python": platform.python_version(),
        "PyTorch": f"{seen.version}, CUDA {seen.cuda or 'none'}",
        "driver": driver[0].strip() if driver else "unknown",
        "GPUs": "; ".join(f"{gpu.name}, {gpu.total / 1e9:.0f} GB" for gpu in seen.gpus),
        "links": found.text if (found := gpus.links(seen.peers, gpus.nvidia_smi("topo", "-m"))) else "one GPU",
        "tests": f"{tests.summary}, {seconds:.0f} s in all",
    }
    lines = ["# tplab on GPUs", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    if emulated:
        lines[1:1] = ["", "**The GPUs were emulated, so this says nothing about real ones.**"]
    return "\n".join([*lines, "```", _without_names(tests.output.strip(), folders), "```", ""])


def _without_names(text: str, folders: dict[Path, str]) -> str:
    for folder, name in {**folders, Path(sys.prefix): "<environment>", Path.home(): "~"}.items():
        text = text.replace(str(folder), name)
    host = platform.node()
    for name, stands_for in ((host, "<host>"), (host.partition(".")[0], "<host>"), (getpass.getuser(), "<user>")):
        if name and name not in HARMLESS:
            text = re.sub(rf"\b{re.escape(name)}\b", stands_for, text)
    return text
